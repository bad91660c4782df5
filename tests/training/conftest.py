"""Pictures of runs are drawn only for tests that check them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def undrawn() -> Iterator[pytest.MonkeyPatch]:
    pytest.importorskip("matplotlib")
    from support import runs

    with pytest.MonkeyPatch.context() as patch:
        runs.undrawn(patch)
        yield patch


@pytest.fixture
def drawn(undrawn: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of the picture itself."""
    from support import runs

    undrawn.undo()
    yield
    runs.undrawn(undrawn)
