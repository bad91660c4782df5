"""Runs on the CPU what Triton compiles for a GPU: `program` reads PTX, `machine.c` executes it and
checks each access, and through `launches` Triton's own launches do so.
"""
