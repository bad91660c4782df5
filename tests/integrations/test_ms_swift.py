"""ms-swift's own functions for FIPO, SDAR and RLSD beside ours, if it is installed."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
import textwrap
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Clip, NoPolicyTerm, Objective, TokenBatch, objective_loss
from grpo_kernels.formulas.future_kl import FutureKl
from grpo_kernels.rewards.returns import self_distilled_advantages
from support.trainers import DATA, MASK, assert_same, their_file, value_and_gradient

parametrize = pytest.mark.parametrize


def their_method(path: str, name: str) -> Any:
    """A method of a class in a file of ms-swift, as a function; skips if it is not there."""
    spec = importlib.util.find_spec("swift")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("swift is not installed")
    file = Path(spec.submodule_search_locations[0]) / path
    source = file.read_text() if file.exists() else ""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            code = textwrap.dedent(ast.get_source_segment(source, node) or "")
            module = types.ModuleType("of_swift")
            module.__dict__.update(torch=torch, Tuple=tuple, Dict=dict)
            exec(compile(code, str(file), "exec"), vars(module))
            return getattr(module, name)
    pytest.skip(f"this ms-swift has no {name}")


def ratios_apart(scale):
    """Log-probs now and before, some of them far apart."""
    old = DATA.old.double()
    return old + scale * (DATA.logps.double() - old), old


FIPO = {
    "its defaults": {},
    "the script of 32B": {"delta": 10.0, "fipo_safety_threshold": 10.0},
    "both sides": {"fipo_clip_high_only": False, "fipo_clip_range": 0.5, "delta": 1.3},
    "no safety, short": {"fipo_safety_threshold": None, "fipo_decay_rate": 1.5},
}


@parametrize("scale", [1.0, 8.0])
@parametrize("name", FIPO)
def test_fipo(name, scale):
    """The weights, and the loss that is made of them."""
    theirs = their_method("rlhf_trainers/grpo_trainer.py", "_compute_fipo_influence")
    defaults = {"delta": None, "fipo_decay_rate": 32.0, "fipo_clip_range": 0.2}
    defaults |= {"fipo_clip_high_only": True, "fipo_safety_threshold": 4.0}
    o = SimpleNamespace(**defaults | FIPO[name])
    o.args, o.fipo_gamma = o, 2 ** (-1 / o.fipo_decay_rate)
    logps, old = ratios_apart(scale)
    A = (
        DATA.advantages[:, None].expand(MASK.shape)
        if DATA.advantages.dim() == 1
        else DATA.advantages
    )

    def their_loss(x):
        ratio = (x - old).exp()
        weights, _ = theirs(o, x - old, ratio, A.double(), MASK)
        delta = math.inf if o.delta is None else o.delta
        term = -torch.min(ratio.clamp(max=delta) * A, ratio.clamp(0.8, 1.28) * A) * weights
        return (term * MASK).sum() / MASK.sum()

    objective = Objective(
        Clip(0.2, 0.28, delta=o.delta or math.inf),
        future_kl=FutureKl(
            half_life=o.fipo_decay_rate,
            low=1.0 if o.fipo_clip_high_only else 1.0 - o.fipo_clip_range,
            high=1.0 + o.fipo_clip_range,
            cutoff=o.delta or math.inf,
            safety=o.fipo_safety_threshold or math.inf,
        ),
    )
    batch = TokenBatch(torch.zeros(MASK.shape).long(), A, mask=MASK, old_logps=old)
    mine = value_and_gradient(lambda x: objective_loss(x, batch, objective).loss, logps)
    assert_same(mine, value_and_gradient(their_loss, logps, torch.float64))


@pytest.fixture
def advantage_file(monkeypatch):
    before = set(sys.modules)
    yield their_file("swift.rl_core.advantage", monkeypatch, swift__utils={"nanstd": None})
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "swift":
            del sys.modules[name]


@parametrize("scale", [1.0, 20.0])
def test_sdar(advantage_file, scale):
    """Added to a policy loss with a weight, and averaged over tokens."""
    batch = TokenBatch(torch.zeros(MASK.shape).long(), mask=MASK, ref_logps=scale * DATA.ref)
    objective = Objective(NoPolicyTerm(), beta=0.1, kl="sdar")

    def theirs(x):
        return 0.1 * advantage_file.compute_sdar_loss(x, scale * DATA.ref.double(), MASK)[0]

    mine = value_and_gradient(lambda x: objective_loss(x, batch, objective).loss, DATA.logps)
    assert_same(mine, value_and_gradient(theirs, DATA.logps, torch.float64))


@parametrize("negative_only", [False, True])
@parametrize("strength, clip", [(0.5, 0.2), (1.0, 0.0), (0.3, 2.0)])
def test_rlsd(advantage_file, strength, clip, negative_only):
    of_sequence = torch.randn(len(MASK)).double()
    of_sequence[1] = 0.0
    teacher, old = DATA.ref.double(), DATA.old.double()
    theirs = advantage_file.apply_rlsd_reweight(
        of_sequence, MASK, teacher, old, strength, clip, negative_only
    )
    ours = self_distilled_advantages(
        of_sequence[:, None],
        old,
        teacher,
        strength=strength,
        clip=clip,
        negative_only=negative_only,
        mask=MASK,
    )
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-7)
