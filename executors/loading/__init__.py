"""From a model's files to its numbers (`spec`) and its weights, as stored or as plain fp32. No forward pass here."""
