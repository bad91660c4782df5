"""The functions under torch.compile, torch.func and torch.library's own checks:

one graph, the same numbers.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import (
    LogitTransform,
    Objective,
    TokenBatch,
    grpo_loss,
)
from support.call_cases import KINDS, VIEWS, CallCase, legal, problem
from support.inside import rows_of_head, rows_of_logits, traced_stages
from support.public_functions import assert_matches_oracle, run_call, with_func_vjp


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    # Graphs that were kept on disk know neither how operators have changed since, nor for which
    # vectors they were made.
    with torch.compiler.set_stance("default"), inductor.patch(fx_graph_cache=False):
        with functorch.patch(enable_autograd_cache=False):
            yield
    torch.compiler.reset()


def close(a, b, rtol=1e-6):
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7)


graph = partial(torch.compile, fullgraph=True, backend="aot_eager")


def plain(**changes):
    return legal(CallCase(**changes))


# ---- cases

#: What puts another program, other operators or another layout into a graph.
GRAPHS = [
    *(
        plain(
            objective=kind,
            source=("logits", "hidden")[i % 2],
            layout=("padded", "packed")[i // 2 % 2],
        )
        for i, kind in enumerate(KINDS[:7:2])
    ),
    plain(
        objective="gspo", source="hidden", dtype="bfloat16", bias="plain", transform="everything"
    ),
    plain(objective="distillation", transform="per token"),
    plain(objective="dapo, k3", source="hidden", frozen="weight", bias="column"),
    plain(function="logprobs", also="entropy", transform="temperature"),
    plain(function="logprobs", source="hidden", also="detached", bias="column"),
    plain(function="logprobs", lengths=(0,), layout="without offsets"),
    plain(function="logprobs", lengths=(0, 0), source="hidden"),
]
#: What is computed between two graphs.
OUTSIDE = [
    plain(function="logprobs", source="hidden", also="all", kept="some"),
    plain(objective="dapo, entropy", kept="some", missing="full"),
    plain(objective="dapo, exact", source="hidden", other="whole", exact="jsd"),
    plain(function="divergence", exact="jsd", other="listed", tail="ignore"),
    plain(objective="gspo", source="hidden", rows="shared"),
    plain(source="hidden", listed="some"),
]
#: The default compiler: gradients of views are stored in the layout that it expects.
COMPILED = [
    plain(objective="grpo, k3 and entropy", view="columns apart", dtype="bfloat16"),
    plain(objective="gspo", source="hidden", view="transposed", bias="plain"),
]


@pytest.mark.parametrize("case", GRAPHS, ids=str)
def test_one_graph(case):
    assert_matches_oracle(problem(case), run_call(problem(case), call=graph))


@pytest.mark.parametrize("case", OUTSIDE, ids=str)
def test_beside_graphs(case):
    assert_matches_oracle(
        problem(case), run_call(problem(case), call=partial(torch.compile, backend="aot_eager"))
    )


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_inductor(case):
    assert_matches_oracle(
        problem(case), run_call(problem(case), call=partial(torch.compile, fullgraph=True))
    )


# ---- torch.func


@pytest.mark.parametrize(
    "case", [r for r in GRAPHS + OUTSIDE if r.also != "detached" and r.bias == "none"], ids=str
)
def test_torch_func(case, backend):
    assert_matches_oracle(
        problem(case), run_call(problem(case), backend=backend, call=with_func_vjp)
    )


# ---- what compiles again


def test_lengths_and_new_tensors_compile_nothing():
    """One graph for the first shape, and one more for each dimension that changes. A new but equal
    objective, also one that is made in the graph, a schedule of the temperature or another
    normaliser cause none.
    """

    def loss(logits, batch, objective, temperature, tokens):
        objective = objective or Objective.preset("dapo", numerics="trl")
        return grpo_loss(
            logits, batch, objective, transform=LogitTransform(temperature), normalizer=tokens
        ).loss

    packed, padded = [(n,) for n in (5, 7, 12, 3)], [(4, 5), (4, 7), (5, 9), (6, 4)]
    for shapes, graphs in ((packed, 2), (padded, 3)):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(loss, fullgraph=True, backend=counter)
        for shape in shapes:
            old, mask = -2 - torch.rand(shape), torch.ones(shape, dtype=torch.bool)
            batch = TokenBatch(
                torch.randint(17, shape), torch.randn(shape), old_logps=old, mask=mask
            )
            given = (
                batch,
                None if shapes is padded else Objective.preset("dapo"),
                torch.tensor(0.5 + shape[0] / 10),
                torch.tensor(shape[0] + 1.0),
            )
            logits = torch.randn(*shape, 17)
            leaves = [logits.clone().requires_grad_() for _ in range(2)]
            values = [f(leaf, *given) for f, leaf in zip((loss, compiled), leaves, strict=True)]
            torch.autograd.backward(values)
            close(values[1], values[0])
            close(leaves[1].grad, leaves[0].grad)
        assert counter.frame_count == graphs


# ---- torch.library's own checks of every operator


class Calls(TorchDispatchMode):
    """Calls of our operators: (name, arguments)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "grpo_kernels":
            self.seen.append((function._opname, args))
        return result


OPERATORS = {
    name.partition("::")[2]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("grpo_kernels::")
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", ["whole", "transposed", "columns apart"])
def test_opcheck(view, dtype):
    """Of log-probs in a graph, forward and backward, from both sources: also that what a fake call
    says of results, by which a compiler plans, is so.
    """
    x, hidden, weight = (
        VIEWS[view](torch.randn(shape).to(dtype)) for shape in ((2, 3, 61), (2, 3, 8), (61, 8))
    )
    given, targets = (
        (rows_of_logits(x), rows_of_head(hidden.reshape(-1, 8), weight, torch.randn(61))),
        torch.randint(61, (6,)),
    )
    with Calls() as calls:
        for stage, of_hidden in traced_stages("auto", dtype):
            tensors = [x.detach().requires_grad_() for x in (given[1] if of_hidden else [given[0]])]
            results = stage(targets, *tensors)
            (results[0].sum() + results[1].sum()).backward()
    assert {name for name, _ in calls.seen} == OPERATORS
    for name, arguments in calls.seen:
        plain = torch.utils._pytree.tree_map(
            lambda x: x.detach() if isinstance(x, Tensor) else x, arguments
        )
        found = torch.library.opcheck(getattr(torch.ops.grpo_kernels, name).default, plain)
        assert set(found.values()) == {"SUCCESS"}, (name, found)
