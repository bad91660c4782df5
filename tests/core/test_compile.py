"""The functions under torch.compile, torch.func and torch.library's own checks: one graph, the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import (
    LogitTransform,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    grpo_loss,
    linear_grpo_loss,
    linear_logprobs,
    token_logprobs,
)
from grpo_kernels.distributed import VocabShard
from grpo_kernels.formulas.surrogates import Surrogate
from grpo_kernels.head import FusedLMHead
from grpo_kernels.layout import logit_rows, whole_rows
from grpo_kernels.objective import Denominators
from grpo_kernels.operators import TracedHidden, TracedLogits
from grpo_kernels.vocabulary.rows import partials_of
from grpo_kernels.vocabulary.stage import VocabularyStage
from support.cases import OBJECTIVES, build, pack
from support.linear_cases import build_linear

Tensor = torch.Tensor
OPS = torch.ops.grpo_kernels


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    # Graphs that were kept on disk know neither how operators have changed since, nor for which vectors they were made.
    with torch.compiler.set_stance("default"), inductor.patch(fx_graph_cache=False):
        with functorch.patch(enable_autograd_cache=False):
            yield
    torch.compiler.reset()


def close(a: Tensor | None, b: Tensor | None, rtol: float = 1e-6) -> None:
    assert a is not None and b is not None
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7)


CHOSEN = (
    "grpo, k3 and entropy",
    "gspo, k3 by the ratio",
    "clip-cov",
    "entropy quantile, bonus of its own",
    "vespo",
    "distillation",
)


#: Padded and packed in turn; the whole product is for -m slow.
LAYOUTS = [
    pytest.param(packed, name, marks=[] if i in (0, packed, 2 + packed, 4 + packed) else [pytest.mark.slow])
    for i, name in enumerate(CHOSEN)
    for packed in (False, True)
]


@pytest.mark.parametrize("packed, name", LAYOUTS)
def test_grpo_loss_is_one_graph(name: str, packed: bool) -> None:
    case = build(transform={"temperature": 0.8, "softcap": 9.0})
    case = pack(case) if packed else case
    objective = OBJECTIVES[name][0]()

    def loss(logits: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        out = grpo_loss(2.0 * logits, batch, objective, transform=case.logit_transform(), backend="cpu")
        return 3.0 * out.loss, out.logps, out.entropy

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = case.logits.clone().requires_grad_()
        values = run(leaf, case.batch())
        values[0].backward()
        results.append([v.detach() for v in values] + [leaf.grad])
    for a, b in zip(*results, strict=True):
        close(a, b)
    assert results[0][-1] is not None and results[0][-1].abs().max() > 1e-3


def test_a_strict_graph_stops_at_nan() -> None:
    """When it runs: there are no values while it is traced."""
    case, objective = build(), Objective.preset("dapo")
    f = case.fields

    def loss(logits: Tensor, old: Tensor) -> Tensor:
        batch = TokenBatch(f["targets"], f["advantages"], mask=f["mask"], old_logps=old)
        return grpo_loss(logits, batch, objective, strict=True).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.logits, f["old_logps"]), loss(case.logits, f["old_logps"]))
    with pytest.raises(RuntimeError, match="old_logps is NaN at a trained token"):
        compiled(case.logits, f["old_logps"] / torch.zeros(()) * 0)


def test_a_batch_made_in_the_graph_and_metrics_outside() -> None:
    case, objective = build(), Objective.preset("gspo", beta=0.1)
    f = case.fields

    def loss(logits: Tensor, old: Tensor, advantages: Tensor, tokens: Tensor) -> Any:
        batch = TokenBatch(f["targets"], advantages, mask=f["mask"], old_logps=old, ref_logps=f["ref_logps"])
        return grpo_loss(logits, batch, objective, normalizer=tokens)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    arguments = (f["old_logps"], f["advantages"], torch.tensor(20.0))
    outs = []
    for run in (loss, compiled):
        leaf = case.logits.clone().requires_grad_()
        out = run(leaf, *arguments)
        out.loss.backward()
        outs.append((out, leaf.grad))
    close(outs[0][1], outs[1][1])
    expected, found = outs[0][0].metrics, outs[1][0].metrics
    assert expected.keys() == found.keys()
    for key in expected:
        close(found[key], expected[key])
    assert torch.equal(outs[1][0].rows.policy_weight, outs[0][0].rows.policy_weight)


@pytest.mark.parametrize(
    "dtype, name",
    [
        (torch.float32, "dapo, k3"),
        (torch.bfloat16, "gspo"),
        pytest.param(torch.bfloat16, "dapo, k3", marks=pytest.mark.slow),
        pytest.param(torch.float32, "gspo", marks=pytest.mark.slow),
    ],
)
def test_linear_grpo_loss_is_one_graph(name: str, dtype: torch.dtype) -> None:
    case, objective = build_linear(dtype), OBJECTIVES[name][0]()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, batch: TokenBatch) -> Tensor:
        return 0.5 * linear_grpo_loss(hidden.sin(), weight, batch, objective, bias=bias).loss

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = case.leaves
        value = run(leaves["hidden"], leaves["weight"], leaves["bias"], case.tokens.batch())
        value.backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves.values())])
    for a, b in zip(*results, strict=True):
        close(a, b, rtol=1e-6 if dtype == torch.float32 else 1e-2)


def test_sparse_gradients_are_one_graph_for_all_seeds_and_lengths() -> None:
    """One graph for the first length and seed, and one for all others."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, options: Options) -> Tensor:
        logps, entropy = linear_logprobs(hidden.sin(), weight, targets, entropy=True, options=options)
        assert entropy is not None
        return (logps - 0.1 * entropy).sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    g = torch.Generator().manual_seed(0)
    for seed, n in enumerate((5, 7, 11, 12)):
        targets, results = torch.randint(61, (n,), generator=g), []
        for run in (loss, compiled):
            leaves = [torch.randn(*shape, generator=g.manual_seed(n)).requires_grad_() for shape in ((n, 8), (61, 8))]
            value = run(*leaves, targets, Options(sparse=Sparse(1 / 16, 10 * seed)))
            value.backward()
            results.append([value.detach(), *(leaf.grad for leaf in leaves)])
        for a, b in zip(*results, strict=True):
            close(a, b)
    assert counter.frame_count == 2
    number = torch.zeros((), dtype=torch.int64)
    for seed in (0, 30):  # a tensor, which the graph reads
        number.fill_(seed)
        drawn = compiled(*leaves, targets, Options(sparse=Sparse(1 / 16, number)))
        want = torch.autograd.grad(loss(*leaves, targets, Options(sparse=Sparse(1 / 16, seed))), leaves)
        for a, b in zip(torch.autograd.grad(drawn, leaves), want, strict=True):
            close(a, b)
    assert counter.frame_count <= 4


def test_a_frozen_head_and_a_reference() -> None:
    case, other, objective = build_linear(), build_linear(seed=35), Objective(beta=0.3)
    fields = case.tokens.fields | {"ref_logps": None}

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        batch = TokenBatch(**fields)
        reference = (other.hidden, other.weight, other.bias)
        return linear_grpo_loss(hidden, weight, batch, objective, bias=bias, reference=reference).loss

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        hidden = case.hidden.clone().requires_grad_()
        value = run(hidden, case.weight, case.bias)
        value.backward()
        results.append((value.detach(), hidden.grad))
    for a, b in zip(*results, strict=True):
        close(a, b)


@pytest.mark.parametrize("entropy", [False, True, "detached"])
@pytest.mark.parametrize("linear", [False, True])
def test_logprobs_are_one_graph(entropy: bool | str, linear: bool) -> None:
    case = build_linear()
    mask, targets = case.tokens.mask, case.tokens.targets
    g = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, *targets.shape, generator=g)

    def value(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"mask": mask, "entropy": entropy, "transform": LogitTransform(0.9)}
        if linear:
            logps, H = linear_logprobs(hidden, weight, targets, bias=bias, **options)
        else:
            logps, H = token_logprobs(torch.nn.functional.linear(hidden, weight, bias), targets, **options)
        total = (logps * a).sum()
        return (total if H is None else total + (H * b).sum()), logps

    results = []
    for run in (value, torch.compile(value, fullgraph=True, backend="aot_eager")):
        leaves = case.leaves
        total, logps = run(leaves["hidden"], leaves["weight"], leaves["bias"])
        total.backward()
        results.append([total.detach(), logps.detach(), *(leaf.grad for leaf in leaves.values())])
    for x, y in zip(*results, strict=True):
        close(x, y, rtol=3e-6)


def test_inductor() -> None:
    """The default compiler, in bf16 under autocast, forward and backward."""
    case, objective = build_linear(torch.bfloat16), Objective.preset("dapo", beta=0.04)
    case.weight = case.weight.float()

    def loss(hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_grpo_loss(torch.tanh(hidden), weight, batch, objective).loss

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True)):
        leaves = case.leaves
        value = run(leaves["hidden"], leaves["weight"], case.tokens.batch())
        value.backward()
        results.append((value.detach(), leaves["hidden"].grad, leaves["weight"].grad))
    for a, b in zip(*results, strict=True):
        close(a, b, rtol=2e-2)


GSPO, DAPO = (Objective.preset(name, entropy_coef=0.1) for name in ("gspo", "dapo"))


def of_views(logits: Tensor, hidden: Tensor, matrix: Tensor, batch: TokenBatch) -> Tensor:
    """All operators on views: logits [T, B, V], hidden states [T, B, H] and a head [H, V]."""
    logits, hidden, weight = logits.transpose(0, 1), hidden.transpose(0, 1), matrix.t()
    loss = grpo_loss(logits, batch, GSPO).loss + linear_grpo_loss(hidden, weight, batch, DAPO).loss
    drawn = linear_logprobs(hidden.contiguous(), weight.contiguous(), batch.targets, options=Options(sparse=Sparse(1 / 16)))
    for logps, _ in (token_logprobs(2.0 * logits, batch.targets), linear_logprobs(hidden.sin(), weight, batch.targets), drawn):
        loss = loss + logps.sum()
    return loss


def test_inductor_with_views() -> None:
    """Their gradients are stored in the layout that inductor expects."""
    g, (B, T, V, H) = torch.Generator().manual_seed(0), (3, 5, 17, 8)
    targets = torch.randint(V, (B, T), generator=g)
    batch = TokenBatch(targets, torch.randn(B, 1, generator=g), old_logps=-torch.rand(B, T, generator=g))
    memory, results = [torch.randn(*shape, generator=g) for shape in ((T, B, V), (T, B, H), (H, V))], []
    for run in (of_views, torch.compile(of_views, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in memory]
        value = run(*leaves, batch)
        value.backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert a.abs().max() > 1e-3


def test_lengths_and_new_tensors_compile_nothing() -> None:
    """Two graphs for any number of rows: that of the first shape, and the symbolic one."""
    counter = CompileCounterWithBackend("aot_eager")

    def loss(logits: Tensor, batch: TokenBatch, objective: Objective, temperature: Tensor, tokens: Tensor) -> Tensor:
        return grpo_loss(logits, batch, objective, transform=LogitTransform(temperature), normalizer=tokens).loss

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    g = torch.Generator().manual_seed(0)
    for n in (5, 7, 11, 12, 30, 64, 3):
        logits, targets = torch.randn(n, 17, generator=g), torch.randint(17, (n,), generator=g)
        old, advantages = -2 - torch.rand(n, generator=g), torch.randn(n, generator=g)
        batch = TokenBatch(targets, advantages, old_logps=old, mask=torch.ones(n, dtype=torch.bool))
        # A new but equal objective, a schedule of the temperature or another normaliser must not cause a compilation.
        arguments = (batch, Objective.preset("dapo"), torch.tensor(0.5 + n / 10), torch.tensor(n + 1.0))
        leaves = [logits.clone().requires_grad_() for _ in range(2)]
        values = [run(leaf, *arguments) for run, leaf in zip((loss, compiled), leaves, strict=True)]
        for value in values:
            value.backward()
        close(values[1], values[0])
        close(leaves[1].grad, leaves[0].grad)
    assert counter.frame_count == 2


def test_padded_batches_of_any_shape_make_three_graphs() -> None:
    """One graph for the first shape, and one more for each dimension that changes."""
    counter, objective = CompileCounterWithBackend("aot_eager"), Objective.preset("grpo")
    compiled = torch.compile(lambda x, b: grpo_loss(x, b, objective).loss, fullgraph=True, backend=counter)
    g = torch.Generator().manual_seed(0)
    for shape in ((4, 5), (4, 7), (5, 9), (6, 4), (8, 8), (3, 11), (7, 2)):
        targets = torch.randint(17, shape, generator=g)
        batch = TokenBatch(targets, torch.randn(shape[0], generator=g), mask=torch.ones(shape, dtype=torch.bool))
        logits = torch.randn(*shape, 17, generator=g)
        close(compiled(logits, batch), grpo_loss(logits, batch, objective).loss)
    assert counter.frame_count == 3


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    case, objective = build(), Objective()

    def loss(logits: Tensor) -> Tensor:
        return grpo_loss(logits, case.batch(), objective).loss

    graphs = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(loss, fullgraph=True, backend=look)
    with torch.no_grad():
        close(compiled(case.logits.clone().requires_grad_()), loss(case.logits))
    compiled(case.logits)
    assert len(graphs) == 2
    for graph in graphs:
        names = [str(n.target) for n in graph.graph.nodes]
        assert any("grpo_kernels.stats" in name for name in names) and not any("pull" in name for name in names)


def test_a_model_with_a_fused_head_compiles() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(24, 24)
            self.lm_head = FusedLMHead(torch.nn.Linear(24, 61))

        def forward(self, x: Tensor, batch: TokenBatch, objective: Objective) -> Tensor:
            return self.lm_head(torch.tanh(self.body(x)), batch, objective, temperature=0.7).loss

    torch.manual_seed(0)
    case, model, objective = build_linear(), Model(), Objective.preset("gspo")
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = run(case.hidden, case.tokens.batch(), objective)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
    for a, b in zip(*results, strict=True):
        close(a, b)


# ---- torch.library's own checks


class Calls(TorchDispatchMode):
    """Calls of our operators: (name, arguments, results)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "grpo_kernels":
            self.seen.append((function._opname, args, result))
        return result


def called(source: Any, tensors: tuple[Any, ...], targets: Tensor, read: Tensor | None = None) -> Calls:
    """The operators of a stage, forward and backward."""
    statistics, rows = ("entropy",), (targets, read, 1.0, 0.0, 0.7)
    with Calls() as calls:
        results = VocabularyStage.apply(source, statistics, statistics, partials_of(statistics), *rows, *tensors)
        (results[0].sum() + results[1].sum()).backward()
    return calls


def sources(device: str = "auto", dtype: torch.dtype = torch.float32) -> Iterator[tuple[Any, bool]]:
    """The sources that put operators into a graph, and whether they take hidden states."""
    yield TracedLogits(device, False), False
    yield TracedHidden(device, False, dtype), True
    yield TracedHidden(device, False, dtype, Sparse(1 / 16)), True


OPERATORS = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("grpo_kernels::")}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_opcheck(name: str) -> None:
    case = build_linear()
    leaves, targets, read = case.leaves, case.tokens.targets.flatten(), case.tokens.mask.flatten()
    hidden = (leaves["hidden"].flatten(0, 1), leaves["weight"], leaves["bias"])
    logits = (case.logits(torch.float32)[0].detach().requires_grad_(),)
    calls = [call for source, linear in sources() for call in called(source, hidden if linear else logits, targets, read).seen]
    arguments = next(args for found, args, _ in calls if found == name)
    given = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    found = torch.library.opcheck(getattr(OPS, name).default, given)
    assert set(found.values()) == {"SUCCESS"}, found


#: Views of memory of another layout: (the shape of the memory of [a, b, c], the view).
VIEWS: dict[str, tuple[Callable[[int, int, int], tuple[int, ...]], Callable[[Tensor], Tensor]]] = {
    "whole": (lambda a, b, c: (a, b, c), lambda x: x),
    "rows in turn": (lambda a, b, c: (b, a, c), lambda x: x.transpose(0, 1)),
    "columns first": (lambda a, b, c: (a, c, b), lambda x: x.transpose(1, 2)),
    "columns of more": (lambda a, b, c: (a, b, c + 3), lambda x: x[..., 1:-2]),
    "every other column": (lambda a, b, c: (a, b, 2 * c), lambda x: x[..., ::2]),
    "one row for all": (lambda a, b, c: (1, 1, c), lambda x: x),
}


def seen_as(view: str, shape: tuple[int, int, int], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    of, through = VIEWS[view]
    x = through(torch.randn(*of(*shape), generator=g).to(dtype))
    return x.expand(shape) if view == "one row for all" else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("view", VIEWS)
def test_fake_results_are_laid_out_like_real_ones(view: str, dtype: torch.dtype, backend: str) -> None:
    """Of every operator: a compiler plans memory and kernels by what the fake one says."""
    g, names, fake_mode = torch.Generator().manual_seed(0), set(), FakeTensorMode()
    for A, T, V, H in ((2, 3, 7, 4), (1, 1, 7, 4), (3, 1, 1, 1), (0, 3, 7, 4)):
        targets = torch.randint(V, (A * T,), generator=g)
        logits = logit_rows(seen_as(view, (A, T, V), dtype, g), torch.Size((A, T)), targets.device, False)
        hidden, weight = seen_as(view, (A, T, H), dtype, g).reshape(-1, H), seen_as(view, (1, V, H), dtype, g)[0]
        bias = torch.randn(V, generator=g)
        for source, linear in sources(backend, dtype):
            of_head = [whole_rows(hidden), whole_rows(weight), bias]  # as `check_head` gives them to the sources
            tensors = [x.detach() for x in (of_head if linear else [logits])]
            for wanted in (range(len(tensors)), *([(0,), (1,)] if linear else [])):
                for i, x in enumerate(tensors):
                    x.requires_grad_(i in wanted)
                for name, given, results in called(source, tuple(tensors), targets).seen:
                    with fake_mode as mode:
                        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
                        fake = getattr(OPS, name)(*fakes)
                    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (results, fake)), strict=True)
                    for real, planned in pairs:
                        layouts = [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in (real, planned)]
                        assert layouts[0] == layouts[1], (name, [x.shape for x in given if isinstance(x, Tensor)])
                    names.add(name)
    assert names == OPERATORS


# ---- torch.func, and uses that are refused


def test_gradients_by_torch_func() -> None:
    case, objective = build(), Objective.preset("gspo", beta=0.1)
    leaf = case.logits.clone().requires_grad_()
    grpo_loss(leaf, case.batch(), objective).loss.backward()
    found, value = torch.func.grad_and_value(lambda x: grpo_loss(x, case.batch(), objective).loss)(case.logits)
    close(found, leaf.grad)
    close(value, grpo_loss(case.logits, case.batch(), objective).loss)
    logps = torch.func.grad(lambda x: token_logprobs(x, case.targets, mask=case.mask)[0].sum())(case.logits)
    leaf = case.logits.clone().requires_grad_()
    token_logprobs(leaf, case.targets, mask=case.mask)[0].sum().backward()
    close(logps, leaf.grad)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("linear", [False, True])
def test_a_vjp_is_the_gradient_and_has_none_itself(linear: bool, grad_mode: bool) -> None:
    """torch.func.vjp calls the backward after its level has ended."""
    case, scale = build_linear(), torch.tensor(1.5)
    hidden, weight, tokens = case.hidden, case.weight.clone().requires_grad_(), case.tokens

    def functions() -> Iterator[Callable[[Tensor], Tensor]]:
        for preset in ("dapo", "gspo"):
            objective, batch = Objective.preset(preset, entropy_coef=0.1), tokens.batch()
            if linear:
                yield lambda h, b=batch, o=objective: linear_grpo_loss(h, weight, b, o).loss
            else:
                yield lambda h, b=batch, o=objective: grpo_loss(h @ weight.T, b, o).loss

    for function in functions():
        leaf = hidden.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(leaf), leaf, scale)
        with torch.set_grad_enabled(grad_mode):
            _, vjp = torch.func.vjp(function, hidden)
            (found,) = vjp(scale)
        close(found, expected, rtol=1e-5)
        assert expected.abs().max() > 1e-3
        assert found.requires_grad == grad_mode  # with respect to the weight
        if grad_mode:
            with pytest.raises(RuntimeError, match="no second derivatives"):
                found.square().sum().backward()


@pytest.mark.parametrize("preset", ["dapo", pytest.param("gspo", marks=pytest.mark.slow)])
def test_a_graph_over_hidden_states_and_a_head_without_gradients(preset: str) -> None:
    """Evaluation that forgot no_grad."""
    case, objective = build_linear(), Objective.preset(preset)

    def values(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logps, _ = linear_logprobs(hidden, weight, case.tokens.targets, mask=case.tokens.mask)
        return linear_grpo_loss(hidden, weight, case.tokens.batch(), objective).loss, logps

    compiled = torch.compile(values, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(case.hidden, case.weight), values(case.hidden, case.weight), strict=True):
        assert not found.requires_grad
        close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0,), pytest.param((0, 4), marks=pytest.mark.slow), (2, 0)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    targets = torch.zeros(shape, dtype=torch.int64)
    weight = torch.randn(7, 3)

    def logits_value(x: Tensor) -> Tensor:
        logps, entropy = token_logprobs(x, targets, entropy=True)
        return logps.sum() + entropy.sum()  # type: ignore[union-attr]

    def hidden_value(x: Tensor) -> Tensor:
        logps, entropy = linear_logprobs(x, weight, targets, entropy=True)
        return logps.sum() + entropy.sum()  # type: ignore[union-attr]

    for value, width in ((logits_value, 7), (hidden_value, 3)):
        x = torch.zeros(*shape, width)
        assert torch.func.grad(value)(x).shape == x.shape
        leaf = x.clone().requires_grad_()
        torch.compile(value, fullgraph=True, backend="aot_eager")(leaf).backward()
        assert leaf.grad is not None and leaf.grad.shape == x.shape


@pytest.mark.parametrize("transform", ["none", "func", "compile"])
def test_a_second_derivative_raises(transform: str) -> None:
    case, objective = build(), Objective()

    def functions() -> list[Callable[[Tensor], Tensor]]:
        return [
            lambda x: grpo_loss(x, case.batch(), objective).loss,
            lambda x: token_logprobs(x, case.targets)[0].square().sum(),
        ]

    for function in functions():
        with pytest.raises(
            RuntimeError, match=r"no second derivatives|does not currently support double backward|does not require grad"
        ):
            if transform == "func":
                torch.func.grad(lambda x, f=function: torch.func.grad(f)(x).square().sum())(case.logits)
            else:
                run = torch.compile(function, backend="aot_eager") if transform == "compile" else function
                leaf = case.logits.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(run(leaf), leaf, create_graph=True)
                gradient.square().sum().backward()


def test_a_group_breaks_the_graph_and_torch_func_has_none() -> None:
    case, objective = build(), Objective()

    def loss(logits: Tensor) -> Tensor:
        return grpo_loss(logits, case.batch(), objective, shard=VocabShard(0, 61)).loss

    with pytest.raises(ValueError, match=r"shard is given under torch\.func"):
        torch.func.grad(loss)(case.logits)
    leaf = case.logits.clone().requires_grad_()
    value = torch.compile(loss, backend="aot_eager")(leaf)
    value.backward()
    expected = case.logits.clone().requires_grad_()
    loss(expected).backward()
    close(leaf.grad, expected.grad)
    with pytest.raises(Exception, match="disable"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(case.logits)


def test_metrics_in_the_graph() -> None:
    case, objective = build(), Objective.preset("gspo", beta=0.1)

    def metrics(logits: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
        return grpo_loss(logits, batch, objective).metrics

    found = torch.compile(metrics, fullgraph=True, backend="aot_eager")(case.logits, case.batch())
    expected = metrics(case.logits, case.batch())
    assert found.keys() == expected.keys()
    for name in found:
        close(found[name], expected[name])


def test_autocast_does_not_reach_into_an_operator() -> None:
    case = build_linear(torch.float16)
    results = []
    for way in ("autograd", "func"):
        with torch.autocast("cpu", torch.float16):

            def value(weight: Tensor) -> Tensor:
                return linear_logprobs(case.hidden, weight, case.tokens.targets, mask=case.tokens.mask)[0].sum()

            if way == "func":
                results.append(torch.func.grad(value)(case.weight))
            else:
                leaf = case.weight.clone().requires_grad_()
                results.append(torch.autograd.grad(value(leaf), leaf)[0])
    assert torch.equal(*results)


def TILTED(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    return -(1.0 + params[0]) * advantage * logp, -(1.0 + params[0]) * advantage


@dataclasses.dataclass(frozen=True)
class Tilted(Surrogate):
    """A surrogate with a field that its repr does not show."""

    tilt: float = dataclasses.field(default=0.0, repr=False)

    function = staticmethod(TILTED)

    @property
    def params(self) -> tuple[float, ...]:
        return (self.tilt,)


@pytest.mark.parametrize("graph", [False, True])
def test_surrogates_that_differ_in_a_hidden_field_do_not_share_a_kernel(graph: bool) -> None:
    case = build()

    def loss(x: Tensor, objective: Objective) -> Tensor:
        return grpo_loss(x, case.batch(), objective).loss

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if graph else loss
    plain, tilted = (run(case.logits, Objective(Tilted(tilt))) for tilt in (0.0, 2.0))
    close(tilted, 3.0 * plain)
    assert plain.abs() > 1e-3


def test_an_objective_is_not_forgotten_after_thousands_of_others() -> None:
    case, objective = build(), Objective.preset("dapo", beta=0.123)
    compiled = torch.compile(lambda x: grpo_loss(x, case.batch(), objective).loss, fullgraph=True, backend="aot_eager")
    before = compiled(case.logits)
    schedule = [Objective.preset("dapo", beta=1e-4 * i) for i in range(1, 2001)]
    close(compiled(case.logits), before)
    assert len({o.beta for o in schedule}) == 2000


@pytest.mark.parametrize("kl, entropy", [(None, 5.0), (4.0, None), pytest.param(4.0, 5.0, marks=pytest.mark.slow)])
def test_denominators_with_none_are_those_of_eager_code(kl: float | None, entropy: float | None) -> None:
    case = build()
    objective = Objective(beta=0.1, kl_aggregate="token-sum", entropy_coef=0.1)
    many: Any = Denominators(3.0, None if kl is None else torch.tensor(kl), entropy)  # type: ignore[arg-type]

    def loss(x: Tensor) -> Tensor:
        return grpo_loss(x, case.batch(), objective, normalizer=many).loss

    close(torch.compile(loss, fullgraph=True, backend="aot_eager")(case.logits), loss(case.logits))


@pytest.mark.parametrize("way", ["eager", "compile", "func"])
def test_a_reference_is_refused_alike_in_every_way(way: str) -> None:
    case = build_linear()
    fields, pair = case.tokens.fields, (case.hidden, case.weight)
    assert fields["ref_logps"] is not None
    refused = {
        "ref_logps are both given": (Objective(beta=0.1), pair, fields),
        "with beta=0 nothing looks at it": (Objective(), pair, fields | {"ref_logps": None}),
        r"reference is list: pass \(hidden, weight\)": (Objective(beta=0.1), list(pair), fields | {"ref_logps": None}),
        r"reference is tuple: pass \(hidden, weight\)": (Objective(beta=0.1), pair[:1], fields | {"ref_logps": None}),
    }
    for message, (objective, reference, given) in refused.items():

        def loss(x: Tensor, o: Any = objective, r: Any = reference, g: Any = given) -> Tensor:
            return linear_grpo_loss(x, case.weight, TokenBatch(**g), o, reference=r).loss

        run = {"eager": loss, "compile": torch.compile(loss, backend="aot_eager"), "func": torch.func.grad(loss)}[way]
        with pytest.raises(ValueError, match=message.replace("ref_logps are", "batch.ref_logps are")):
            run(case.hidden.clone())


def test_bad_input_is_refused_when_the_graph_runs() -> None:
    case, objective = build(), Objective()
    compiled = torch.compile(lambda x, b: grpo_loss(x, b, objective).loss, backend="aot_eager")
    compiled(case.logits, case.batch())
    targets = case.targets.clone()
    targets[0, 0] = 61
    with pytest.raises(ValueError, match=r"outside the vocabulary \[0, 61\)"):
        compiled(case.logits, case.batch(targets=targets))
