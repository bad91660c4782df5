"""Per-token inputs of the loss:

advantages, returns, corrections of the sampler mismatch, entropy control.
"""
