"""Kernels that cannot run, in Triton's interpreter:

what runs in their place, against float64. Run by test_triton_compile.py.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton as language
from triton.runtime.interpreter import InterpretedFunction

from grpo_kernels import Objective, Options, TokenBatch, grpo_loss
from grpo_kernels.core import backends
from grpo_kernels.core.backends import triton
from grpo_kernels.formulas.surrogates import Custom
from grpo_kernels.formulas.token_inputs import TokenInputs
from support.call_cases import CallCase, problem
from support.kernel_rows import Rows, assert_near_float64, ways_to_compute
from support.public_functions import assert_matches_oracle, make_batch, make_objective, run_call

backend = triton.Kernels()
KERNELS = ("softmax_sums", "softmax_gradient", "fused_loss", "scale")
OUT = language.OutOfResources(262144, 232448, "shared memory")
REASON = f"OutOfResources: {OUT}".rstrip(".")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """`pick` chooses as it would for a GPU, in a process where nothing has failed yet."""
    pick = backends.pick
    monkeypatch.setattr(backends, "unavailable", lambda name: None)
    monkeypatch.setattr(
        backends,
        "pick",
        lambda name, device, strict=False: pick(name, torch.device("cuda"), strict),
    )
    monkeypatch.setattr(triton, "unavailable_reason", lambda: None)
    monkeypatch.setattr(triton.launch, "_remembered", {})
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    monkeypatch.delenv("GRPO_KERNELS_STRICT", raising=False)


Refuse = Callable[..., Counter[tuple[str, int]]]


@pytest.fixture
def refuse(monkeypatch):
    """refuse("softmax_sums", above=256):

    tiles of more lanes raise, others run. Returns the launches, by (kernel, lanes).
    """
    run_call = InterpretedFunction.run

    def set_up(*kernels, above=0, error=OUT, compiling=False):
        launches = Counter()

        def refusing(self, *arguments, grid, warmup, **flags):
            name = self.__name__.removeprefix("_").removesuffix("_kernel")
            accesses = flags["TILE"].accesses
            launches[name, accesses] += not warmup
            if name in kernels and accesses > above and (compiling or not warmup):
                raise error
            return run_call(self, *arguments, grid=grid, warmup=warmup, **flags)

        monkeypatch.setattr(InterpretedFunction, "run", refusing)
        return launches

    return set_up


def messages(caught):
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


#: What visits rows once, and what visits them twice.
ONE_VISIT = CallCase(objective="dapo, k3", vocab=1031, lengths=(4, 3), upstream=0.5)
SEQUENCES = replace(ONE_VISIT, objective="gspo, k3 by the ratio")


def right(case=ONE_VISIT, **options):
    assert_matches_oracle(problem(case), run_call(problem(case), **options))


@pytest.mark.parametrize(
    "above, dtype", [(128, torch.bfloat16), (256, torch.float32), (1024, torch.bfloat16)]
)
def test_a_smaller_tile_is_right_and_remembered(above, dtype, refuse):
    launches, r = refuse(*KERNELS, above=above), Rows(torch.randn(1, 3, 9000).to(dtype))

    def check_both(r):
        for way, one in ways_to_compute(r)[:2]:
            assert_near_float64(one, way(backend, one))

    with pytest.warns(RuntimeWarning) as caught:
        check_both(r)
    full = {
        name: max(lanes for kernel, lanes in launches if kernel == name)
        for name in ("softmax_sums", "softmax_gradient", "fused_loss")
    }
    assert full["fused_loss"] > above and all(
        count == 1 for (_, lanes), count in launches.items() if lanes > above
    )
    halved = [name for name, lanes in full.items() if lanes > above]
    for name, message in zip(halved, messages(caught.list), strict=True):
        said = (
            f"kernel {name} ",
            f"{full[name]} x ",
            f"{above} x ",
            REASON,
            "python -m grpo_kernels doctor",
        )
        assert all(words in message for words in said), message
    launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        check_both(r)
        check_both(Rows(r.logits[:, :2]))  # no length asks again
    assert {lanes for _, lanes in launches} == {above}


@pytest.mark.parametrize("case", [ONE_VISIT, SEQUENCES], ids=["one visit", "sequences"])
@pytest.mark.parametrize("kernels", [*((name,) for name in KERNELS), KERNELS], ids=" ".join)
def test_eager_takes_the_calls_of_a_kernel_that_cannot_run(kernels, case, refuse):
    """Each says so once, and is not tried again."""
    launches = refuse(*kernels)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right(replace(case, inplace=True))
        refused = {key for key in launches if key[0] in kernels}
        launches.clear()
        right(case)
    assert not refused & set(launches) and len(messages(caught)) == len(
        {name for name, _ in refused}
    )
    for kernel, _ in refused:
        (message,) = (m for m in messages(caught) if f"kernel {kernel} " in m)
        instead = "second pass" if kernel == "fused_loss" else "eager PyTorch"
        assert all(
            words in message
            for words in (instead, " x 4 ", REASON, "python -m grpo_kernels doctor")
        ), message


@pytest.mark.parametrize("how", ("strict", "by name"))
def test_no_fallback_where_none_is_allowed(how, refuse):
    """The logits are left as they are. A smaller tile is no fallback."""
    given = {"strict": {"strict": True}, "by name": {"backend": "triton"}}[how]
    p = problem(replace(ONE_VISIT, mask="none", lengths=(4,)))
    logits, batch, objective = p.given["logits"].clone(), make_batch(p), make_objective(p.case)
    before, version, launches = logits.clone(), logits._version, refuse("fused_loss", above=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="kernel fused_loss does not run") as refusal:
            grpo_loss(logits, batch, objective, inplace=True, options=Options(**given))
        assert all(
            words in str(refusal.value)
            for words in (REASON, "512 x 4 down to 128 x 4", 'backend="auto"', "doctor")
        )
    assert launches == {("fused_loss", lanes): 1 for lanes in (512, 256, 128)}
    assert torch.equal(logits, before) and logits._version == version
    triton.launch._remembered.clear()
    refuse("fused_loss", above=128)
    with pytest.warns(RuntimeWarning, match="runs with 128 x 4"):
        right(replace(ONE_VISIT, inplace=True), **given)


DEVICE_ERRORS = (
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    language.InterpreterError("it was running"),
)


@pytest.mark.parametrize(
    ("error", "compiling"),
    [
        *itertools.product(DEVICE_ERRORS, (False, True)),
        (RuntimeError("a launch failed, in no known words"), False),
    ],
    ids=str,
)
def test_an_error_of_the_device_is_not_swallowed(error, compiling, refuse):
    """Also where compiling raises it, unless it may be the compiler's own."""
    launches = refuse(*KERNELS, error=error, compiling=compiling)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(type(error)) as raised:
            right()
    assert (
        raised.value is error
        and not triton.launch._remembered
        and launches == {("fused_loss", 512): 1}
    )


def by_torch(logp, old_logp, advantage, params):
    return -advantage * torch.sinh(logp), -advantage * torch.cosh(logp)


def test_a_formula_on_vectors_runs_under_torch_where_its_kernel_cannot(refuse):
    """With one warning, and only where a fallback is allowed."""
    launches, n = refuse("evaluate_formula"), 300
    zeros, logps = torch.zeros(n, dtype=torch.int64), -torch.rand(n)
    loss_formula = Objective().loss_formula(
        TokenInputs(zeros, None, torch.randn(n), torch.rand(n), logps + 0.1 * torch.randn(n))
    )
    wanted = loss_formula.compute(logps, logps)
    with pytest.warns(RuntimeWarning, match="kernel evaluate_formula does not run.*") as caught:
        found = [triton.OrEager().evaluate_formula(loss_formula, logps, -logps) for _ in range(2)]
    assert (
        len(caught) == 1
        and "formulas in PyTorch" in messages(caught.list)[0]
        and {name for name, _ in launches} == {"evaluate_formula"}
    )
    assert all(
        torch.equal(x[0], wanted.losses) and torch.equal(x[1], wanted.grad_logps) for x in found
    )
    with pytest.raises(triton.KernelFailure, match="kernel evaluate_formula does not run"):
        backend.evaluate_formula(loss_formula, logps, -logps)


def test_a_formula_that_is_no_program_runs_under_torch(refuse):
    launches, batch = refuse(), TokenBatch(torch.randint(1031, (7,)), torch.randn(7))
    given = torch.randn(7, 1031).requires_grad_(), batch, Objective(Custom(by_torch))
    with pytest.warns(
        RuntimeWarning, match=r"second pass.*by_torch cannot run in the kernels: torch\.sinh"
    ):
        grpo_loss(*given).loss.backward()
    assert {name for name, _ in launches} == {"softmax_sums", "softmax_gradient", "scale"}
    with pytest.raises(ValueError, match="by_torch cannot run in the kernels"):
        grpo_loss(*given, options=Options(backend="triton"))
