"""The loss of a token and its gradients, computed from its log-prob and entropy.

    loss = policy_weight * (surrogate + auxiliary_loss)
         + kl_weight * kl
         - entropy_weight * entropy
         - nll_weight * logp

`token_loss` is this sum. It is written for one token, in arithmetic and the functions of `ops`, so
it runs on tensors [num_tokens], and program.py can trace it into a program for the C++ and Triton
kernels. `TokenLossFormula` is what the kernels receive: the sum with the functions and numbers of
an objective, and with the inputs of each token.

Whatever needs more than one token is computed by `Objective`: the log-ratio of a sequence, filters
and selections over a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .formula_keys import key_of, name_of_function, users_functions
from .kl import KlTerms, kl_terms
from .ops import ops, random_log_probs
from .program import Program, RunProgram, TracedProgram, Tracer, traced_program
from .token_inputs import PROGRAM_INPUTS, TokenInputs, old_or_current

# ---- what the sum is made of


@dataclass(frozen=True)
class FormulaFunctions:
    """The functions of an objective, and the settings by which its loss formula branches.

    Code that is generated from the formula depends on all of them: if one changes, the code is
    generated again. Numbers that the code receives at each call are in `FormulaNumbers`.

    surrogate           function (logp, old_logp, advantage, params) -> (loss, d loss / d logp)
    ratio_is_detached   whether the ratio is a constant weight, see `Surrogate.detached_ratio`
    level               `Objective.level`
    trust_region        function (logp, anchor_logp, advantage, params) -> whether to keep the
                        token; None without a trust region
    kl                  keyword arguments of `kl_terms`, from `Kl.formula`
    """

    surrogate: Callable[..., Any]
    ratio_is_detached: bool
    level: str
    trust_region: Callable[..., Any] | None
    kl: dict[str, Any]

    def values(self) -> list[Any]:
        """Return everything that generated code depends on, in one list.

        These are functions (the surrogate, the trust region or None, the KL estimator and the sum
        of its value and slope or None) and settings (whether the ratio is detached, the level, the
        weighting of the KL, whether it is straight-through).

        The code is cached under the keys of the entries, so their order must not change. The
        surrogate is the first, because error messages name the first function.
        """
        return [
            self.surrogate,
            self.ratio_is_detached,
            self.level,
            self.trust_region,
            *self.kl.values(),
        ]


@dataclass(frozen=True)
class FormulaNumbers:
    """The numbers of an objective, such as clip widths.

    Generated kernel code receives them at each call, so other numbers need no other code.

    surrogate_params   the last argument of the surrogate
    trust_params       (low, high), the last argument of the trust region; () without one
    entropy_floor      (threshold,) of an `EntropyFloor`; None without one
    ratio_bounds       (low, high), bounds of the log-ratio; None without bounds
    kl_clamps          `Kl.clamps`, two numbers; None without clamps

    To generate the code, a `Tracer` runs the formula once on symbols, which record the operations
    on them. The fields then hold symbols in place of numbers.
    """

    surrogate_params: tuple[Any, ...] = ()
    trust_params: tuple[Any, ...] = ()
    entropy_floor: tuple[Any] | None = None
    ratio_bounds: tuple[Any, Any] | None = None
    kl_clamps: tuple[Any, Any] | None = None

    def values(self) -> list[Any]:
        """Return all numbers in one list, field after field. Fields that are None are left out."""
        # Each field is a tuple of numbers, or None.
        return list(chain.from_iterable(x for x in vars(self).values() if x is not None))

    def counts(self) -> tuple[int | None, ...]:
        """Return how many numbers each field has, in the order of the fields; None for None.

        Generated kernel code depends on these counts, but not on the numbers themselves.
        """
        return tuple(None if x is None else len(x) for x in vars(self).values())

    def as_symbols(self, tracer: Tracer) -> FormulaNumbers:
        """Return a copy with a new symbol in place of each number, None in place of None.

        The tracer runs the formula once on symbols, to record its operations as a program for the
        kernels. A symbol that stands for one of these numbers is a parameter of the program: the
        program receives its value at each call. The values are passed in the order of the method
        `values`, so the parameters are made in this order.

        tracer   makes the symbols, and records the operations on them
        """
        fields = [
            None if count is None else tuple(tracer.parameter() for _ in range(count))
            for count in self.counts()
        ]
        return FormulaNumbers(*fields)  # type: ignore[arg-type]


class TokenValues(NamedTuple):
    """The inputs of `token_loss`: fp32 tensors [num_tokens].

    To generate kernel code, `token_loss` is run once on symbols of a `Tracer` in their place, which
    record the operations on them.

    logp             log-prob of the token under the policy
    entropy          entropy of the policy at the token, in nats
    old_logp         log-prob at the start of the update. If all tokens are on-policy, it is the
                     same object as `logp`.
    anchor_logp      log-prob that a trust region compares with
    ref_logp         log-prob under the reference; None without a KL estimate
    log_ratio        log-ratio at the objective's level, of the token or of its sequence
    advantage        advantage of the token
    auxiliary_loss   loss of extra ids, which are ids besides the sampled token whose log-probs the
                     loss uses. It is added to the surrogate; None without such ids
    policy_weight    weight of the policy term
    kl_weight        weight of the KL estimate; None leaves the term out
    entropy_weight   weight of the entropy bonus; None leaves the term out
    nll_weight       weight of -logp; None leaves the term out
    """

    logp: Any
    entropy: Any
    old_logp: Any
    anchor_logp: Any
    ref_logp: Any
    log_ratio: Any
    advantage: Any
    auxiliary_loss: Any
    policy_weight: Any
    kl_weight: Any
    entropy_weight: Any
    nll_weight: Any

    @classmethod
    def from_names(cls, named: dict[str, Any]) -> TokenValues:
        """Make the inputs of `token_loss` from a dictionary of named inputs.

        If an optional input is missing, its field is None, with these exceptions:
        - Without "old_logps" all tokens are on-policy, so the old log-prob is the log-prob.
        - Without "sampler_logps" a trust region compares with the old log-prob.
        - Without "log_ratios" the log-ratio is logp - old_logp of each token.

        named   "logps", "entropy", and those names in PROGRAM_INPUTS that the tokens have -> fp32
                [num_tokens], or a symbol that records the operations on it for the kernels
        """
        logp = named["logps"]
        old_logp = named.get("old_logps", logp)
        log_ratio = named.get("log_ratios")
        if log_ratio is None:
            log_ratio = logp - old_logp
        return cls(
            logp=logp,
            entropy=named["entropy"],
            old_logp=old_logp,
            anchor_logp=named.get("sampler_logps", old_logp),
            ref_logp=named.get("ref_logps"),
            log_ratio=log_ratio,
            advantage=named["advantages"],
            auxiliary_loss=named.get("auxiliary_loss"),
            policy_weight=named["policy_weight"],
            kl_weight=named.get("kl_weight"),
            entropy_weight=named.get("entropy_weight"),
            nll_weight=named.get("nll_weight"),
        )


class TokenLosses(NamedTuple):
    """The loss of each token and its gradients, fp32 [num_tokens] each.

    The sum of `losses` is the loss of the batch.

    losses                the loss of each token, with all weights
    grad_logps            d loss / d log-prob of the token
    grad_entropy          d loss / d entropy. Without an entropy bonus None, or 0 from `token_loss`
    grad_log_ratios       d loss / d log-ratio of the sequence, which is not part of grad_logps;
                          None at token level
    grad_auxiliary_loss   d loss / d auxiliary loss; None without one
    log_ratios            log-ratio of the token's sequence, an input; None at token level
    """

    losses: Any
    grad_logps: Any
    grad_entropy: Any
    grad_log_ratios: Any = None
    grad_auxiliary_loss: Any = None
    log_ratios: Any = None


# ---- the sum


def token_loss(
    token: TokenValues, functions: FormulaFunctions, numbers: FormulaNumbers
) -> TokenLosses:
    """Return the loss of each token and its gradients.

        loss = policy_weight * (surrogate + auxiliary_loss)
             + kl_weight * kl
             - entropy_weight * entropy
             - nll_weight * logp

    The policy term, the first line, is 0 for a token that is dropped: if its weight is 0, if its
    entropy is below the entropy floor, or if it is outside of the trust region. The trust region
    does not drop the auxiliary loss.

    If a number that the policy term reads is NaN and the policy weight is not 0, loss and gradient
    are NaN, even if a comparison in the surrogate, the trust region or a bound hides the NaN. The
    exception is anchor_logp: a NaN in `sampler_logps` means that the sampler did not score the
    token, and the trust region drops it.

    token       the inputs of the tokens: fp32 [num_tokens] each. To generate kernel code, the
                function is run once on symbols in their place, which record the operations.
    functions   the functions of the objective, such as its surrogate
    numbers     the numbers of the objective, such as its clip widths

    Return `TokenLosses`: the losses, and their derivatives in log-prob, entropy, log-ratio of the
    sequence and auxiliary loss. A derivative that the objective does not have is 0.
    """
    zero = token.policy_weight * 0.0  # a 0 for each token; torch.zeros does not exist in a kernel
    minimum = minimum_of_inputs(token, functions, numbers)  # NaN if an input is NaN
    is_number = minimum == minimum  # False for NaN

    # Which tokens have no policy term.
    is_dropped = token.policy_weight == 0.0
    entropy_weight = token.entropy_weight
    if numbers.entropy_floor is not None:
        is_low = below_floor(token.entropy, numbers.entropy_floor[0])
        is_dropped = is_dropped | is_low
        if entropy_weight is not None:
            entropy_weight = ops.where(is_low, 0.0, entropy_weight)
    # A trust region drops the sampled token. The auxiliary loss of extra ids stays.
    auxiliary_is_dropped = is_dropped
    if functions.trust_region is not None:
        is_trusted = functions.trust_region(
            token.logp, token.anchor_logp, token.advantage, numbers.trust_params
        )
        is_dropped = is_dropped | (is_number & ~is_trusted)

    # The policy term. If one of its inputs is NaN, so is `minimum`. It takes the place of the
    # weight then, which makes loss and gradient NaN.
    policy_weight = ops.where(is_number, token.policy_weight, minimum)
    surrogate, grad_surrogate = policy_term(token, functions, numbers, zero)
    # A token of weight 0 contributes 0 even if its ratio is NaN.
    loss = ops.where(is_dropped, 0.0, policy_weight * surrogate)
    grad_logp = ops.where(is_dropped, 0.0, policy_weight * grad_surrogate)
    grad_auxiliary_loss = zero
    if token.auxiliary_loss is not None:
        loss = loss + ops.where(auxiliary_is_dropped, 0.0, policy_weight * token.auxiliary_loss)
        grad_auxiliary_loss = ops.where(auxiliary_is_dropped, 0.0, policy_weight)
    # At these levels, unless the ratio counts as a constant, grad_surrogate is the derivative in
    # the log-ratio of the sequence, not in logp. The caller passes it on to all tokens of the
    # sequence (`SequenceRatio.gradient`).
    grad_log_ratio = zero
    if functions.level in ("sequence", "sequence-sum") and not functions.ratio_is_detached:
        grad_log_ratio = grad_logp
        grad_logp = zero

    # The other terms, if the objective has them.
    if token.kl_weight is not None:
        kl = kl_term(token, functions, numbers)
        loss = loss + token.kl_weight * kl.value
        if functions.level == "sequence" and functions.kl["weighting"] == "ratio":
            # The KL is multiplied by the ratio of the sequence, which has a gradient too.
            grad_logp = grad_logp + token.kl_weight * kl.grad_fixed_ratio
            grad_log_ratio = grad_log_ratio + token.kl_weight * kl.grad_through_ratio
        else:
            grad_logp = grad_logp + token.kl_weight * kl.grad_both

    grad_entropy = zero
    if entropy_weight is not None:
        loss = loss - entropy_weight * token.entropy
        grad_entropy = -entropy_weight

    if token.nll_weight is not None:
        # A token of weight 0 contributes 0 even if its log-prob is -inf.
        loss = loss - ops.where(token.nll_weight == 0.0, 0.0, token.nll_weight * token.logp)
        grad_logp = grad_logp - token.nll_weight
    return TokenLosses(
        losses=loss,
        grad_logps=grad_logp,
        grad_entropy=grad_entropy,
        grad_log_ratios=grad_log_ratio,
        grad_auxiliary_loss=grad_auxiliary_loss,
    )


def minimum_of_inputs(
    token: TokenValues, functions: FormulaFunctions, numbers: FormulaNumbers
) -> Any:
    """Return the minimum of the inputs of the policy term, which is NaN if one of them is NaN.

    The inputs are the advantage, the two log-probs (at a sequence level the log-ratio of the
    sequence instead), and the entropy if there is an entropy floor.

    The caller uses only whether the result is NaN. A sum would not do: inf - inf is NaN too.

    token       the inputs of the tokens: fp32 [num_tokens] each. To generate kernel code, the
                function is run once on symbols in their place, which record the operations.
    functions   the functions of the objective, of which only the level is read
    numbers     the numbers of the objective, of which only the entropy floor is read

    Return fp32 [num_tokens], or a symbol.
    """
    if functions.level == "token":
        minimum = ops.minimum(token.logp, token.advantage)
        # `TokenValues.from_names` sets old_logp to logp itself if all tokens are on-policy. The
        # minimum with it would then be an operation of the kernel without effect.
        is_on_policy = token.old_logp is token.logp
        if not is_on_policy:
            minimum = ops.minimum(minimum, token.old_logp)
    else:
        minimum = ops.minimum(token.log_ratio, token.advantage)
    if numbers.entropy_floor is not None:
        minimum = ops.minimum(minimum, token.entropy)
    return minimum


def policy_term(
    token: TokenValues, functions: FormulaFunctions, numbers: FormulaNumbers, zero: Any
) -> tuple[Any, Any]:
    """Return the surrogate of each token and its derivative, without the policy weight.

    The derivative is d surrogate / d logp at level "token", and at any level if the ratio counts as
    a constant (`ratio_is_detached`). Otherwise it is d surrogate / d log-ratio.

    A surrogate function takes two log-probs. At level "token" without `ratio_bounds` it gets logp
    and old_logp. Otherwise it gets two numbers whose difference is the log-ratio of the token or of
    its sequence, clamped to `ratio_bounds` if there are any.

    token       the inputs of the tokens: fp32 [num_tokens] each. To generate kernel code, the
                function is run once on symbols in their place, which record the operations.
    functions   the functions of the objective, such as its surrogate
    numbers     the numbers of the objective, such as its clip widths
    zero        0 for each token, fp32 [num_tokens] or a symbol

    Return (surrogate, derivative), fp32 [num_tokens] each, or symbols.
    """
    surrogate = functions.surrogate
    params = numbers.surrogate_params
    bounds = numbers.ratio_bounds
    if functions.level == "token" and bounds is None:
        return surrogate(token.logp, token.old_logp, token.advantage, params)
    log_ratio = token.log_ratio
    if bounds is not None:
        low, high = bounds
        log_ratio = ops.minimum(ops.maximum(log_ratio, low), high)
    if functions.ratio_is_detached:
        # The surrogate depends on logp and on the ratio. Pass an old log-prob with this ratio.
        return surrogate(token.logp, token.logp - log_ratio, token.advantage, params)
    # The surrogate depends on the ratio alone. Pass any two numbers with this difference.
    loss, grad = surrogate(log_ratio, zero, token.advantage, params)
    if bounds is None:
        return loss, grad
    # Where the clamp changed the log-ratio, the loss is a constant.
    return loss, ops.where(log_ratio == token.log_ratio, grad, 0.0)


def kl_term(token: TokenValues, functions: FormulaFunctions, numbers: FormulaNumbers) -> KlTerms:
    """Return the KL estimate of each token and its derivatives, without `kl_weight`.

    The result contains the weighting of the estimate by a ratio (`Kl.weighting`), if there is one.

    token       the inputs of the tokens: fp32 [num_tokens] each. To generate kernel code, the
                function is run once on symbols in their place, which record the operations.
    functions   the functions of the objective; `kl` has the estimator and its weighting
    numbers     the numbers of the objective; `kl_clamps` has two bounds, or is None
    """
    token_log_ratio = token.logp - token.old_logp
    return kl_terms(
        token.logp,
        token.old_logp,
        token.ref_logp,
        log_ratio=log_ratio_of_kl(token.log_ratio, token_log_ratio, functions.level),
        clamps=numbers.kl_clamps,
        **functions.kl,
    )


def log_ratio_of_kl(log_ratio: Any, token_log_ratio: Any, level: str) -> Any:
    """Return the log of the ratio that the KL estimate of each token may be multiplied by.

    It is `log_ratio`, except that at level "sequence-sum" it is `token_log_ratio`. At that level
    `log_ratio` is a sum over the whole sequence, so its exponential, a product of the ratios of all
    tokens, would dominate the KL.

    log_ratio         fp32 [num_tokens], log-ratio of the token, or at other levels than "token" of
                      its sequence
    token_log_ratio   fp32 [num_tokens], logp - old_logp of the token
    level             `Objective.level`, for example "token"
    """
    return token_log_ratio if level == "sequence-sum" else log_ratio


def below_floor(entropy: Any, floor: Any) -> Any:
    """Return whether the entropy of each token is below the floor, so that the token is dropped.

    entropy   fp32 [num_tokens] in nats; or a symbol, which records the comparison for the kernels
    floor     number in nats, a 0-d tensor or a symbol
    """
    # False for a NaN, so that the token is kept and its loss is NaN instead of hiding it.
    return entropy < floor


# ---- the sum with the functions and numbers of an objective


class TracedLoss(NamedTuple):
    """The formula of an objective as a program: the list of its operations, for the kernels.

    traced           the program, or the reason why the formula cannot be traced
    scalars          the values of the program's scalars, from `Program.scalar_values`
    user_functions   the functions of the user in the formula, each with its key when the program
                     was traced (`formula_keys.key_of`)
    """

    traced: TracedProgram
    scalars: list[float]
    user_functions: list[tuple[Any, Any]]

    def is_current(self) -> bool:
        """Return whether no function of the user has changed since the program was traced.

        A function has changed if its code or something that it uses, such as a global, has another
        value. Its key is then another one.
        """
        return all(key_of(function) == key for function, key in self.user_functions)


@dataclass(frozen=True, eq=False)
class ObjectiveFormula:
    """The loss of a token as an objective defines it, without the inputs of tokens.

    functions   the surrogate and other functions of the objective
    numbers     the clip widths and other numbers of the objective
    _traced     the programs that were traced from this formula, by the names of their inputs
    """

    functions: FormulaFunctions
    numbers: FormulaNumbers
    _traced: dict[tuple[str, ...], TracedLoss] = field(default_factory=dict, repr=False)

    def compute(self, named: dict[str, Any]) -> TokenLosses:
        """Return the loss of each token and its gradients, computed in torch.

        named   "logps", "entropy", and those names in PROGRAM_INPUTS that the tokens have -> fp32
                [num_tokens]. "old_logps" must have no mark ON_POLICY.
        """
        return token_loss(TokenValues.from_names(named), self.functions, self.numbers)

    def with_surrogate_params(self, params: tuple[Any, ...]) -> ObjectiveFormula:
        """Return a copy of this formula with other parameters of the surrogate.

        params   the last argument of the surrogate function, such as (eps_low, eps_high, delta)
        """
        numbers = replace(self.numbers, surrogate_params=params)
        return ObjectiveFormula(self.functions, numbers)

    def traced_loss(self, input_names: tuple[str, ...]) -> TracedLoss:
        """Return the formula as a program, the list of its operations, for the kernels.

        The formula is traced: it is run once on symbols, which record the operations on them. A
        program that was traced before for the same inputs is returned again, unless a function of
        the user, or something that such a function uses, has changed since.

        input_names   those names in PROGRAM_INPUTS that the tokens have

        Raises FormulaRefused if the formula cannot be traced.
        """
        traced_before = self._traced.get(input_names)
        if traced_before is not None and traced_before.is_current():
            return traced_before

        def trace(tracer: Tracer) -> list[Any]:
            """Run the formula on symbols, and return the symbols of its outputs."""
            named = {name: tracer.input(name) for name in ("logps", "entropy", *input_names)}
            token = TokenValues.from_names(replace_on_policy_marks(named))
            symbols = self.numbers.as_symbols(tracer)
            token_losses = token_loss(token, self.functions, symbols)
            return [getattr(token_losses, name) for name in output_names(input_names)]

        functions = self.functions.values()
        # Functions with equal keys have equal code. The key is None for a function that may behave
        # differently at each call.
        keys = [key_of(x) for x in functions]
        traced = traced_program(
            keys=(*keys, input_names, self.numbers.counts()),
            name=name_of_functions(functions),
            trace=trace,
        )
        result = TracedLoss(
            traced=traced,
            scalars=traced.require_program().scalar_values(self.numbers.values()),
            user_functions=[(x, key_of(x)) for x in users_functions(functions)],
        )
        if None not in keys:
            self._traced[input_names] = result
        return result

    def compare_with_torch(self, input_names: tuple[str, ...], run: RunProgram) -> None:
        """Raise FormulaRefused unless the program of the formula computes the same as torch.

        The program is the list of operations that the kernels run. It was recorded by running the
        formula on symbols. A function of the user may do something else with symbols than with
        tensors, so program and formula are compared on random inputs. Does nothing if a comparison
        has succeeded before for the same functions.

        input_names   those names in PROGRAM_INPUTS that the tokens have
        run           runs a program: (program, values of its scalars, inputs) -> outputs
        """
        names = ("logps", "entropy", *input_names)
        outputs = output_names(input_names)
        traced_loss = self.traced_loss(input_names)

        def compute_in_torch(inputs: list[Tensor]) -> list[Any]:
            """Return the outputs of the formula in torch, fp32 [num_tokens] each."""
            named = dict(zip(names, inputs, strict=True))
            token_losses = self.compute(replace_on_policy_marks(named))
            return [getattr(token_losses, name) for name in outputs]

        traced_loss.traced.compare_with_torch(
            run,
            traced_loss.scalars,
            make_inputs=lambda: random_inputs(names),
            compute_in_torch=compute_in_torch,
            output_names=outputs,
        )


def replace_on_policy_marks(named: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with the log-prob of the token in place of each mark ON_POLICY.

    The mark in "old_logps" (1e30) says that a token was sampled from the current policy, so that
    its old log-prob equals its log-prob. The code of every kernel contains this step, so that the
    same code serves batches with and without marks. Without "old_logps", `named` itself is
    returned.

    named   "logps", "old_logps" and other inputs by name: fp32 [num_tokens] each, or symbols that
            record the operations on them for the kernels
    """
    if "old_logps" not in named:
        return named
    return {**named, "old_logps": old_or_current(named["old_logps"], named["logps"])}


def output_names(input_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of what a loss program computes: fields of `TokenLosses`, in their order.

    A program is a loss formula as the list of its operations, which kernels run. Every program
    computes "losses", "grad_logps" and "grad_entropy". A gradient in the log-ratio of a sequence,
    "grad_log_ratios", or in the loss of extra ids, "grad_auxiliary_loss", comes after them if this
    number is an input of the program.

    input_names   those names in PROGRAM_INPUTS that the program has
    """
    names = ["losses", "grad_logps", "grad_entropy"]
    names += [f"grad_{name}" for name in ("log_ratios", "auxiliary_loss") if name in input_names]
    return tuple(names)


def name_of_functions(functions: list[Any]) -> str:
    """Return the names of the user's functions, separated by commas, for error messages.

    If no function is the user's, return the name of the first one.

    functions   what a formula is made of, the surrogate first: functions, and settings such as the
                level
    """
    named = users_functions(functions) or functions[:1]
    return ", ".join(dict.fromkeys(name_of_function(x) for x in named))


def random_inputs(names: tuple[str, ...]) -> list[Tensor]:
    """Return random values of each input, to compare a formula in a kernel with torch.

    Some values of each input are infinite or NaN, and some advantages and weights are 0.

    names   names of the inputs: "logps", "entropy" or names in PROGRAM_INPUTS

    Return one fp32 [512] for each name.
    """
    num_tokens = 512
    generator = torch.Generator().manual_seed(0)
    logp, _ = random_log_probs(num_tokens, generator)
    inputs = []
    for name in names:
        if name == "logps":
            x = logp.float()
        elif name.endswith("logps"):  # another log-prob of the same tokens
            _, difference = random_log_probs(num_tokens, generator)
            x = (logp + difference).float()
        elif name == "entropy":
            x = 6.0 * torch.rand(num_tokens, generator=generator)
        else:
            is_nonzero = torch.rand(num_tokens, generator=generator) < 0.75
            x = torch.randn(num_tokens, generator=generator) * is_nonzero
        special = torch.tensor([torch.inf, -torch.inf, torch.nan] * 3)
        places = torch.randint(0, num_tokens, special.shape, generator=generator)
        inputs.append(x.index_copy(0, places, special))
    return inputs


# ---- the sum with the inputs of tokens


class TokenLossFormula(NamedTuple):
    """The loss of tokens as an objective defines it, with the inputs of each token.

    If the gradient of a token depends on this token alone, the kernels evaluate the formula while
    they process the logits of the token. Otherwise it is evaluated on vectors [num_tokens], after
    the log-probs of all tokens are known. What depends on other tokens is then among the inputs:
    log-ratios of sequences, and weights after filters.

    objective_formula   the functions and numbers of the objective
    inputs              the inputs of each token
    """

    objective_formula: ObjectiveFormula
    inputs: TokenInputs

    def select(self, token_ids: slice | Tensor) -> TokenLossFormula:
        """Return the formula with the inputs of some of the tokens.

        token_ids   the tokens to select: a slice, or indices int64 [num_selected]. For a slice of
                    all tokens the result is this object.
        """
        if isinstance(token_ids, slice):
            num_tokens = self.inputs.targets.numel()
            if token_ids.indices(num_tokens) == (0, num_tokens, 1):
                return self
        return self._replace(inputs=self.inputs.select(token_ids))

    def compute(self, logps: Tensor, entropy: Tensor | None) -> TokenLosses:
        """Return the loss of each token and its gradients, computed in torch.

        logps     fp32 [num_tokens], log-prob of each token under the policy
        entropy   fp32 [num_tokens] in nats; None if no term reads it
        """
        named_inputs = self.inputs.formula_inputs(logps, entropy)
        token_losses = self.objective_formula.compute(named_inputs)
        # Drop the gradients that a kernel does not compute for these inputs, which are 0 here.
        return self.named_outputs([getattr(token_losses, name) for name in self.output_names()])

    def named_outputs(self, outputs: Sequence[Any]) -> TokenLosses:
        """Return what a kernel has computed, the outputs of the formula, as `TokenLosses`.

        A kernel always computes a gradient of the entropy. It becomes None if there is no entropy
        bonus.

        outputs   fp32 [num_tokens] each, in the order of the method `output_names`
        """
        named = dict(zip(self.output_names(), outputs, strict=True))
        if self.inputs.entropy_weight is None:
            named["grad_entropy"] = None
        return TokenLosses(**named, log_ratios=self.inputs.log_ratios)

    def output_names(self) -> tuple[str, ...]:
        """Return the names of what a kernel computes for these inputs: fields of `TokenLosses`."""
        return output_names(self.input_names())

    def program(self) -> tuple[Program, list[float]]:
        """Return the formula as a program for the kernels, and the values of its scalars.

        A program is the list of the formula's operations, recorded by running it once on symbols.
        It computes the outputs `output_names` from log-prob, entropy and the inputs `input_names`.
        Its scalars are the numbers that are the same for all tokens, such as clip widths. Raises
        FormulaRefused if the formula cannot be recorded, for example because it branches on values.
        """
        traced_loss = self.objective_formula.traced_loss(self.input_names())
        return traced_loss.traced.require_program(), traced_loss.scalars

    def input_names(self) -> tuple[str, ...]:
        """Return the names in PROGRAM_INPUTS of the inputs that are not None, in this order."""
        fields = self.inputs.__dict__
        return tuple(name for name in PROGRAM_INPUTS if fields[name] is not None)

    def program_inputs(self, program: Program) -> dict[str, Tensor]:
        """Return the inputs of a program by name, fp32 [num_tokens] each, contiguous.

        Log-prob and entropy are not among them, because kernels compute both.

        program   from the method `program`
        """
        tensors = self.inputs.program_inputs()
        return {name: tensors[name].contiguous() for name in program.inputs if name in tensors}

    def compare_with_torch(self, run: RunProgram) -> None:
        """Raise FormulaRefused unless the formula in a kernel computes the same as in torch.

        The kernel runs a program: the operations that were recorded by running the formula once on
        symbols. Program and formula are run on random inputs. Does nothing if a comparison has
        succeeded before.

        run   runs a program: (program, values of its scalars, inputs) -> outputs
        """
        self.objective_formula.compare_with_torch(self.input_names(), run)
