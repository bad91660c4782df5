"""TokenSets.from_logits: the ids that samplers keep. The oracle follows the order of each sampler, in float64, one row at a
time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_kernels import TokenSets, token_set_rules
from support.sets import assert_facts, examples, ints, lists

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan

#: If a sum of probabilities is this near to top_p, or a probability to min_p, fp32 and fp64 may decide differently.
MARGIN = 1e-5


# ---- the oracle: a row [V] of fp64 logits over the temperature -> those that stay, others -inf; near says how near it was


class Oracle:
    def __init__(self) -> None:
        self.near = INF

    def top_k(self, z: Tensor, k: int | None) -> Tensor:
        if k is None or k < 1 or k >= len(z):
            return z
        return torch.where(z >= z.sort(descending=True).values[k - 1], z, -INF)

    def top_p(self, z: Tensor, p: float | None) -> Tensor:
        """Ascending, of equal ones those with the larger id first; a sum that stays at or below 1 - p goes."""
        if p is None or p == 1:
            return z
        order = z.flip(0).sort(stable=True).indices
        ascending = len(z) - 1 - order
        sums = z.softmax(0)[ascending].cumsum(0)
        self.near = min(self.near, float((sums - (1 - p))[sums > 0].abs().min()))
        gone = sums <= 1 - p
        gone[-1] = False
        return z.index_fill(0, ascending[gone], -INF)

    def min_p(self, z: Tensor, p: float | None) -> Tensor:
        if not p:
            return z
        share = z.softmax(0) / z.softmax(0).max()
        self.near = min(self.near, float((share[share < 1] - p).abs().min()) if (share < 1).any() else INF)
        return torch.where(share >= p, z, -INF)

    def kept(self, logits: Tensor, order: str, temperature: float, k: Any, p: Any, m: Any) -> list[int]:
        z = logits.double() / (max(temperature, 0.01) if order == "vllm" else temperature)
        if order == "vllm":
            z = self.top_p(self.top_k(self.min_p(z, m), k), p)
        elif m:
            z = self.min_p(self.top_p(self.top_k(z, k), p), m)
        else:
            z = torch.where(self.top_k(z, k) > -INF, self.top_p(z, p), -INF)
        return (z > -INF).nonzero()[:, 0].tolist()


def oracle(logits: Tensor, order: str, temperature: float = 1.0, **rules: Any) -> tuple[list[list[int]], float]:
    one = Oracle()
    given = [rules.get(name) for name in ("top_k", "top_p", "min_p")]
    return [one.kept(row, order, temperature, *given) for row in logits.reshape(-1, logits.shape[-1])], one.near


ORDERS = pytest.mark.parametrize("order", ["vllm", "sglang"])


@ORDERS
@examples
@given(
    # A coarse grid: many logits are equal.
    rows=st.lists(st.lists(st.integers(-6, 6) | st.just(-INF), min_size=7, max_size=7), min_size=1, max_size=3),
    grid=st.sampled_from([1.0, 0.5]),
    temperature=st.sampled_from([1.0, 0.7, 2.0, 0.001]),
    top_k=st.sampled_from([None, 0, -1, 1, 2, 3, 7, 9]),
    top_p=st.sampled_from([None, 1.0, 0.05, 0.33, 0.71, 0.9, 0.999]),
    min_p=st.sampled_from([None, 0.0, 0.01, 0.2, 0.77, 1.0]),
)
def test_as_the_samplers_do(
    order: str, rows: list[list[float]], grid: float, temperature: float, top_k: Any, top_p: Any, min_p: Any
) -> None:
    logits = torch.tensor(rows) * grid
    assume((logits > -INF).any(-1).all())
    expected, near = oracle(logits, order, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(near > MARGIN)
    sets = TokenSets.from_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, order=order)
    nothing = (top_k in (None, 0, -1) or top_k >= 7) and top_p in (None, 1) and not min_p
    assert_facts(sets, [[]] * len(rows) if nothing else expected)
    assert sets.ids.dtype == torch.int32


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "rules", [{"top_k": 50}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}], ids=str
)
def test_of_a_model(order: str, dtype: torch.dtype, rules: dict[str, Any]) -> None:
    """Flat and peaked rows of some thousand logits: the sort is of few in the one and of all in the other."""
    g = torch.Generator().manual_seed(1)
    sharpness = torch.tensor([0.01, 0.5, 1.0, 3.0, 8.0])
    logits = (torch.randn(2, 5, 5003, generator=g) * sharpness[:, None]).to(dtype)
    expected, near = oracle(logits, order, 0.8, **rules)
    assert near > 1e-8 and len({len(row) for row in expected}) > (1 if rules.keys() == {"top_k"} and dtype.itemsize == 2 else 0)
    assert lists(TokenSets.from_logits(logits, temperature=0.8, order=order, **rules)) == expected


@ORDERS
def test_the_orders_of_top_k_and_top_p_differ(order: str) -> None:
    """p = .5, .25, .15, .1: of the two largest, .6 is the first alone renormalised (.67), and both where all count."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    expected = {"vllm": [[0]], "sglang": [[0, 1]]}[order]
    assert lists(TokenSets.from_logits(logits, top_k=2, top_p=0.6, order=order)) == expected
    # min_p = .25 leaves out .1; .8 of the rest is the first two (.83), and of all it is three.
    third = {"vllm": [[0, 1]], "sglang": [[0, 1, 2]]}[order]
    assert lists(TokenSets.from_logits(logits, top_p=0.8, min_p=0.25, order=order)) == third


@ORDERS
def test_ties(order: str) -> None:
    """At top-k all stay, at top-p those with small ids, as many as are needed: half of four equal ones is two of them."""
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0, -INF, -INF]])
    assert lists(TokenSets.from_logits(logits, top_k=2, order=order)) == [[1, 2, 4], [0, 1, 2, 3]]
    assert lists(TokenSets.from_logits(logits, top_k=4, order=order)) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    for top_p, expected in ((0.25, [0]), (0.5, [0, 1]), (0.5001, [0, 1, 2]), (0.75, [0, 1, 2]), (0.76, [0, 1, 2, 3])):
        assert lists(TokenSets.from_logits(logits[1], top_p=top_p, order=order)) == [expected]
    assert lists(TokenSets.from_logits(logits, min_p=1.0, order=order)) == [[1, 2, 4], [0, 1, 2, 3]]
    many = torch.zeros(1000)  # more ties than are looked at first
    assert lists(TokenSets.from_logits(many, top_p=0.75, order=order)) == [[*range(750)]]


@ORDERS
@pytest.mark.parametrize(
    "rules", [{"top_k": 3}, {"top_p": 1 - 2**-53}, {"min_p": 1e-300}, {"top_k": 3, "min_p": 1e-300}], ids=str
)
def test_banned_ids_are_never_kept(order: str, rules: dict[str, Any]) -> None:
    """Fewer than top_k are left, and of top_p next to 1 not more than all."""
    for logits in (torch.tensor([1.0, -INF, -INF, 0.5]), torch.tensor([-INF, 0.1, 0.7, -INF, 0.2])):
        expected = [(logits > -INF).nonzero()[:, 0].tolist()]
        assert lists(TokenSets.from_logits(logits, order=order, **rules)) == expected


@ORDERS
def test_nothing_is_left_out(order: str) -> None:
    logits = torch.randn(2, 3, 11)
    off: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 11},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": -1},
        {"top_k": 12},
    )
    for rules in off:
        assert_facts(TokenSets.from_logits(logits, order=order, targets=torch.zeros(2, 3).long(), **rules), [[]] * 6)


@ORDERS
def test_targets_are_put_in(order: str) -> None:
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 8, -100], [9, 3, 2**40, 5]])
    plain = lists(TokenSets.from_logits(logits, top_k=2, order=order))
    expected = [
        sorted({*row, target} if 0 <= target < 9 else row)
        for row, target in zip(plain, targets.flatten().tolist(), strict=True)
    ]
    assert expected != plain
    assert_facts(TokenSets.from_logits(logits, top_k=2, order=order, targets=targets), expected)


def test_temperatures() -> None:
    """One for each token or sequence; vLLM takes at least 0.01."""
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(3))
    each = torch.tensor([[0.3, 1.0, 2.0], [0.7, 0.001, 5.0]])
    for order in ("vllm", "sglang"):
        expected = [oracle(logits[b, t], order, float(each[b, t]), top_p=0.9)[0][0] for b in range(2) for t in range(3)]
        assert lists(TokenSets.from_logits(logits, top_p=0.9, temperature=each, order=order)) == expected
        expected = [oracle(logits[b, t], order, float(each[b, 0]), top_p=0.9)[0][0] for b in range(2) for t in range(3)]
        assert lists(TokenSets.from_logits(logits, top_p=0.9, temperature=each[:, 0], order=order)) == expected
    near = torch.tensor([1.0, 0.999, 0.0])
    cold = {order: lists(TokenSets.from_logits(near, min_p=0.5, temperature=1e-4, order=order)) for order in ("vllm", "sglang")}
    assert cold == {"vllm": [[0, 1]], "sglang": [[0]]}


@pytest.mark.parametrize("rules", [{"top_k": 3}, {"top_p": 0.7, "min_p": 0.01}], ids=str)
def test_strides_and_chunks(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of any strides and leading shape, cut into chunks: the same sets."""
    full = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(5))
    expected, _ = oracle(full[:, :-1], "vllm", **rules)
    for chunk in (1, 60, 10_000):
        monkeypatch.setattr(token_set_rules, "CHUNK", chunk)
        for logits in (full[:, :-1], full[:, :-1].clone(), full[:, :-1].reshape(-1, 20), full.mT.contiguous().mT[:, :-1]):
            assert_facts(TokenSets.from_logits(logits, **rules), expected)
    assert lists(TokenSets.from_logits(full[0, 0], **rules)) == expected[:1]
    assert_facts(TokenSets.from_logits(full[None, :2, :-1], **rules), expected[:14])
    assert_facts(TokenSets.from_logits(full[:, :0], **rules), [])
    assert_facts(TokenSets.from_logits(full[:0, :, 1:], **rules), [])


class Largest(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operation has created."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@ORDERS
@pytest.mark.parametrize("rules", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_no_copy_of_the_logits(order: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are a view: nothing is larger than a chunk of 4 rows, or the ids."""
    monkeypatch.setattr(token_set_rules, "CHUNK", 4 * 500)
    full = (torch.randn(4, 17, 500) * 4).bfloat16()
    with Largest() as made:
        sets = TokenSets.from_logits(full[:, :-1], order=order, **rules)
    assert len(sets.ids) < 2000 and 500 <= made.elements <= max(4 * 500, 2 * len(sets.ids))
    with Largest() as made:
        full[:, :-1].reshape(-1, 500)
    assert made.elements == 4 * 16 * 500  # it is noticed


def test_gradient_and_inference() -> None:
    logits = torch.randn(3, 9, requires_grad=True)
    expected = lists(TokenSets.from_logits(logits, top_p=0.6))
    with torch.inference_mode():
        sets = TokenSets.from_logits(logits * 1, top_p=0.6, temperature=torch.ones(3))
    assert lists(sets) == expected and not sets.ids.is_inference() and not sets.ids.requires_grad


@pytest.mark.parametrize(
    "given, message",
    [
        ({"logits": [[1.0]]}, r"logits is list: pass a float tensor \[..., V\]"),
        ({"logits": ints(1, 2)}, r"logits is torch.int64 \[2\]"),
        ({"logits": torch.zeros(2, 0)}, r"logits is torch.float32 \[2, 0\]"),
        ({"logits": torch.tensor(1.0)}, r"logits is torch.float32 \[\]"),
        ({"logits": torch.tensor([[0.0, 1.0], [NAN, 0.0]])}, "logits are NaN, .inf or all -inf in row 1"),
        ({"logits": torch.tensor([[0.0, 1.0], [INF, 0.0]])}, "logits are NaN, .inf or all -inf in row 1"),
        ({"logits": torch.tensor([[-INF, -INF], [1.0, 0.0]])}, "logits are NaN, .inf or all -inf in row 0"),
        ({"top_k": 1.5}, "top_k=1.5: it is a number of ids; None, 0 or -1 keeps all"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_p": 0.0}, "top_p=0.0: it is a probability above 0, at most 1; None keeps all. A greedy sampler is top_k=1"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": -0.1}, r"min_p=-0.1: it is a share of the largest probability in \[0, 1\]"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"order": "trl"}, 'order=\'trl\': samplers truncate differently: pass "vllm" or "sglang"'),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": torch.tensor([1.0, 0.0])}, "temperature is 0.0 at row 1"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \[3\]"),
        ({"temperature": torch.ones(2, device="meta")}, "temperature is on meta, but the logits are on cpu"),
        ({"targets": ints(1)}, r"targets is torch.int64 \[1\]: pass integers of the logits' leading shape, \[2\]"),
        ({"targets": torch.zeros(2)}, r"targets is torch.float32 \[2\]"),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenSets.from_logits(**{"logits": torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "top_k": 1, **given})


def test_a_row_is_named_as_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_set_rules, "CHUNK", 10)
    logits = torch.zeros(4, 3, 5)
    logits[2, 1, 0] = NAN
    for x in (logits, logits.expand(2, 4, 3, 5)[1], torch.cat([logits, logits], 1)[:, :3]):
        with pytest.raises(ValueError, match="in row 7"):
            TokenSets.from_logits(x, top_k=1)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_lone_top_k_without_ties_is_not_looked_for_in_all_ids(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(7))
    expected, _ = oracle(logits, "vllm", temperature, top_k=6)
    with monkeypatch.context() as patched:
        patched.setattr(token_set_rules, "kept_of", None)
        assert_facts(TokenSets.from_logits(logits, top_k=6, temperature=temperature), expected)
        logits[3] = 1.0  # all are equal
        with pytest.raises(TypeError, match="not callable"):
            TokenSets.from_logits(logits, top_k=6, temperature=temperature)
    before = logits.clone()
    sets = TokenSets.from_logits(logits, top_k=6, temperature=temperature)
    assert sets.mask(40).sum(-1).tolist() == [6, 6, 6, 40, 6] and torch.equal(logits, before)
