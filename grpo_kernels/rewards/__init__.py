"""Numbers per token that exist before the loss: advantages, returns, corrections of the sampler, entropy targets."""
