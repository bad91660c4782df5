"""Pictures of runs are drawn only for tests that check them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_kernels.training import report

PLOT = report.plot


@pytest.fixture(scope="module", autouse=True)
def undrawn() -> Iterator[None]:
    """An empty file stands for the picture of a run: drawing takes as long as the steps of a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plot", lambda metrics, picture: picture.write_bytes(b""))
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the picture itself."""
    monkeypatch.setattr(report, "plot", PLOT)
