"""The configuration document: its types (`schema`) and where its values come from (`load`)."""
