"""Call the package's public functions as a `CallCase` says, and compare results with the oracle.

`check_case(case)` does both. The steps are

    p = problem(case)                        # the tensors of the call (call_cases.py)
    results = run_call(p)                    # values and gradients of the package
    assert_matches_oracle(p, results)        # against float64 (oracle.py)

A new keyword of a public function goes into `function_and_arguments`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import (
    Denominators,
    Exact,
    Head,
    LogitTransform,
    LossOutput,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from support import oracle
from support.call_cases import CallCase, Problem, SecondDistribution, problem, slice_vocabulary
from support.objectives import OBJECTIVES
from support.oracle import Answer


@cache
def expected_and_tolerance(case: CallCase) -> tuple[Answer, Answer]:
    """Return the oracle's results, and how far fp32 may be from each number. Cached.

    Both are an Answer, whose tensors have the same names and shapes.
    """
    p = problem(case)
    expected = oracle.answer(p)
    return expected, oracle.tolerances(p, expected)


# ---- the arguments of a call


def make_objective(case: CallCase) -> Objective:
    """Return the objective that the case names, with the case's divergence if it has one."""
    make_named_objective, _ = OBJECTIVES[case.objective]
    objective = make_named_objective()
    if isinstance(objective.kl, Exact):
        return replace(objective, kl=make_divergence(case))
    return objective


def make_divergence(case: CallCase) -> Exact:
    """Return the divergence of a case. "jsd .1" is a JSD with the mixture 0.1."""
    direction, _, mixture = case.exact.partition(" ")
    return Exact(direction, float(mixture) if mixture else None, case.tail, case.squared)


def make_transform(p: Problem) -> LogitTransform:
    """Return the transform. A single temperature is a 0-d tensor for some seeds, else a number."""
    temperature = p.temperature
    if isinstance(temperature, float) and p.case.seed % 2 and p.rows is None:
        temperature = torch.tensor(temperature)
    return LogitTransform(**{**p.transform, "temperature": temperature})


def make_batch(p: Problem, **changes: Any) -> TokenBatch:
    """Return the batch of a call.

    changes   fields of TokenBatch with other values than those of the problem
    """
    fields = dict(p.fields)
    if p.sets is not None:
        fields["kept"] = TokenSets.from_lists(p.sets)
        fields["missing"] = missing_argument(p.case)
    if p.terms is not None:
        ids_of_tokens, logp_values, prob_values = p.terms
        ids = TokenSets.from_lists(ids_of_tokens)
        fields["logp_terms"] = ids.with_values(logp_values)
        fields["prob_terms"] = ids.with_values(prob_values)
    return TokenBatch(p.targets, **{**fields, **changes})


def missing_argument(case: CallCase) -> str | None:
    """Return the argument `missing`. For odd seeds None, the default, stands for "include"."""
    return None if case.missing == "include" and case.seed % 2 else case.missing


def normalizer_argument(case: CallCase) -> Any:
    """Return the normalizer: None, a number, or one for each term of the loss."""
    if isinstance(case.normalizer, tuple):
        return Denominators(*case.normalizer)
    return case.normalizer


def reference_argument(p: Problem, other: SecondDistribution, shared: Tensor | None) -> Any:
    """Return the argument for the reference or teacher of a call.

    It is TokenSets with log-probs for a teacher that is known at some ids. From logits it is a
    tensor or (logits, transform), from hidden states it is (hidden, weight) or (hidden, Head).

    other    the reference or teacher
    shared   the policy's own tensor, which the reference may have in common with it: the weight if
             its kind is "near", the logits if its kind is "itself"; None: it has a copy
    """
    if other.ids is not None:
        logps = oracle.Rows(other.rows, p.ids, p.transform, p.sequences).log_p
        values = [logps[i, j] for i, ids in enumerate(other.ids) for j in ids]
        flat_values = torch.stack(values).float() if values else torch.zeros(0)
        return TokenSets.from_lists(other.ids).with_values(flat_values)
    has_transform = other.kind in ("own", "itself")
    transform = LogitTransform(**other.transform) if has_transform else None
    shared = None if shared is None else shared.detach()
    if "logits" in other.given:
        shares_logits = other.kind == "itself" and shared is not None
        logits = shared if shares_logits else other.given["logits"]
        return logits if transform is None else (logits, transform)
    shares_weight = other.kind == "near" and shared is not None
    weight = shared if shares_weight else other.given["weight"]
    head = weight if transform is None else Head(weight, transform=transform)
    return other.given["hidden"], head


def make_options(p: Problem, **changes: Any) -> Options:
    """Return the options of a call.

    changes   fields of Options with other values than those of the case
    """
    return Options(**{"skip_inactive": p.case.skip_inactive, **changes})


def with_options(**keywords: Any) -> dict[str, Any]:
    """Return keywords of a public function. Those that are fields of `Options` go into options=."""
    names = [name for name in keywords if name in Options.__dataclass_fields__]
    changes = {name: keywords.pop(name) for name in names}
    options = keywords.get("options") or Options()
    return {**keywords, "options": replace(options, **changes)}


def make_leaves(p: Problem) -> dict[str, Tensor]:
    """Return copies of the differentiable tensors of a call by name, with the strides of p.given.

    All require a gradient, except the one that the case freezes.
    """
    leaves = {}
    for name, x in p.given.items():
        copy = x.detach().clone(memory_format=torch.preserve_format)
        leaves[name] = copy.requires_grad_(name != p.case.frozen)
    return leaves


def function_and_arguments(
    p: Problem, shared: Tensor | None = None, objective: Objective | None = None, **options: Any
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return (public function, positional arguments, keywords) of a call.

    The differentiable tensors are not among them. A caller passes them before the others, see
    `bind_arguments`.

    shared      see `reference_argument`
    objective   used in place of the case's
    options     fields of `Options`
    """
    case = p.case
    from_logits = case.source == "logits"
    keywords: dict[str, Any] = {
        "transform": make_transform(p),
        "options": make_options(p, **options),
    }
    if from_logits:
        keywords["inplace"] = case.inplace
    if case.function == "loss":
        keywords["normalizer"] = normalizer_argument(case)
        if p.other is not None:
            name = "ref_logits" if from_logits else "reference"
            keywords[name] = reference_argument(p, p.other, shared)
        function = grpo_loss if from_logits else linear_grpo_loss
        return function, [make_batch(p), objective or make_objective(case)], keywords

    keywords["mask"] = p.fields["mask"]
    keywords["kept"] = None if p.sets is None else TokenSets.from_lists(p.sets)
    if case.function == "divergence":
        assert p.other is not None
        function = token_divergence if from_logits else linear_divergence
        reference = reference_argument(p, p.other, shared)
        return function, [reference, make_divergence(case)], keywords

    if p.sets is not None:
        keywords["missing"] = missing_argument(case)
    keywords["rows"] = p.fields.get("rows")
    keywords["at"] = None if p.at is None else TokenSets.from_lists(p.at)
    keywords["entropy"] = {"nothing": False, "detached": "detached"}.get(case.also, True)
    further_statistics = ("sum_squares", "log_kept_mass")
    keywords["also"] = tuple(name for name in further_statistics if case.also in (name, "all"))
    function = token_logprobs if from_logits else linear_logprobs
    return function, [p.targets], keywords


def make_call(p: Problem, shared: Tensor | None = None, **options: Any) -> Callable[..., Any]:
    """Return the call of a problem as a function of logits, or of hidden states, weight and bias.

    shared, options   see `function_and_arguments`
    """
    return bind_arguments(*function_and_arguments(p, shared, **options))


def bind_arguments(
    function: Any, arguments: list[Any], keywords: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function of the differentiable tensors alone.

    The tensors are (logits), (hidden, weight) or (hidden, weight, bias). The arguments are those of
    `function_and_arguments`.
    """

    def call(*tensors: Tensor) -> Any:
        """Call the function. A weight and a bias become a `Head`."""
        if len(tensors) == 3:
            hidden, weight, bias = tensors
            return function(hidden, Head(weight, bias), *arguments, **keywords)
        return function(*tensors, *arguments, **keywords)

    return call


# ---- running a call


def named_outputs(out: Any) -> dict[str, Tensor]:
    """Return the tensors that a public function returned, by name, without those that are None.

    out   a divergence, a LossOutput, or the log-probs and statistics of a TokenLogprobs
    """
    if isinstance(out, Tensor):
        return {"divergence": out}
    if isinstance(out, LossOutput):
        outputs = {name: getattr(out, name) for name in ("loss", "logps", "entropy", "divergence")}
    else:
        outputs = {"logps": out.logps, "entropy": out.entropy, **out.also}
    return {name: x for name, x in outputs.items() if x is not None}


def run_backward(
    p: Problem, outputs: dict[str, Tensor], scale: float = 1.0, **keywords: Any
) -> None:
    """Run backward from the loss, or without a loss from all outputs that have a gradient.

    The upstream gradients are scale * p.upstream. They have gaps in memory, as those of a user may.

    outputs    see `named_outputs`
    keywords   of torch.autograd.backward
    """
    names = ["loss"] if "loss" in outputs else list(outputs)
    names = [name for name in names if outputs[name].requires_grad]
    upstream = []
    for name in names:
        output = outputs[name]
        gradient = scale * p.upstream[name].to(output.dtype).view(output.shape)
        # The same values with a stride of 2 between the elements.
        upstream.append(torch.stack([gradient, gradient], -1)[..., 0])
    torch.autograd.backward([outputs[name] for name in names], upstream, **keywords)


class PreparedCall:
    """A call and its leaves, ready for a backward, for tests that do not compare values."""

    def __init__(self, case: CallCase, **options: Any) -> None:
        """Make the leaves of a case. `options` are fields of `Options`."""
        self.p: Problem = problem(case)
        self.leaves = [*make_leaves(self.p).values()]
        self.call = make_call(self.p, self.leaves[-1], **options)
        # Masked rows hold NaN, which these tests would read.
        for x in self.leaves:
            x.detach().nan_to_num_(0.0, 0.0, 0.0)

    def values(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the call by name, see `named_outputs`.

        tensors   used in place of the leaves; without any, the leaves are used
        """
        return named_outputs(self.call(*(tensors or self.leaves)))

    def gradients(
        self, values: dict[str, Tensor] | None = None, scale: float = 1.0, **keywords: Any
    ) -> list[Tensor]:
        """Return the gradients of the leaves that get one, in the order of the leaves.

        values            outputs of the call; None: the call is made
        scale, keywords   see `run_backward`
        """
        for x in self.leaves:
            x.grad = None
        values = self.values() if values is None else values
        run_backward(self.p, values, scale, **keywords)
        return [x.grad.clone() for x in self.leaves if x.grad is not None]


def run_call(p: Problem, **options: Any) -> Answer:
    """Return the package's values and gradients for a problem, and assert where memory is written.

    If the case has memory for the gradient of the weight (the option weight_grad), the call is made
    twice. Both add their gradient there, and half of the sum is returned.

    options   fields of `Options`, and `call`, which wraps the function that is called, for example
              torch.compile
    """
    case = p.case
    wrap = options.pop("call", lambda function: function)
    leaves = make_leaves(p)
    padded_weight_grad = None
    if case.weight_grad != "none":
        # Rows of the memory have a gap of 8 columns, which must stay NaN.
        weight = leaves["weight"]
        dtype = torch.float32 if case.weight_grad == "float32" else weight.dtype
        gap = torch.full((weight.shape[0], 8), math.nan, dtype=dtype)
        padded_weight_grad = torch.cat([torch.zeros(weight.shape, dtype=dtype), gap], 1)
        options["weight_grad"] = padded_weight_grad[:, : weight.shape[1]]
    tensors = [*leaves.values()]
    if case.inplace:
        # A leaf that requires a gradient must not be overwritten, so the call gets a copy of it.
        logits = leaves["logits"]
        if case.view == "whole":
            tensors = [logits * 1]
        else:  # a product would be contiguous
            memory = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype)
            tensors = [CopyToMemory.apply(logits, memory)]
    call = make_call(p, leaves.get("weight", tensors[0]), **options)

    def call_with_names(*x: Tensor) -> dict[str, Tensor]:
        return named_outputs(call(*x))

    outputs = wrap(call_with_names)(*tensors)
    assert case.also != "detached" or not outputs["entropy"].requires_grad
    run_backward(p, outputs)
    gradients = {name: x.grad for name, x in leaves.items() if name != case.frozen}
    if padded_weight_grad is not None:
        assert gradients["weight"] is None, "with weight_grad= autograd gave the weight a gradient"
        run_backward(p, named_outputs(call(*make_leaves(p).values())))
        gap = padded_weight_grad[:, leaves["weight"].shape[1] :]
        assert gap.isnan().all(), "the gap between rows of weight_grad was written to"
        gradients["weight"] = options["weight_grad"] / 2
    return Answer(
        {name: x.detach() for name, x in outputs.items()},
        {name: x for name, x in gradients.items() if x is not None},
    )


class CopyToMemory(torch.autograd.Function):
    """Copy x into given memory, which has the shape of x but may have other strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        """Overwrite `memory` with x, and return it."""
        return memory.copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, which is that of the copy, and None for the memory."""
        return gradient.clone(), None


class FuncVjp(torch.autograd.Function):
    """A function whose values and gradients come from torch.func.vjp instead of autograd."""

    @staticmethod
    def forward(ctx: Any, function: Any, *tensors: Tensor) -> Any:
        """Return function(*tensors), a tuple of tensors."""
        values, ctx.vjp = torch.func.vjp(function, *(x.detach() for x in tensors))
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return None for the function, and the gradient of each tensor."""
        return None, *ctx.vjp(gradients)


def with_func_vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with gradients from torch.func.vjp, for `run_call(p, call=...)`.

    function   returns tensors by name
    """

    def call_with_vjp(*tensors: Tensor) -> dict[str, Tensor]:
        """Return function(*tensors). Backward through the results uses torch.func.vjp."""
        names: list[str] = []  # of the results, filled when FuncVjp calls output_values

        def output_values(*x: Tensor) -> tuple[Tensor, ...]:
            """Return the results without their names, because vjp takes a tuple of tensors."""
            outputs = function(*x)
            names[:] = outputs
            return tuple(outputs.values())

        results = FuncVjp.apply(output_values, *tensors)
        return dict(zip(names, results, strict=True))

    return call_with_vjp


# ---- comparing with the oracle


def check_case(case: CallCase, **options: Any) -> None:
    """Assert that values and gradients of a call are as near to float64 as fp32 allows.

    options   see `run_call`
    """
    assert_matches_oracle(problem(case), run_call(problem(case), **options))


def assert_matches_oracle(p: Problem, results: Answer) -> None:
    """Assert that values and gradients are within the tolerance, and 0 where nothing is trained.

    results   the package's results for the problem p, from `run_call`
    """
    case = p.case
    expected, tolerance = expected_and_tolerance(case)
    is_untrained = ~p.trained.view(p.shape)
    for name, value in results.values.items():
        if name in ("logps", "entropy") and (case.skip_inactive or case.function == "divergence"):
            continue
        assert name in expected.values, (
            f"{case}: the oracle has no {name!r}: add it to `answer` in tests/support/oracle.py"
        )
        assert name != "logps" or not (value > 0).any(), f"{case}: a probability above 1"
        if name != "loss" or expected.clear:
            assert_near(value, expected.values[name], tolerance.values[name], f"{case}: {name}")
        if name != "at" and value.shape == is_untrained.shape:
            assert (value[is_untrained] == 0).all(), f"{case}: {name} of rows that are not trained"

    assert results.gradients.keys() == expected.gradients.keys(), case
    expected_gradients = slice_vocabulary(expected.gradients, p.columns)
    gradient_tolerances = slice_vocabulary(tolerance.gradients, p.columns)
    is_untrained_row = ~p.by_row(p.trained).view(p.leading)
    for name, gradient in results.gradients.items():
        may_overflow = gradient.dtype == torch.float16
        assert may_overflow or torch.isfinite(gradient).all(), (
            f"{case}: the gradient of {name} is not finite"
        )
        if expected.clear:
            what = f"{case}: gradient of {name}"
            assert_near(gradient, expected_gradients[name], gradient_tolerances[name], what)
        if name in ("logits", "hidden"):
            assert (gradient[is_untrained_row] == 0).all(), (
                f"{case}: the gradient of {name} in rows that are not trained"
            )
    reads_all_ids = case.also in ("log_kept_mass", "all")
    if "logits" in results.gradients and p.keep is not None and not reads_all_ids:
        gradient = results.gradients["logits"]
        is_outside = ~p.by_row(p.keep)[:, p.columns].view(gradient.shape)
        assert (gradient[is_outside] == 0).all(), (
            f"{case}: logits outside of their candidate set have a gradient"
        )


def assert_near(actual: Tensor, expected: Tensor, tolerance: Tensor, what: str) -> None:
    """Assert that `actual` is near `expected`, and infinite at the same elements.

    Numbers that the dtype of `actual` cannot hold are compared as its largest number. The three
    tensors have the same number of elements.

    expected    float64
    tolerance   float64, the largest allowed absolute error of each element
    what        the name of the tensor in the error message
    """
    assert actual.numel() == expected.numel(), (
        f"{what} has shape {list(actual.shape)}, not {list(expected.shape)}"
    )
    largest = torch.finfo(actual.dtype).max
    actual = actual.double().reshape(-1)
    expected = expected.reshape(-1)
    is_infinite = expected.isinf()
    assert torch.equal(actual[is_infinite], expected[is_infinite]), f"{what}: infinite elsewhere"
    actual = actual[~is_infinite].clamp(-largest, largest)
    expected = expected[~is_infinite].clamp(-largest, largest)
    tolerance = tolerance.reshape(-1)[~is_infinite]
    is_bad = ~((actual - expected).abs() <= tolerance)
    assert not is_bad.any(), (
        f"{what}: {actual[is_bad][:4].tolist()}, not {expected[is_bad][:4].tolist()}, tolerance"
        f" {tolerance[is_bad][:4].tolist()}, at {is_bad.nonzero()[:4, 0].tolist()}"
    )
