"""Pictures of runs are drawn only for tests that check them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="package", autouse=True)
def undrawn():
    pytest.importorskip("matplotlib")
    from support import runs

    with pytest.MonkeyPatch.context() as patch:
        runs.undrawn(patch)
        yield patch


@pytest.fixture
def drawn(undrawn):
    """For tests of the picture itself."""
    from support import runs

    undrawn.undo()
    yield
    runs.undrawn(undrawn)
