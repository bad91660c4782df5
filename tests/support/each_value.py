"""A pytest plugin that leaves out products of parameters: of each test run so many cases that every value of each of its parameters
occurs, in other combinations where possible. What tests/repository/versions.py runs with --quick; the first that on_device.py runs.

    PYTHONPATH=tests python -m pytest -p support.each_value tests/core/test_grpo_loss.py"""

from __future__ import annotations

import pytest

from support import on_device


@pytest.hookimpl(trylast=True)  # of the tests that are left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_device.in_waves(items)
    left_out = [item for item in items if item.nodeid not in on_device.FIRST]
    items[:] = [item for item in items if item.nodeid in on_device.FIRST]
    config.hook.pytest_deselected(items=left_out)
