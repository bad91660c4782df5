"""The vocabulary stage: statistics of rows of logits, and the gradient that slopes of those statistics give."""
