"""Several tokens of a row, and terms at listed ids, in chunks of rows, and digits that rows keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_kernels import Objective, Options, TokenBatch, TokenSets, linear_grpo_loss, linear_logprobs, token_logprobs
from grpo_kernels.rows import ragged, stream
from grpo_kernels.rows.backends import cpu
from support.doors import check
from support.inside import in_chunks, of_a_gpu
from support.recipes import KINDS, Recipe, legal

#: Beyond the pairs of test_combinations.py: an objective that looks at more than its token, each dtype in place and from hidden
#: states, sets, a second stream, terms at listed ids, log-probs at further ids.
SHARED = Recipe(rows="shared", lengths=(7, 5, 0, 6))
RECIPES = [
    *(legal(replace(SHARED, objective=name, source=source, listed=listed)) for name in KINDS for source, listed in (("logits", "none"), ("hidden", "some"))),
    *(replace(SHARED, objective=name, source=source, dtype=dtype, inplace=source == "logits")
      for source in ("logits", "hidden") for dtype in ("bfloat16", "float16") for name in ("grpo, k3 and entropy", "gspo")),
    *(replace(SHARED, rows="own", listed="some", objective=name, source=source)
      for source in ("logits", "hidden") for name in ("grpo, k3 and entropy", "gspo")),
    *(replace(SHARED, objective="gspo", source="hidden", frozen=frozen, layout="packed") for frozen in ("weight", "hidden")),
    replace(SHARED, objective="dapo, k3", kept="some", missing="full", source="hidden"),
    *(replace(SHARED, door="logprobs", source=source, also=also, kept=kept)
      for source in ("logits", "hidden") for also, kept in (("all", "none"), ("at", "some"), ("detached", "none"))),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_rows_in_chunks(recipe, backend, monkeypatch):
    """Also as on a GPU, where the host does not know how many tokens the rows of a chunk have."""
    in_chunks(monkeypatch, 3)
    monkeypatch.setitem(stream.BLOCK_BYTES, "cpu", 4 * 3 * recipe.vocab)
    for known in (("cpu",), ()):
        monkeypatch.setattr(ragged, "READ_AT_ONCE", known)
        check(recipe, backend=backend)


@pytest.mark.skipif(cpu.available() is not None, reason="the compiled module is missing")
@pytest.mark.parametrize("rows, listed", [("shared", "none"), ("own", "some"), ("shared", "some")])
@pytest.mark.parametrize("name", ["dapo, k3", "grpo, k3 and entropy"])
def test_rows_of_logits_are_visited_once_in_cpp(name, rows, listed, monkeypatch):
    """Statistics and gradient are no visits of their own."""
    for visit in ("stats", "pull"):
        monkeypatch.delattr(cpu.Kernels, visit)
    check(replace(SHARED, source="logits", objective=name, rows=rows, listed=listed), backend="cpu")


H, V = 8, 40


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_a_likely_token_beside_one_without_a_slope(frozen):
    """1 - p of a probability near 1 is no difference of numbers that were rounded to bf16, as the rows of a GPU's products are."""
    hidden, weight = torch.ones(1, H), torch.zeros(V, H)
    weight[7], weight[3, :4] = 1.2, 0.3
    found = []
    for scale in (torch.bfloat16, torch.float64):
        x, w = (y.bfloat16().to(scale).requires_grad_() for y in (hidden, weight))
        w.requires_grad_(not frozen)
        if scale == torch.float64:
            (-(x @ w.t()).log_softmax(-1)[0, 7]).backward()
        else:
            batch = TokenBatch(torch.tensor([[3], [7]]), torch.tensor([0.0, 2.0]), rows=torch.zeros(2, 1, dtype=torch.int64))
            with of_a_gpu():
                linear_grpo_loss(x, w, batch, Objective.preset("gspo"), options=Options("eager")).loss.backward()
        found.append([x.grad, w.grad])
    for x, y in zip(*found, strict=True):
        if y is not None:
            torch.testing.assert_close(x.double(), y, rtol=0, atol=2.0**-6 * float(y.abs().max()))


@pytest.mark.parametrize("name", ["dapo", "gspo", "log-probs", "at"])
def test_probabilities_near_1_keep_their_digits(name, backend):
    """From whichever sums their logits are: a log-prob of -1e-5 is none of 1e-6, and below 0."""
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(V, 300, generator=g)
    hidden = weight[:11] * (14.0 + torch.randn(11, 1, generator=g)) / 300
    weight[:, 0] = hidden[:, 0] = 10.0  # 100 in all logits
    rows = torch.arange(11)[:, None].expand(11, 2).reshape(-1)
    # The likely id of a row is its second one.
    targets, weight = V - 1 - torch.where(torch.arange(22) % 2 == 0, rows, rows + 5), weight.flip(0)
    found = []
    for x, of_rows in ((hidden, rows), (hidden[rows], None)):
        if name == "at" and of_rows is not None:  # both tokens of a row as ids that are asked for
            sets = TokenSets.from_padded(targets.view(11, 2))
            logps = linear_logprobs(x, weight, targets[1::2], at=sets, options=Options(backend)).also["at"]
        elif name in ("log-probs", "at"):
            logps, _ = linear_logprobs(x, weight, targets, rows=of_rows, options=Options(backend))
        else:
            batch = TokenBatch(targets, torch.ones(22), rows=of_rows, cu_seqlens=torch.tensor([0, 11, 22]))
            logps = linear_grpo_loss(x, weight.requires_grad_(), batch, Objective.preset(name), options=Options(backend)).logps
        found.append(logps[::2].detach())
    assert (found[0] <= 0).all() and found[1].max() > -1e-5 > -1e-4 > found[1].min()
    torch.testing.assert_close(*found, rtol=2e-2, atol=1.2e-7)


def test_a_row_of_nan_is_nan_in_all_columns_or_none(backend):
    """Whatever arrives at its ids: what cancels, nothing, something."""
    logits, sets = torch.full((3, V), torch.nan, requires_grad=True), TokenSets.from_lists([[2, 3]] * 3)
    at = token_logprobs(logits, torch.arange(3), at=sets, options=Options(backend)).also["at"]
    at.backward(torch.tensor([1.0, -1.0, 0.0, 0.0, 2.0, 1.0]))
    assert logits.grad.isnan().sum(1).tolist() == [V, 0, V]
