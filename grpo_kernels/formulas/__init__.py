"""A token's maths, written once: it runs under torch and inside the kernels."""
