"""The worked example of docs/architecture.md is a real change: applied to a copy, a statistic is there everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from grpo_kernels.rows.backends import cpu
from support.pages import ROOT
from support.processes import finish, start

PACKAGE = ROOT / "grpo_kernels"

#: All statistics with a gradient at once, so that their slopes add up, beside those of float64.
PROGRAM = """
import importlib.machinery, sys
sys.path.insert(0, {folder!r})
sys.meta_path.insert(0, importlib.machinery.PathFinder)  # before the finder of an editable installation
import torch
import grpo_kernels
from grpo_kernels import LogitTransform, Options, TokenSets, linear_logprobs, token_logprobs

def exactly(rows, targets, sets):
    keep = torch.zeros_like(rows, dtype=torch.bool)
    for i, ids in enumerate(sets):
        keep[i, list(ids) or slice(None)] = True
    log_p = (rows / 0.7).masked_fill(~keep, -1e30).log_softmax(1)
    p = log_p.exp()
    return log_p.gather(1, targets[:, None])[:, 0], -(p * log_p.clamp(min=-1e5)).sum(1), (p**2).sum(1), (p**3).sum(1)

assert grpo_kernels.__file__.startswith({folder!r})
torch.manual_seed(0)
hidden, weight, targets, upstream = torch.randn(7, 8), torch.randn(61, 8), torch.randint(61, (7,)), torch.randn(4, 7)
some = [sorted({{int(t), 3, 9, 40}}) if i % 2 else [] for i, t in enumerate(targets)]
for backend in ("eager", "cpu"):
    for given in ((hidden @ weight.T,), (hidden, weight)):
        for sets in ([[]] * 7, some):
            leaves, wide = ([x.detach().to(kind).requires_grad_() for x in given] for kind in (torch.float32, torch.float64))
            function = token_logprobs if len(given) == 1 else linear_logprobs
            asked = {{"also": ("sum_squares", "sum_cubes"), "kept": TokenSets.from_lists(sets), "entropy": True}}
            how = {{"transform": LogitTransform(0.7), "options": Options(backend, strict=True)}}
            found = function(*leaves, targets, **asked, **how)
            values = (found.logps, found.entropy, found.also["sum_squares"], found.also["sum_cubes"])
            expected = exactly(wide[0] if len(wide) == 1 else wide[0] @ wide[1].T, targets, sets)
            for these in (values, expected):
                sum((x * d).sum() for x, d in zip(these, upstream)).backward()
            for x, y in [*zip(values, expected), *((a.grad, b.grad) for a, b in zip(leaves, wide))]:
                torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=5e-6)
"""


def test_a_new_statistic_is_a_change_of_two_files(tmp_path: Path) -> None:
    (change,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^diff --git", change, re.MULTILINE)) == 2
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-p1", "-"], input=change, text=True, cwd=tmp_path, check=True)
    shutil.copy(cpu._cpu.__file__, tmp_path / PACKAGE.name)
    finish(start(PROGRAM.format(folder=str(tmp_path))))
