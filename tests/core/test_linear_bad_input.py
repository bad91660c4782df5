"""Bad hidden states and heads are refused before any work: a ValueError that names the argument, the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, Objective, TokenBatch, linear_grpo_loss, linear_logprobs
from support.cases import snapshot
from support.linear_cases import assert_gradients_near, gradients_of

B, T, H, V = 3, 4, 8, 11
IDS = torch.arange(B * T).view(B, T) % V
HIDDEN = torch.randn(B, T, H, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
BIAS = torch.ones(V)
META = torch.device("meta")


def logps(hidden: Any = HIDDEN, weight: Any = WEIGHT, targets: Any = IDS, *, backend: str = "eager", **options: Any) -> Any:
    return linear_logprobs(hidden, weight, targets, backend=backend, **options)


def loss(hidden: Any = HIDDEN, weight: Any = WEIGHT, *, ids: Any = IDS, backend: str = "eager", **options: Any) -> Any:
    options = {"batch": TokenBatch(ids, torch.ones(B)), "objective": Objective(), **options}
    return linear_grpo_loss(hidden, weight, backend=backend, **options)


def wild(value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[1, 2] = value
    return ids


Call = Callable[..., Any]

#: What both functions check: (what it is, the call, the parts its message must have)
HEADS: list[tuple[str, Callable[[Call], Any], list[str]]] = [
    # shapes
    ("widths", lambda f: f(HIDDEN, WEIGHT[:, :-1]), ["hidden", "[3, 4, 8]", "weight", "[11, 7]", "must agree"]),
    ("weight transposed", lambda f: f(HIDDEN, WEIGHT.t()), ["hidden", "[3, 4, 8]", "weight", "[8, 11]", "[V, H]"]),
    ("logits for hidden", lambda f: f(HIDDEN @ WEIGHT.t()), ["hidden", "[3, 4, 11]", "[11, 8]", "logits", "grpo_loss"]),
    ("hidden one row short", lambda f: f(HIDDEN[:, :-1]), ["hidden", "[3, 3, 8]", "[3, 4]", "hidden[:, :-1]"]),
    ("hidden one row long", lambda f: f(HIDDEN.repeat(1, 2, 1)[:, :5]), ["hidden", "[3, 5, 8]", "[3, 4]", "ids[:, 1:]"]),
    ("hidden flat", lambda f: f(HIDDEN.view(-1, H)), ["hidden", "[12, 8]", "[3, 4]", "must be"]),
    ("hidden without width", lambda f: f(HIDDEN[..., 0]), ["hidden", "[3, 4]", "hidden size"]),
    ("bias too short", lambda f: f(bias=BIAS[:-1]), ["bias", "[10]", "[11, 8]", "must be [11]"]),
    ("bias as a row", lambda f: f(bias=BIAS[None]), ["bias", "[1, 11]", "must be [11]"]),
    # sharded heads, as their owners leave them
    ("ZeRO-3", lambda f: f(weight=torch.empty(0)), ["weight", "[0]", "ZeRO-3", "GatheredParameters", "full_tensor"]),
    ("FSDP, flat", lambda f: f(weight=WEIGHT.view(-1)), ["weight", "[88]", "sharded", "FSDP", "full_tensor"]),
    ("no rows of the head", lambda f: f(weight=WEIGHT[:0]), ["weight", "[0, 8]", "sharded", "full_tensor"]),
    # dtypes and types
    ("double hidden", lambda f: f(HIDDEN.double()), ["hidden", "torch.float64", "float32, bfloat16 or float16"]),
    ("double weight", lambda f: f(weight=WEIGHT.double()), ["weight", "torch.float64", "float32, bfloat16 or float16"]),
    ("8-bit weight", lambda f: f(weight=WEIGHT.to(torch.int8)), ["weight", "torch.int8", "float32, bfloat16 or float16"]),
    ("integer bias", lambda f: f(bias=BIAS.long()), ["bias", "torch.int64", "float32, bfloat16 or float16"]),
    ("the module", lambda f: f(weight=torch.nn.Linear(H, V)), ["weight", "Linear", "tensor"]),
    ("model output", lambda f: f({"last_hidden_state": HIDDEN}), ["hidden", "dict", "tensor"]),
    # devices
    ("hidden elsewhere", lambda f: f(HIDDEN.to(META)), ["hidden", "meta", "cpu", "move"]),
    ("weight elsewhere", lambda f: f(weight=WEIGHT.to(META)), ["weight", "meta", "cpu", "move"]),
    ("bias elsewhere", lambda f: f(bias=BIAS.to(META)), ["bias", "meta", "cpu", "move"]),
    # values
    ("temperature", lambda f: f(transform=LogitTransform(torch.zeros(B))), ["temperature", "0.0", "above 0"]),
    ("backend", lambda f: f(backend="blas"), ["backend", "'blas'", "eager, cpu, triton"]),
]

CASES: list[tuple[str, Callable[[], Any], list[str]]] = [
    *((f"{what}, {f.__name__}", lambda f=f, call=call: call(f), parts) for what, call, parts in HEADS for f in (logps, loss)),
    ("id past the vocabulary", lambda: loss(ids=wild(V)), ["targets[1, 2]", "11", "[0, 11)", "mask"]),
    ("id -100", lambda: loss(ids=wild(-100)), ["targets[1, 2]", "-100", "[0, 11)", "mask"]),
    ("id of layer 1", lambda: logps(targets=wild(2**40)), ["targets[1, 2]", str(2**40), "[0, 11)", "mask"]),
    ("float targets", lambda: logps(targets=IDS.float()), ["targets", "torch.float32", "int64"]),
    ("float mask", lambda: logps(mask=torch.ones(B, T)), ["mask", "torch.float32", ".bool()"]),
    ("mask", lambda: logps(mask=torch.ones(B).bool()), ["mask", "[3]", "[3, 4]", "the same"]),
    ("entropy", lambda: logps(entropy="yes"), ["entropy", "'yes'", '"detached"']),
    ("a dict as batch", lambda: loss(batch={"targets": IDS}), ["batch", "dict", "TokenBatch"]),
    ("a name as objective", lambda: loss(objective="grpo"), ["objective", "str", "Objective.preset"]),
    ("normalizer", lambda: loss(normalizer=0), ["normalizer", "0", "above 0"]),
    ("no reference", lambda: loss(objective=Objective(beta=0.1)), ["ref_logps", "None", "beta=0.1", "beta=0"]),
]


@pytest.mark.parametrize("what, call, parts", CASES, ids=[c[0] for c in CASES])
def test_value_error(what: str, call: Callable[[], Any], parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels.vocabulary import hidden as linear

    def forbidden(*args: Any) -> Any:
        raise AssertionError("work was done before the refusal")

    monkeypatch.setattr(linear, "products_for", forbidden)
    check = snapshot(ids=IDS, hidden=HIDDEN, weight=WEIGHT, bias=BIAS)
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert len(message) > 30
    check()


@pytest.mark.parametrize("call", [logps, loss])
def test_options_are_keywords(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="temperature"):
        call(temperature=0.7)
    with pytest.raises(TypeError):
        linear_logprobs(HIDDEN, WEIGHT, IDS, BIAS)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        linear_grpo_loss(HIDDEN, WEIGHT, TokenBatch(IDS, torch.ones(B)), Objective(), BIAS)  # type: ignore[call-arg]


def test_a_wild_id_in_a_masked_row_is_fine() -> None:
    """The remedy that the message names works."""
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 2] = False
    batch = TokenBatch(wild(-100), torch.ones(B), mask=mask)
    assert torch.isfinite(loss(batch=batch).loss) and torch.isfinite(logps(targets=wild(V), mask=mask)[0]).all()


# ---- DTensors


@pytest.mark.parametrize("function", [logps, loss])
def test_replicated_dtensor(function: Callable[..., Any], mesh: Any) -> None:
    """Taken as its local tensor; the gradients come back as DTensors."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    def run(leaves: dict[str, Any]) -> dict[str, Any]:
        out = function(leaves["hidden"], leaves["weight"], bias=leaves["bias"])
        (out[0].sum() if function is logps else out.loss).backward()
        return leaves

    plain = {"hidden": HIDDEN, "weight": WEIGHT, "bias": BIAS}
    exact = gradients_of(run({k: v.clone().requires_grad_() for k, v in plain.items()}))
    leaves = {k: v.clone().requires_grad_() for k, v in plain.items()}
    for name in ("weight", "bias"):
        leaves[name] = distribute_tensor(plain[name], mesh, [Replicate()]).requires_grad_()
    gradients = gradients_of(run(leaves))
    assert isinstance(gradients["weight"], DTensor) and isinstance(gradients["bias"], DTensor)
    local = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in gradients.items()}
    assert_gradients_near(local, exact, 1e-6)


@pytest.mark.parametrize("function", [logps, loss])
def test_sharded_dtensor(function: Callable[..., Any], mesh: Any) -> None:
    """Refused, and the remedy that the message names works, with a gradient that lands in the shards."""
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    weight = distribute_tensor(WEIGHT.clone(), mesh, [Shard(0)]).requires_grad_()
    bias = distribute_tensor(BIAS.clone(), mesh, [Shard(0)])
    for options in ({"weight": weight}, {"bias": bias}):
        with pytest.raises(ValueError) as error:
            function(**options)
        message = str(error.value)
        for part in (*options, "DTensor", "Shard(dim=0)", "full_tensor", "grad_placements=[Partial()]"):
            assert part in message, f"{part!r} is not in: {message}"
    whole = weight.full_tensor(grad_placements=[Partial()])
    out = function(weight=whole)
    (out[0].sum() if function is logps else out.loss).backward()
    assert weight.grad is not None and weight.grad.placements == (Shard(0),) and weight.grad.to_local().any()
