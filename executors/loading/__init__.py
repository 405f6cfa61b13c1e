"""From a model's files to plain fp32 weights in one layout and naming, whatever the files' own. No forward pass here."""
