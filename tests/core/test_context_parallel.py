"""Full sequences == 2 shards == 4 shards == packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes import checks_of, run_whole_products

MODULE = "context_parallel_checks"


@pytest.mark.parametrize("check", checks_of(MODULE))
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(on_ranks: Callable[..., dict[str, str]], ranks: int, check: str) -> None:
    assert on_ranks(MODULE, ranks)[check] == "ok", on_ranks(MODULE, ranks)[check]


@pytest.mark.slow
def test_whole_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every objective on four ranks."""
    run_whole_products(MODULE, 4, tmp_path, monkeypatch)
