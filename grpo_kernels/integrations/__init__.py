"""grpo_kernels inside existing trainers, one module per trainer: `from grpo_kernels.integrations import trl`.

Nothing is imported or patched here, and the core imports none of these modules.
"""
