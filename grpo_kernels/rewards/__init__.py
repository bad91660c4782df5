"""Inputs of the loss that are computed before it: advantages, returns, corrections of the mismatch
between sampler and policy, and control of the entropy.
"""
