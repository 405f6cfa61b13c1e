"""From a model's files to plain fp32 weights in one layout and naming. No forward pass here."""
