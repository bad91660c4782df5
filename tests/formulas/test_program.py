"""Formulas as programs of the C++ kernel: the same numbers as torch, bitwise except for the last bits of exp and log. A formula
that cannot be a program is refused, or computed in torch, with a reason."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels import Objective, TokenBatch, grpo_loss
from grpo_kernels.diagnosis.self_test import self_test
from grpo_kernels.formulas import kl, surrogates, token_program
from grpo_kernels.formulas import program as program_module
from grpo_kernels.formulas.filters import TRUST_REGIONS, EntropyFloor, TrustRegion, above_floor
from grpo_kernels.formulas.keys import key_of
from grpo_kernels.formulas.kl import ESTIMATORS, SCORES, WEIGHTINGS, Kl
from grpo_kernels.formulas.ops import bounded_exp, finite, ops
from grpo_kernels.formulas.program import OF_NUMBERS, FormulaRefused, Program, Tracer
from grpo_kernels.formulas.surrogates import Clip, Custom, PolicyGradient, Surrogate
from grpo_kernels.formulas.token_program import random_inputs
from grpo_kernels.formulas.token_stage import token_terms
from grpo_kernels.vocabulary import backends
from grpo_kernels.vocabulary.backends import cpu
from support.cases import OBJECTIVES, build, run

if cpu.available() is not None:
    pytest.skip(cpu.available() or "", allow_module_level=True)

from grpo_kernels import _cpu

Tensor = torch.Tensor
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3e38, 88.9, -104.0, math.inf, -math.inf, math.nan)


def ulps(found: Tensor, expected: Tensor) -> Tensor:
    """How many fp32 numbers lie between the two, 0 where both are NaN."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int32).to(torch.int64)
        return torch.where(bits < 0, -(2**31) - bits, bits)

    apart = (ordered(found) - ordered(expected)).abs()
    return torch.where(found.isnan() | expected.isnan(), torch.where(found.isnan() == expected.isnan(), 0, 2**32), apart)


def evaluated(
    function: Callable[..., Any], names: tuple[str, ...], parameters: tuple[float, ...] = (), seed: int = 0, **choices: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """(the program's result, torch's result) for `function` of these inputs and a tuple of parameters."""
    tracer = Tracer()
    symbols = [tracer.input(name) for name in names]
    numbers = (tuple(tracer.parameter() for _ in parameters),) if parameters else ()
    result = function(*symbols, *numbers, **choices)
    program = tracer.program("it", result if isinstance(result, tuple) else (result,))
    inputs = random_inputs(names, 2048, seed)
    found = cpu._run(program, program.numbers(parameters), inputs)
    result = function(*inputs, *((parameters,) if parameters else ()), **choices)
    expected = [torch.as_tensor(x, dtype=torch.float32) for x in (result if isinstance(result, tuple) else (result,))]
    return found, [x.expand(2048) for x in expected]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp and log of `ops` as fp64 has them, rounded: those of torch may be off by a last bit, which cancellation would magnify."""
    for name in ("exp", "log"):
        own = getattr(torch, name)
        rounded = staticmethod(lambda x, own=own: own(x.double()).float() if isinstance(x, Tensor) else own(x))
        monkeypatch.setattr(ops, name, rounded)
    monkeypatch.setattr(ops, "sigmoid", staticmethod(lambda x: 1.0 / (1.0 + ops.exp(-x))))


def assert_same(found: list[Tensor], expected: list[Tensor], most: int = 2) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        far = ulps(x, y) > most
        # Zeros of both signs are equal; they are apart in bits.
        assert not (far & (x != y)).any(), (x[far][:4], y[far][:4])


# ---- operations

OPERATIONS: dict[str, Callable[..., Any]] = {
    "neg": lambda a, b, c: -a,
    "abs": lambda a, b, c: ops.abs(a),
    "builtin abs": lambda a, b, c: abs(a),
    "exp": lambda a, b, c: ops.exp(a),
    "log": lambda a, b, c: ops.log(a),
    "sqrt": lambda a, b, c: ops.sqrt(a),
    "sigmoid": lambda a, b, c: ops.sigmoid(a),
    "sum": lambda a, b, c: a + b,
    "sum with a number": lambda a, b, c: 0.1 + a + 1e-8,
    "difference": lambda a, b, c: a - b,
    "from a number": lambda a, b, c: 0.3 - a,
    "product": lambda a, b, c: a * b * 0.7,
    "ratio": lambda a, b, c: a / b,
    "over a number": lambda a, b, c: a / 0.3,
    "number over": lambda a, b, c: -4.0 / a,
    "square and cube": lambda a, b, c: a**2 + b**3,
    "minimum": lambda a, b, c: ops.minimum(a, b),
    "maximum": lambda a, b, c: ops.maximum(a, b),
    "minimum with a number": lambda a, b, c: ops.minimum(a, 0.1) + ops.minimum(0.2, b),
    "maximum with a number": lambda a, b, c: ops.maximum(a, 0.1) + ops.maximum(0.2, b),
    "of numbers": lambda a, b, c: a * ops.minimum(0.1, 0.2) + ops.maximum(1, 2.5),
    "less": lambda a, b, c: ops.where(a < b, c, 1.0),
    "less or equal": lambda a, b, c: ops.where(a <= b, 1.0, c),
    "greater": lambda a, b, c: ops.where(a > b, c, -c),
    "greater or equal": lambda a, b, c: ops.where(a >= b, 1.0, 0.0),
    "equal": lambda a, b, c: ops.where(a == b, a, c),
    "not equal": lambda a, b, c: ops.where(a != a, 5.0, c),
    "and, or, not": lambda a, b, c: ops.where(((a < b) & (b < c)) | ~(a < 0.5), a, b),
    "a condition as a number": lambda a, b, c: (a < b) * c,
    "a chosen condition": lambda a, b, c: ops.where(ops.where(a > 0.0, b < c, b > c), a, b),
    "a constant": lambda a, b, c: (a, 1.0, -0.25),
    "bounded exp": lambda a, b, c: bounded_exp(20 * a),
    "finite": lambda a, b, c: finite(1e30 * a * b),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_torch(name: str) -> None:
    """On all triples of special numbers, and at random: 2 ulp for exp and log as torch has them, which a product may double."""
    tracer = Tracer()
    result = OPERATIONS[name](*(tracer.input(x) for x in "abc"))
    outputs = result if isinstance(result, tuple) else (result,)
    program = tracer.program(name, outputs)
    special = torch.tensor(list(itertools.product(SPECIAL, repeat=3))).T
    random = torch.randn(3, 20000) * torch.tensor([1.0, 10.0]).repeat(10000)
    inputs = list(torch.cat([special, random], 1).contiguous())
    found = cpu._run(program, program.numbers(()), inputs)
    result = OPERATIONS[name](*inputs)
    expected = [torch.as_tensor(x, dtype=torch.float32) for x in (result if isinstance(result, tuple) else (result,))]
    assert_same(found, [x.expand_as(inputs[0]) for x in expected])
    assert len(found) == len(outputs) and (name == "a constant" or found[0].unique().numel() > 1)


# ---- the formulas of the package

LOGPS = ("logps", "old_logps", "advantages")
CLASSES = [
    c for c in vars(surrogates).values() if isinstance(c, type) and issubclass(c, Surrogate) and c not in (Surrogate, Custom)
]
seeds = given(seed=st.integers(0, 2**31))
few = settings(max_examples=10, deadline=None)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_surrogates(kind: type[Surrogate]) -> None:
    surrogate = kind()

    def with_selection(logp: Any, old_logp: Any, advantage: Any, selected: Any, params: Any) -> Any:
        return surrogate.formula(logp, old_logp, advantage, (*params, ops.where(selected > 0.0, 1.0, 0.0)))

    function, names = (with_selection, (*LOGPS, "selected")) if surrogate.selects else (surrogate.formula, LOGPS)
    for seed in range(5):
        if surrogate.params:
            assert_same(*evaluated(function, names, surrogate.params, seed))
        else:
            assert_same(*evaluated(lambda *x: surrogate.formula(*x, ()), names, (), seed))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("function", TRUST_REGIONS.values(), ids=TRUST_REGIONS)
def test_trust_regions(function: Callable[..., Any]) -> None:
    for low, high in ((0.2, 0.3), (0.0, 1.0), (1e-3, math.inf)):
        assert_same(*evaluated(lambda *x: ops.where(function(*x), 1.0, 0.0), LOGPS, (low, high)))


@pytest.mark.usefixtures("exact")
def test_entropy_floor() -> None:
    assert_same(*evaluated(lambda H, params: ops.where(above_floor(H, params[0]), H, 0.0), ("entropy",), (1.2,)))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_estimators(name: str) -> None:
    names = ("logps", "old_logps", "ref_logps")
    assert_same(*evaluated(ESTIMATORS[name], names))
    if ESTIMATORS[name] in SCORES:
        assert_same(*evaluated(SCORES[ESTIMATORS[name]], names))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("clamps", [None, (1.1, 0.9)], ids=["free", "clamped"])
@pytest.mark.parametrize("straight", [False, True], ids=["its own slope", "straight through"])
def test_kl_terms(weighting: str, clamps: tuple[float, float] | None, straight: bool) -> None:
    names = ("logps", "old_logps", "ref_logps", "ratio_logps")
    for estimator in ("k1", "k2", "k3", "abs"):
        choices = Kl(estimator, weighting, straight).formula
        if clamps is None:
            assert_same(*evaluated(lambda *x, **c: kl.kl_terms(*x, None, **c), names, (), **choices))
        else:
            assert_same(*evaluated(kl.kl_terms, names, clamps, **choices))


ONE_PASS = [name for name, (make, _) in OBJECTIVES.items() if make().one_pass]
EXTRA = {
    "everything": Objective(
        Clip(delta=3.0), beta=0.1, entropy_coef=0.1, filters=(TrustRegion("kl", 0.1, 0.1, "sampler"), EntropyFloor(0.5)),
        log_ratio_bounds=(-2.0, 1.5), kl=Kl("k3", "ratio", clamp_log=2.0, clamp=4.0),
    ),
    "a function as KL": Objective(PolicyGradient(), beta=0.1, kl=lambda logp, old, ref: (0.5 * (ref - logp) ** 2, logp - ref)),
}  # fmt: skip


@dataclass
class Rows:
    """As token_program reads `TokenRows`."""

    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    sampler_logps: Tensor | None = None
    advantages: Tensor | None = None
    policy_weight: Tensor | None = None
    kl_weight: Tensor | None = None
    entropy_weight: Tensor | None = None
    nll_weight: Tensor | None = None


def whole_stage(objective: Objective, present: tuple[str, ...], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """(result of the program of `token_terms`, torch's result), with these rows in addition to those that every batch has."""
    names = ("logps", "entropy", "advantages", "policy_weight", *present)
    given = dict(zip(names, random_inputs(names, 1024, seed), strict=True))
    logp, entropy = given.pop("logps"), given.pop("entropy")
    program, numbers = token_program.token_program(objective, Rows(**given))  # type: ignore[arg-type]
    found = cpu._run(program, numbers, [logp, entropy, *(given[name] for name in program.inputs[2:])])
    chosen, scalars = token_program.formulas(objective), token_program.scalars(objective)
    old = given.get("old_logps", logp)
    expected = token_terms(
        logp, entropy, logp - old, old, given.get("ref_logps"), given.get("sampler_logps", old), given["advantages"],
        given["policy_weight"], given.get("kl_weight"), given.get("entropy_weight"), given.get("nll_weight"), **scalars, **chosen,
    )  # fmt: skip
    return found, [torch.as_tensor(expected[i], dtype=torch.float32).expand_as(logp) for i in (0, 1, 3)]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", [*ONE_PASS, *EXTRA])
def test_the_whole_token_stage(name: str) -> None:
    objective = EXTRA[name] if name in EXTRA else OBJECTIVES[name][0]()
    needed = ("ref_logps", "kl_weight") if objective.beta else ()
    needed += ("entropy_weight",) if objective.entropy_coef else ()
    trust = objective.filter(TrustRegion)
    needed += ("sampler_logps",) if trust is not None and trust.anchor == "sampler" else ()
    for seed, others in enumerate(((), ("old_logps",), ("nll_weight",), ("old_logps", "nll_weight"))):
        assert_same(*whole_stage(objective, (*needed, *others), seed))


@few
@seeds
def test_the_whole_token_stage_at_random(seed: int) -> None:
    """As torch computes it, with its own exp and log."""
    present = ("old_logps", "ref_logps", "kl_weight", "entropy_weight", "nll_weight", "sampler_logps")
    for x, y in zip(*whole_stage(EXTRA["everything"], present, seed), strict=True):
        far = ulps(x, y) > 2
        assert ((x - y).abs()[far & ~x.isinf()] <= 1e-5 * (1 + y.abs()[far & ~x.isinf()])).all()
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.isinf(), y.isinf())


# ---- caching


def squared(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    x = logp - old_logp
    return -advantage * logp + 0.5 * params[0] * x * x, params[0] * x - advantage


def of(objective: Objective, **rows: Any) -> tuple[Program, list[float]]:
    some = torch.zeros(1)
    return token_program.token_program(objective, Rows(advantages=some, policy_weight=some, **rows))  # type: ignore[arg-type]


def test_programs_are_cached_by_formula_and_presence_of_inputs() -> None:
    first, numbers = of(Objective(Custom(squared, (0.25,))))
    again, others = of(Objective(Custom(squared, (0.75,))))
    assert again is first and numbers != others and 0.25 in numbers and 0.75 in others
    assert of(Objective(Custom(squared, (0.25, 1.0))))[0] is not first
    assert of(Objective(Custom(squared, (0.25,))), old_logps=torch.zeros(1))[0] is not first
    assert of(Objective(Clip(0.1, 0.2)))[0] is of(Objective(Clip(0.3, 0.4)))[0]


def loss_of(surrogate: Surrogate, backend: str = "cpu", strict: bool = False, **fields: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a small batch."""
    g = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(6, 50, generator=g)).requires_grad_()
    batch = TokenBatch(
        torch.randint(0, 50, (6,), generator=g),
        torch.randn(6, generator=g),
        old_logps=-torch.rand(6, generator=g) * 4,
        ref_logps=-torch.rand(6, generator=g) * 4,
    )
    out = grpo_loss(logits, batch, Objective(surrogate, **fields), backend=backend, strict=strict)
    (gradient,) = torch.autograd.grad(out.loss, logits)
    return out.loss.detach(), gradient


def test_what_a_function_keeps_is_looked_up_at_every_call() -> None:
    kept = [0.5]

    def scaled(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        return -kept[0] * advantage * logp, -kept[0] * advantage

    surrogate = Custom(scaled)
    half, _ = loss_of(surrogate, strict=True)
    kept[0] = 1.0
    torch.testing.assert_close(loss_of(surrogate, strict=True)[0], 2 * half)


class Moving(Surrogate):
    """A surrogate whose width is not a field of a frozen dataclass, so that it may change between calls."""

    function = staticmethod(surrogates.clip)

    def __init__(self) -> None:
        self.width = 0.0

    @property
    def params(self) -> tuple[float, ...]:
        return self.width, self.width, math.inf


def test_an_objective_keeps_only_what_cannot_change() -> None:
    """The same objective in two calls: numbers of a frozen surrogate are made once, those of others are asked for again."""
    fixed = Objective(Clip(0.2, 0.2))
    assert of(fixed)[1] is of(fixed)[1] and of(fixed, old_logps=torch.zeros(1))[1] is not of(fixed)[1]
    kept = [0.5]

    def scaled(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        return -kept[0] * advantage * logp, -kept[0] * advantage

    moving, case = Moving(), build()
    by_params, by_closure = Objective(moving), Objective(Custom(scaled))
    losses = []
    for width in (0.01, 0.5):
        moving.width = kept[0] = width
        out, gradient = run(case, by_params, "cpu")
        expected, expected_gradient = run(case, Objective(Clip(width, width)), "cpu")
        assert torch.equal(out.loss, expected.loss) and torch.equal(gradient, expected_gradient)
        losses += [out.loss.item(), run(case, by_closure, "cpu")[0].loss.item()]
    assert losses[0] != losses[2]
    assert losses[3] == pytest.approx(50 * losses[1], rel=1e-5)


# ---- refusals


def hyperbolic(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    return -torch.tanh(logp - old_logp) * advantage, -(1 - torch.tanh(logp - old_logp) ** 2) * advantage


def branching(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    if (advantage > 0.0).all() if isinstance(advantage, Tensor) else advantage > 0.0:
        return -logp * advantage, -advantage
    return -logp * advantage, -1.0 * advantage


def parametric(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    return -advantage * logp * math.exp(params[0]), -advantage * math.exp(params[0])


def by_method(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    return -advantage * (logp - old_logp).exp(), -advantage * (logp - old_logp).exp()


def long(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    """0.001 logp, a thousand times."""
    total = logp * 0.0
    for _ in range(1000):
        total = total + 0.001 * logp
    return -advantage * total, -advantage


REFUSED: dict[str, tuple[Surrogate, tuple[str, ...]]] = {
    "another function of torch": (Custom(hyperbolic), ("hyperbolic", "tanh", "names of `ops`")),
    "a branch on a value": (Custom(branching), ("branching", "ops.where(condition, a, b)")),
    "a parameter as a float": (Custom(parametric, (0.1,)), ("parametric", "float")),
    "a method of tensors": (Custom(by_method), ("by_method", "exp")),
    "too many registers": (Custom(long), ("long", "registers", "512")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_computed_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    surrogate, words = REFUSED[name]
    monkeypatch.setattr("grpo_kernels.checks._warned", set())
    with pytest.warns(RuntimeWarning, match="second visit") as caught:
        found = loss_of(surrogate)
    assert len(caught) == 1 and all(word in str(caught[0].message) for word in words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        loss_of(surrogate)
    for x, y in zip(found, loss_of(surrogate, "eager"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
    with pytest.raises(FormulaRefused) as refusal:
        loss_of(surrogate, strict=True)
    assert all(word in str(refusal.value) for word in words)


def test_the_line_at_fault_is_named() -> None:
    line = hyperbolic.__code__.co_firstlineno + 1
    with pytest.raises(FormulaRefused, match=rf"line {line} of hyperbolic"):
        of(Objective(Custom(hyperbolic)))


@pytest.mark.parametrize(
    "formula",
    [
        lambda a, b: (a < b) + (b < a),
        lambda a, b: a & b,
        lambda a, b: ops.where(a, b, b),
        lambda a, b: ops.exp(1.0) * a,
        lambda a, b: a**0.5,
        lambda a, b: a * torch.tensor(2.0),
        lambda a, b: a * "2",
        lambda a, b: a if a else b,
        lambda a, b: torch.clamp(a, min=0.0, max=1.0).cos(),
    ],
)
def test_what_no_kernel_can_run_is_refused(formula: Callable[..., Any]) -> None:
    tracer = Tracer()
    with pytest.raises((FormulaRefused, TypeError, AttributeError)):
        tracer.program("it", (formula(tracer.input("a"), tracer.input("b")),))


def test_symbols_of_another_call_are_refused() -> None:
    one, other = Tracer(), Tracer()
    with pytest.raises(FormulaRefused, match="another call"):
        one.input("a") + other.input("a")


def test_numbers_of_the_call_stay_python_numbers() -> None:
    """1 - 0.2 in fp64, then rounded, as beside tensors; what follows from parameters takes no instruction."""
    tracer = Tracer()
    a, p = tracer.input("a"), tracer.parameter()
    program = tracer.program("it", (ops.where(a >= 1.0 - p, ops.maximum(p, 2.0) * a, abs(-p / 3) * a),))
    assert [operation for operation, *_ in program.steps] == ["le", "mul", "mul", "where"]
    assert set(program.numbers((0.2,))) == {0.8, 2.0, 0.2 / 3}
    with pytest.raises(ZeroDivisionError):
        tracer.program("it", (a * (1.0 / (p - 0.2)),)).numbers((0.2,))


def test_every_function_of_numbers_is_an_operation_of_rows() -> None:
    """Tried one by one, for the names are looked up in C++."""
    for name in OF_NUMBERS:
        _cpu.Program("it", 0, 2, [(name, 0, 1, 0)], [2])


def test_wrong_programs_are_refused_by_name() -> None:
    good = [("add", 0, 1, 0), ("where", 2, 0, 1)]
    _cpu.Program("mine", 1, 1, good, [3])
    for steps, outputs, word in (
        ([("tan", 0, 0, 0)], [0], "tan is no operation"),
        ([("add", 0, 2, 0)], [0], "register 2"),
        ([("add", -1, 0, 0)], [0], "register -1"),
        ([("where", 0, 1, 5)], [0], "register 5"),
        (good, [4], "output 4"),
        (good, [-1], "output -1"),
        ([("neg", 0, 0, 0)] * 511, [0], "513 registers"),
    ):
        with pytest.raises(ValueError, match=word) as refusal:
            _cpu.Program("mine", 1, 1, steps, outputs)
        assert "mine" in str(refusal.value)
    program = _cpu.Program("mine", 1, 1, good, [3])
    x = torch.zeros(4)
    for numbers, inputs, outputs in (([], [x], [x]), ([1.0], [], [x]), ([1.0], [x], []), ([1.0], [x, x], [x])):
        with pytest.raises(ValueError, match="mine"):
            program.run(numbers, [v.data_ptr() for v in inputs], [v.data_ptr() for v in outputs], 4)


def test_a_parameter_that_is_nan_is_refused_by_name(backend: str) -> None:
    with pytest.raises(ValueError, match=r"squared.*nan"):
        loss_of(Custom(squared, (math.nan,)), backend)
    assert loss_of(Custom(squared, (0.1,)), backend)[0].isfinite()


# ---- compared with torch when first used


def two_faced(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    factor = 1.0 if isinstance(logp, Tensor) else 2.0
    return -factor * advantage * logp, -factor * advantage


def test_strict_compares_a_formula_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    token_program._made_before.cache_clear()
    with pytest.raises(FormulaRefused, match="two_faced gives loss"):
        loss_of(Custom(two_faced), strict=True)
    compared: list[str] = []
    own = cpu._run

    def counted(program: Program, *rest: Any) -> Any:
        compared.append(program.name)
        return own(program, *rest)

    monkeypatch.setattr(cpu, "_run", counted)
    for _ in range(3):
        loss_of(Custom(squared, (0.5,)), strict=True)
    assert compared == ["squared"]
    with backends.use(strict=True):
        loss_of(Clip(0.11, 0.12), "auto")
    assert compared == ["squared", "clip"]
    loss_of(Clip(0.13, 0.14))
    assert len(compared) == 2


def test_strict_compares_once_whatever_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a schedule are numbers of a call: the program is the same."""
    token_program._made_before.cache_clear()
    compared: list[str] = []
    own = cpu._run
    monkeypatch.setattr(cpu, "_run", lambda program, *rest: compared.append(program.name) or own(program, *rest))
    for step in range(10):
        loss_of(Clip(0.1 + step / 100, 0.2), strict=True)
    assert compared == ["clip"]


def tiny(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    factor = 1e-7 if isinstance(logp, Tensor) else 2e-7
    return -factor * advantage * logp, -factor * advantage


def test_strict_sees_what_is_wrong_with_tiny_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    token_program._made_before.cache_clear()
    with pytest.raises(FormulaRefused, match="tiny gives loss"):
        loss_of(Custom(tiny), strict=True)


def test_numbers_are_the_same_beside_those_of_their_output() -> None:
    expected = torch.tensor([1e-8, 2e-8, 0.0, torch.inf, torch.nan, 3e-8])
    assert program_module.same_numbers(expected * (1 + 1e-6), expected, 1e-4).all()
    off = torch.tensor([1.1e-8, 2e-8, 1e-9, -torch.inf, 0.0, 3.1e-8])
    assert program_module.same_numbers(off, expected, 1e-4).tolist() == [False, True, False, False, False, False]
    nothing = torch.zeros(2)
    assert program_module.same_numbers(torch.tensor([0.0, 1e-30]), nothing, 1e-4).tolist() == [True, False]


# ---- formulas that are made anew


def weighted(logp: Any, old_logp: Any, advantage: Any, params: Any, weight: float = 1.0) -> Any:
    return -weight * advantage * logp, -weight * advantage


def by_closure(weight: Any) -> Any:
    def formula(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        return weighted(logp, old_logp, advantage, params, weight)

    return formula


@pytest.mark.parametrize(
    "make", [by_closure, lambda weight: functools.partial(weighted, weight=weight)], ids=["closure", "partial"]
)
def test_a_formula_made_anew_at_each_step_is_traced_once(make: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    token_program._made_before.cache_clear()
    traced: list[str] = []
    own = token_program._traced
    monkeypatch.setattr(token_program, "_traced", lambda chosen, *rest: traced.append("") or own(chosen, *rest))
    losses = [[loss_of(Custom(make(weight)))[0] for _ in range(3)] for weight in (0.5, 1.0, 0.5)]
    assert len(traced) == 2
    assert all(len(set(map(float, three))) == 1 for three in losses)
    assert float(losses[1][0]) == pytest.approx(2 * float(losses[0][0])) and float(losses[2][0]) == float(losses[0][0])


def test_a_number_that_a_closure_keeps_may_change() -> None:
    weight = 0.5

    def formula(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
        return -weight * advantage * logp, -weight * advantage

    objective = Custom(formula)
    before = float(loss_of(objective)[0])
    weight = 1.0
    assert float(loss_of(objective)[0]) == pytest.approx(2 * before)


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    token_program._made_before.cache_clear()
    traced: list[str] = []
    own = token_program._traced
    monkeypatch.setattr(token_program, "_traced", lambda chosen, *rest: traced.append("") or own(chosen, *rest))
    for _ in range(3):
        with pytest.raises(FormulaRefused, match="hyperbolic"):
            loss_of(Custom(hyperbolic), strict=True)
    assert len(traced) == 1


@pytest.mark.parametrize(
    "same, x, y",
    [
        (True, by_closure(0.5), by_closure(0.5)), (False, by_closure(0.5), by_closure(1.0)), (False, by_closure(1), by_closure(1.0)),
        (False, by_closure(0.0), by_closure(-0.0)), (True, by_closure(math.nan), by_closure(math.nan)),
        (True, functools.partial(weighted, weight=0.1), functools.partial(weighted, weight=0.1)),
        (False, functools.partial(weighted, weight=0.1), functools.partial(weighted)), (False, weighted, squared),
        (True, by_closure((1, weighted)), by_closure((1, weighted))), (True, by_closure([0.5]), by_closure([0.5])),
        (False, by_closure([0.5]), by_closure((0.5,))), (False, by_closure({"a": 1}), by_closure({"a": 2})),
        (True, by_closure(ops.exp), by_closure(torch.exp)), (False, by_closure(kl.k1), by_closure(kl.k2)),
    ],
)  # fmt: skip
def test_what_tells_formulas_apart(same: bool, x: Any, y: Any) -> None:
    key = key_of(x)
    assert key is not None and (key == key_of(y)) is same


@pytest.mark.parametrize("kept", [torch.ones(1), object(), Clip(), torch.rand, getattr, math, functools.lru_cache(by_closure)])
def test_what_cannot_be_told_without_running_it(kept: Any) -> None:
    assert key_of(by_closure(kept)) is None and key_of(functools.partial(weighted, weight=[kept])) is None
    itself: list[Any] = []
    itself.append(itself)
    assert key_of(by_closure(itself)) is None


# ---- what a formula uses is defined again

REDEFINED: dict[str, tuple[str, str]] = {
    "a constant": ("C = {c}", "C * x"),
    "a helper": ("def helper(x):\n    return {c} * x", "helper(x)"),
    "a helper of a helper": ("def inner(x):\n    return {c} * x\ndef helper(x):\n    return inner(x)", "helper(x)"),
    "a constant of a helper": ("C = {c}\ndef helper(x):\n    return C * x", "helper(x)"),
    "a default": ("def helper(x, c={c}):\n    return c * x", "helper(x)"),
    "a default by name": ("def helper(x, *, c={c}):\n    return c * x", "helper(x)"),
    "a closure": ("def made(c):\n    return lambda x: c * x\nhelper = made({c})", "helper(x)"),
    "a partial": ("import functools\ndef two(c, x):\n    return c * x\nhelper = functools.partial(two, {c})", "helper(x)"),
    "a helper that calls itself": ("def helper(x, n=2):\n    return {c} * x if n == 0 else helper(x, n - 1)", "helper(x)"),
    "a helper in an inner function": ("def helper(x):\n    return {c} * x", "(lambda: helper(x))()"),
    "a list": ("C = [0.0, {c}]", "C[1] * x"),
    "a dictionary": ("C = {{'c': {c}}}", "C['c'] * x"),
    "functions in a list": ("HELPERS = [lambda x: {c} * x]", "HELPERS[0](x)"),
    "an attribute": ("import types\nC = types.SimpleNamespace(c={c})", "C.c * x"),
    "an attribute of a class": ("class C:\n    c = {c}", "C.c * x"),
    "an attribute of a function": ("def helper(x):\n    return helper.c * x\nhelper.c = {c}", "helper(x)"),
    "a method": ("class C:\n    def __init__(self, c):\n        self.c = c\n    def of(self, x):\n        return self.c * x\nC = C({c})", "C.of(x)"),
    "a bound method": ("class A:\n    c = {c}\n    def of(self, x):\n        return self.c * x\nhelper = A().of", "helper(x)"),
    "a name that is looked up": ("C = {c}", "globals()['C'] * x"),
    "a number of numpy": ("import numpy\nC = numpy.float64({c})", "C * x"),
    "a module by another name": (
        "import types\nm = types.ModuleType('m')\nm.c = {c}\ndef helper(m, x):\n    return m.c * x", "helper(m, x)"
    ),
    "a module": ("import types\nm = types.ModuleType('m')\nm.inner = types.ModuleType('m.inner')\nm.inner.c = {c}", "m.inner.c * x"),
    "a function in a module": (
        "import types\nm = types.ModuleType('m')\nC = {c}\ndef helper(x):\n    return C * x\nm.helper = helper", "m.helper(x)"
    ),
    "a module that is imported inside": (
        "import sys, types\nm = types.ModuleType('changed')\nm.c = {c}\nsys.modules['changed'] = m",
        "__import__('changed').c * x",
    ),
}  # fmt: skip

CELL = """
def formula(logp, old_logp, advantage, params):
    x = logp - old_logp
    return -advantage * {used}, -advantage * (1.0 + 0.0 * {used})
"""


@pytest.mark.parametrize("changed", REDEFINED)
def test_what_a_formula_uses_may_be_defined_again(changed: str) -> None:
    """A cell of a notebook is run again: the formula stays, what it uses is another."""
    cell, used = REDEFINED[changed]
    for strict, anew in itertools.product((False, True), repeat=2):
        names: dict[str, Any] = {"__name__": "notebook", "ops": ops}
        exec(cell.format(c=0.5) + CELL.format(used=used), names)
        surrogate = Custom(names["formula"])
        objective, case = Objective(surrogate), build()
        for c in (0.5, 2.5, -1.0, 0.5):
            exec(cell.format(c=c), names)
            objective = Objective(surrogate) if anew else objective
            loss = grpo_loss(case.logits, case.batch(), objective, backend="cpu", strict=strict).loss
            expected = grpo_loss(case.logits, case.batch(), Objective(Custom(linear, (c,))), backend="eager").loss
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)


@dataclass(frozen=True)
class FromOutside(Surrogate):
    """A frozen surrogate whose parameters come from somewhere else."""

    function = staticmethod(surrogates.clip)
    width: ClassVar = [0.01]

    @property
    def params(self) -> tuple[float, ...]:
        return self.width[0], self.width[0], math.inf


def test_parameters_that_follow_from_something_else_are_asked_for_again(backend: str) -> None:
    objective = Objective(FromOutside())
    for width in (0.01, 0.5):
        FromOutside.width[0] = width
        found, expected = (run(build(), x, backend)[0].loss for x in (objective, Objective(Clip(width, width))))
        assert torch.equal(found, expected)


def test_nothing_of_the_user_is_kept() -> None:
    """Neither the function nor what lies beside it in its module."""
    for strict in (False, True):
        names: dict[str, Any] = {"__name__": "notebook", "ops": ops, "large": Large()}
        exec(REDEFINED["a constant of a helper"][0].format(c=0.5) + CELL.format(used="helper(x)"), names)
        seen = weakref.ref(names["large"])
        loss_of(Custom(names["formula"]), strict=strict)
        del names
        gc.collect()
        assert seen() is None


class Large:
    """A model, for example."""


def linear(logp: Any, old_logp: Any, advantage: Any, params: Any) -> Any:
    return -advantage * params[0] * (logp - old_logp), -advantage


def test_doctor_compares_formulas_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    token_program._made_before.cache_clear()
    assert self_test("cpu", torch.device("cpu")).failures == []
    monkeypatch.setattr(token_program._Made, "compared", property(lambda made: False, lambda made, value: None))
    monkeypatch.setattr(cpu, "_run", lambda program, numbers, inputs: [inputs[0] + 1] * 3)
    failures = self_test("cpu", torch.device("cpu")).failures
    assert failures and all("in the C++ kernel and" in str(check.failure) for check in failures)


def test_a_loss_of_every_one_pass_objective_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No objective of the package needs a second visit."""
    monkeypatch.setattr(cpu, "two_visits", None)
    for name in ONE_PASS:
        out, gradient = run(build(), OBJECTIVES[name][0](), "cpu")
        assert out.loss.isfinite() and gradient.any()
