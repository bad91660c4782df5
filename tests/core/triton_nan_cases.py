"""The cases of test_nan.py that run in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import pytest
from test_nan import OPTIONS, check

from grpo_kernels.objective import PRESETS

#: One of each kind of formula, from logits or, where the gradient of a row depends on other rows,
#: from hidden states.
CASES = {name: (PRESETS[name], "logits") for name in ("dapo", "dppo_kl", "reinforce")} | {
    "gspo": (PRESETS["gspo"], "hidden"),
    **{name: (OPTIONS[name], "logits") for name in ("a floor and a bonus", "abs, none, clamps")},
}


@pytest.mark.parametrize("name", CASES)
def test_in_triton(name, backend):
    objective, inputs = CASES[name]
    assert check(objective, inputs, backend, (1.0,)) >= 5
