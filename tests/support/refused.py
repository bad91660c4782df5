"""Refusals as tables: a call that is fine, and what its message must say where some of its arguments are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Refused = list[tuple[Callable[..., Any], dict[str, Any], dict[str, dict[str, Any]]]]


def refusals(table: Refused) -> Any:
    """Parametrise a test by functions that check one refusal each; unknown keywords raise TypeError, all else ValueError."""

    def checked(call: Callable[..., Any], given: dict[str, Any], message: str, changes: dict[str, Any]) -> None:
        call(**given)
        with pytest.raises(TypeError if "no argument" in message else ValueError, match=message):
            call(**{**given, **changes})

    cases = [
        pytest.param(lambda row=(call, given, message, changes): checked(*row), id=message)
        for call, given, messages in table
        for message, changes in messages.items()
    ]
    return pytest.mark.parametrize("refused", cases)
