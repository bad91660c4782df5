"""The compiled module, for the files of the C++ backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import native

if TYPE_CHECKING:
    from ... import _cpu

    _import_error: str
else:
    try:
        _cpu = native.load()
    except ImportError as error:
        _cpu = None
        _import_error = str(error)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def available() -> str | None:
    """None if this backend can run, else the reason in words."""
    if _cpu is None:
        command = native.build_command(native.package())
        return f"the compiled module is missing: {_import_error}. `{command}` builds it, with a C++17 compiler"
    return None
