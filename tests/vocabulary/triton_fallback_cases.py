"""Kernels that cannot run, in Triton's interpreter: what runs in their place, against float64. Run by test_triton_fallback.py."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import PTXASError
from triton.runtime.interpreter import InterpretedFunction
from triton_cases import FULL, PLAIN, check, make_logits, make_rows

from grpo_kernels import Objective, TokenBatch, grpo_loss, linear_grpo_loss, token_logprobs
from grpo_kernels.formulas.surrogates import Custom
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.backends import triton as backend
from grpo_kernels.vocabulary.backends import triton_launch
from grpo_kernels.vocabulary.backends.triton_launch import KernelFailure
from support.rows import LOGPS, WITH_ENTROPY

Tensor = torch.Tensor
KERNELS = ("stats", "pull", "fused", "scale")
OUT = triton.OutOfResources(262144, 232448, "shared memory")
REASON = f"OutOfResources: {OUT}".rstrip(".")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pick` chooses as it would for a GPU, in a process where nothing has failed yet."""
    pick = backends.pick
    monkeypatch.setattr(backends, "unavailable", lambda name: None)
    monkeypatch.setattr(backends, "pick", lambda name, device, strict=False: pick(name, torch.device("cuda"), strict))
    monkeypatch.setattr(backend, "available", lambda: None)
    monkeypatch.setattr(triton_launch, "_remembered", {})
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    monkeypatch.delenv("GRPO_KERNELS_STRICT", raising=False)


Refuse = Callable[..., Counter[tuple[str, int]]]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """refuse("stats", above=256): tiles of more lanes raise, others run. Returns the launches, by (kernel, lanes)."""
    run = InterpretedFunction.run

    def set_up(*kernels: str, above: int = 0, error: Exception = OUT, compiling: bool = False) -> Counter[tuple[str, int]]:
        launches: Counter[tuple[str, int]] = Counter()

        def refusing(self: Any, *arguments: Any, grid: Any, warmup: bool, **flags: Any) -> Any:
            name = self.__name__.removeprefix("_").removesuffix("_kernel")
            accesses = flags["LANES"] * flags["ACCESSES"]
            launches[name, accesses] += not warmup
            if name in kernels and accesses > above and (compiling or not warmup):
                raise error
            return run(self, *arguments, grid=grid, warmup=warmup, **flags)

        monkeypatch.setattr(InterpretedFunction, "run", refusing)
        return launches

    return set_up


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, TokenBatch]:
    """(hidden [2, 4, 8], weight [1031, 8], batch)."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 4, 8, generator=g).to(dtype), torch.randn(1031, 8, generator=g).to(dtype)
    mask = torch.rand(2, 4, generator=g) < 0.8
    base = -math.log(1031) + torch.randn(3, 2, 4, generator=g)
    targets = torch.randint(1031, (2, 4), generator=g)
    return hidden, weight, TokenBatch(targets, base[0] + 7, mask=mask, old_logps=base[1], ref_logps=base[2])


OBJECTIVES = {"one visit": Objective.preset("dapo", beta=0.04), "sequences": Objective.preset("gspo", beta=0.04)}


def exact(objective: Objective, logits: Tensor, batch: TokenBatch) -> Tensor:
    """The loss from float64 logits, by the papers' formulas."""
    assert batch.old_logps is not None and batch.ref_logps is not None and batch.mask is not None
    mask = batch.mask.double()
    logps = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    x, d = logps - batch.old_logps, batch.ref_logps - logps
    if objective.level == "sequence":
        x = ((x * mask).sum(1) / mask.sum(1))[:, None].expand_as(x)
    ratio, advantages = x.exp(), batch.advantages.double()
    bounds = (1 - 3e-4, 1 + 4e-4) if objective.level == "sequence" else (1 - 0.2, 1 + 0.28)
    losses = -torch.min(ratio * advantages, ratio.clamp(*bounds) * advantages) + 0.04 * (d.exp() - d - 1)
    if objective.level == "sequence":
        return ((losses * mask).sum(1) / mask.sum(1)).mean()
    return (losses * mask).sum() / mask.sum()


def assert_right(got: Tensor, want: Tensor) -> None:
    assert want.norm() > 1e-3 and (got.double() - want).norm() <= 3e-6 * want.norm()


@pytest.mark.parametrize(
    "above, dtype",
    [
        (128, torch.bfloat16),
        (256, torch.float32),
        (1024, torch.float32),
        (1024, torch.bfloat16),
        pytest.param(128, torch.float32, marks=pytest.mark.slow),
        pytest.param(256, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_smaller_tile_is_right_and_remembered(above: int, dtype: torch.dtype, refuse: Refuse) -> None:
    V = 9000
    launches = refuse(*KERNELS, above=above)
    logits, rows = make_logits(3, V, dtype), make_rows(3, V, 1)
    with pytest.warns(RuntimeWarning) as caught:
        check("clip", logits, rows, FULL, PLAIN)
    full = {name: max(lanes for kernel, lanes in launches if kernel == name) for name in ("fused", "stats", "pull")}
    tried = {(name, lanes >> i) for name, lanes in full.items() for i in range(6) if lanes >> i >= above}
    assert full["fused"] > above and set(launches) == tried
    assert all(launches[name, lanes] == 1 for name, lanes in launches if lanes > above)
    columns = 16 // dtype.itemsize
    halved = [name for name, lanes in full.items() if lanes > above]
    for name, message in zip(halved, messages(caught.list), strict=True):
        for words in (
            f"kernel {name} ",
            f"{full[name]} x {columns} ",
            f"{above} x {columns},",
            REASON,
            "python -m grpo_kernels doctor",
        ):
            assert words in message, message
    launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        check("clip", logits, rows, FULL, PLAIN)
        check("clip", logits[:, :2], rows[:2], FULL, PLAIN)  # no length asks again
    assert {lanes for _, lanes in launches} == {above}


def test_scaling_with_a_smaller_tile(refuse: Refuse) -> None:
    launches = refuse("scale", above=512)
    for shape in ((3, 1031), (2, 3, 40000)):
        gradient = torch.randn(shape)
        got = gradient.clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backend.scale_(got, torch.tensor(0.3))
        assert torch.equal(got, gradient * 0.3)
        assert len(messages(caught)) == (shape == (3, 1031))  # either is one row, to the kernel
    assert launches == {("scale", 1024): 1, ("scale", 512): 2}


@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kernels", [*((name,) for name in KERNELS), ("fused", "pull"), KERNELS], ids=" ".join)
def test_eager_takes_the_calls_of_a_kernel_that_cannot_run(
    kernels: tuple[str, ...], name: str, inplace: bool, refuse: Refuse
) -> None:
    objective = OBJECTIVES[name]
    hidden, weight, batch = case()
    logits = hidden @ weight.T
    reference = logits.double().requires_grad_()
    value = exact(objective, reference, batch)
    (want,) = torch.autograd.grad(0.5 * value, reference)

    def run() -> None:
        given = logits.clone().requires_grad_()
        out = grpo_loss(given * 1.0, batch, objective, inplace=inplace)
        (gradient,) = torch.autograd.grad(0.5 * out.loss, given)
        assert_right(gradient, want)
        assert abs(out.loss.item() - value.item()) <= 1e-6 * max(1.0, abs(value.item()))

    launches = refuse(*kernels)
    used = {"one visit": {"fused", "scale"}, "sequences": {"stats", "pull"}}[name]  # whose slopes take the upstream factor
    if "fused" in kernels:
        used |= {"stats", "pull"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        refused = {key for key in launches if key[0] in kernels}
        launches.clear()
        run()
    assert not refused & set(launches) and {name for name, _ in refused} == used & set(kernels)
    found = messages(caught)
    assert len(found) == len(used & set(kernels)) == len(set(found))
    for kernel in used & set(kernels):
        (message,) = (m for m in found if f"kernel {kernel} " in m)
        instead = "second visit" if kernel == "fused" else "eager PyTorch"
        for words in (instead, " x 4 ", REASON, "python -m grpo_kernels doctor"):
            assert words in message, message


def test_from_hidden_states_and_layer_1(refuse: Refuse) -> None:
    hidden, weight, batch = case()
    objective = OBJECTIVES["one visit"]
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    want = torch.autograd.grad(exact(objective, leaves[0] @ leaves[1].T, batch), leaves)
    x = (hidden @ weight.T).double().requires_grad_()
    logps = x.log_softmax(-1)
    chosen, entropy = logps.gather(-1, batch.targets[..., None])[..., 0], -(logps.exp() * logps).sum(-1)
    (slope,) = torch.autograd.grad((chosen * batch.advantages + 0.3 * entropy).sum(), x)
    refuse(*KERNELS)
    with pytest.warns(RuntimeWarning) as caught:
        ours = [x.clone().requires_grad_() for x in (hidden, weight)]
        for got, right in zip(torch.autograd.grad(linear_grpo_loss(*ours, batch, objective).loss, ours), want, strict=True):
            assert_right(got, right)
        given = (hidden @ weight.T).requires_grad_()
        values = token_logprobs(given, batch.targets, entropy=True)
        (got,) = torch.autograd.grad((values[0] * batch.advantages + 0.3 * values[1]).sum(), given)  # type: ignore[operator]
    assert_right(values[0], chosen.detach())
    assert_right(values[1], entropy.detach())  # type: ignore[arg-type]
    assert_right(got, slope)
    assert {m.split("kernel ")[1].split()[0] for m in messages(caught.list)} == set(KERNELS)


@pytest.mark.parametrize("how", ("strict", "environment", "by name"))
def test_no_fallback_where_none_is_allowed(how: str, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("GRPO_KERNELS_STRICT", "1")
    options: dict[str, Any] = {"strict": {"strict": True}, "environment": {}, "by name": {"backend": "triton"}}[how]
    hidden, weight, batch = case()
    logits = hidden @ weight.T
    before, version = logits.clone(), logits._version
    launches = refuse("fused", "stats", above=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="kernel fused does not run") as refusal:
                grpo_loss(logits, batch, OBJECTIVES["one visit"], inplace=True, **options)
            assert all(words in str(refusal.value) for words in (REASON, "512 x 4 down to 128 x 4", 'backend="auto"', "doctor"))
        with pytest.raises(RuntimeError, match="kernel stats does not run"):
            token_logprobs(logits, batch.targets, **options)
    assert launches == {("fused", 512): 1, ("fused", 256): 1, ("fused", 128): 1} | {
        ("stats", 512): 1, ("stats", 256): 1, ("stats", 128): 1,
    }  # fmt: skip
    assert torch.equal(logits, before) and logits._version == version
    # A smaller tile is no fallback.
    triton_launch._remembered.clear()
    refuse("fused", above=128)
    with pytest.warns(RuntimeWarning, match="runs with 128 x 4"):
        out = grpo_loss(logits, batch, OBJECTIVES["one visit"], inplace=True, **options)
    want = exact(OBJECTIVES["one visit"], before.double(), batch)
    assert abs(out.loss.item() - want.item()) < 1e-6 * max(1.0, abs(want.item()))


DEVICE_ERRORS = (
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    triton.InterpreterError("it was running"),
)


@pytest.mark.parametrize(
    ("error", "compiling"),
    [*itertools.product(DEVICE_ERRORS, (False, True)), (RuntimeError("a launch failed, in no known words"), False)],
    ids=str,
)
def test_an_error_of_the_device_is_not_swallowed(error: Exception, compiling: bool, refuse: Refuse) -> None:
    """Also where compiling raises it, unless it may be the compiler's own."""
    hidden, weight, batch = case()
    launches = refuse(*KERNELS, error=error, compiling=compiling)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(type(error)) as raised:
            grpo_loss(hidden @ weight.T, batch, OBJECTIVES["one visit"])
    assert raised.value is error and not triton_launch._remembered and launches == {("fused", 512): 1}


@pytest.mark.parametrize(
    "error",
    [
        PTXASError("Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : (C7600) Register allocation failed\n"),
        triton.CompilationError("def f(x):\n    return 1", None, "the culprit"),  # type: ignore[arg-type]
        RuntimeError("PassManager::run failed"),
        OSError("No space left on device"),
        RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_compiler_refuses_goes_elsewhere(error: Exception, refuse: Refuse) -> None:
    hidden, weight, batch = case()
    refuse(*KERNELS, error=error, compiling=True)
    with pytest.warns(RuntimeWarning) as caught:
        out = grpo_loss(hidden @ weight.T, batch, OBJECTIVES["one visit"])
    want = exact(OBJECTIVES["one visit"], (hidden @ weight.T).double(), batch)
    assert abs(out.loss.item() - want.item()) < 1e-6 * max(1.0, abs(want.item()))
    gist = {"PTXASError": "ptxas fatal", "CompilationError": "the culprit"}.get(type(error).__name__, str(error))
    assert len(messages(caught.list)) == 2 and all(
        f"{type(error).__name__}: " in m and gist in m and "\n" not in m for m in messages(caught.list)
    )


def test_short_rows_have_no_smaller_tile(refuse: Refuse) -> None:
    launches = refuse("stats")
    with pytest.raises(KernelFailure, match="tiles of 32 x 4 logits: OutOfResources"):
        backend.stats(make_logits(2, 7, torch.float32), torch.zeros(2, dtype=torch.int64), None, PLAIN, LOGPS)
    assert launches == {("stats", 32): 1}


def test_another_kernel_is_tried_anew(refuse: Refuse) -> None:
    """What is remembered is of one dtype, one alignment, one transform."""
    launches = refuse("stats", above=128)
    targets = torch.zeros(2, dtype=torch.int64)
    calls: list[tuple[Tensor, Any, tuple[str, ...]]] = [
        (make_logits(2, 1024, torch.float32), PLAIN, LOGPS), (make_logits(2, 2048, torch.bfloat16), PLAIN, LOGPS),
        (make_logits(2, 2048, torch.float16), PLAIN, LOGPS),
        (make_logits(2, 1023, torch.float32), PLAIN, LOGPS),
        (make_logits(2, 1024, torch.float32), PLAIN._replace(softcap=3.0), LOGPS),
        (make_logits(2, 1024, torch.float32), PLAIN, WITH_ENTROPY),
    ]  # fmt: skip
    with pytest.warns(RuntimeWarning):
        for _ in range(2):
            for logits, transform, names in calls:
                backend.stats(logits, targets, None, transform, names)
    assert launches == {("stats", 256): len(calls), ("stats", 128): 2 * len(calls)}


def test_a_formula_that_triton_cannot_compile_runs_under_torch(refuse: Refuse) -> None:
    width = 0.5

    def closure(logp: Tensor, old_logp: Tensor, advantage: Tensor, params: tuple[float, ...]) -> Any:
        return -advantage * logp * width, -advantage * width

    hidden, weight, batch = case()
    logits = (hidden @ weight.T).requires_grad_()
    objective = Objective(Custom(closure), aggregate="token-mean")
    launches = refuse()
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(2):
            (got,) = torch.autograd.grad(grpo_loss(logits, batch, objective).loss, logits)
    (message,) = messages(caught.list)
    assert "closure closes over width" in message and "second visit" in message
    assert {name for name, _ in launches} >= {"stats", "pull"} and not any(n == "fused" for n, _ in launches)
    x = logits.detach().double().requires_grad_()
    logps = x.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    loss = -(batch.advantages * logps * width)[batch.mask].sum() / batch.mask.sum()  # type: ignore[union-attr]
    assert_right(got, torch.autograd.grad(loss, x)[0])
    for options in ({"strict": True}, {"backend": "triton"}):
        with pytest.raises(ValueError, match="closure closes over width"):
            grpo_loss(logits, batch, objective, **options)  # type: ignore[arg-type]


def test_a_value_error_that_is_no_refused_formula_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a defect, or the caller's mistake: falling back would hide it behind a warning about speed."""

    def broken(*_: Any) -> Any:
        raise ValueError("something else is wrong")

    monkeypatch.setattr(backend, "fused", broken)
    hidden, weight, batch = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(ValueError, match="something else is wrong"):
            grpo_loss(hidden @ weight.T, batch, OBJECTIVES["one visit"])
