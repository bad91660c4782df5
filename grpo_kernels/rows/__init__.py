"""The vocabulary stage: statistics of rows of logits, and the gradient of the logits from slopes of those statistics."""
