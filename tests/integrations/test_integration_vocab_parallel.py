"""Adapters of trainers on logits and heads that are cut over two tensor-parallel ranks.

The trainers' own functions run where their packages are on the path, see trainers.py."""

from __future__ import annotations

import pytest
from integration_vocab_parallel_checks import OWN, is_installed

from support.processes import checks_of, run_checks

MODULE = "integration_vocab_parallel_checks"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(MODULE, 2, tmp_path_factory.mktemp("ranks2"))


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_on_two_ranks(results: dict[str, str], check: str) -> None:
    if check in OWN and not is_installed(OWN[check]):
        pytest.skip(f"{OWN[check]} is not installed")
    assert results[check] == "ok", results[check]
