"""Adapters of trainers on logits and heads that are cut over two tensor-parallel ranks.

The trainers' own functions run where their packages are on the path, see trainers.py."""

from __future__ import annotations

import pytest
from adapters_on_ranks import OWN, is_installed

from support.processes import checks_of

MODULE = "adapters_on_ranks"


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_on_two_ranks(on_ranks, check):
    if check in OWN and not is_installed(OWN[check]):
        pytest.skip(f"{OWN[check]} is not installed")
    assert on_ranks(MODULE, 2)[check] == "ok", on_ranks(MODULE, 2)[check]
