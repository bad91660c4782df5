"""`token_terms` of an objective as a program for the C++ kernel, cached, and its comparison with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .keys import is_own, key_of
from .program import FormulaRefused, Program, Tracer, refusal, same_numbers
from .token_stage import TokenRows, formulas, remembered, scalars, token_terms

if TYPE_CHECKING:
    from ..objective import Objective

Tensor = torch.Tensor

#: Inputs beside log-prob and entropy, which come first: fields of `TokenRows`.
INPUTS = (
    "old_logps", "ref_logps", "sampler_logps", "advantages", "policy_weight", "kl_weight", "entropy_weight", "nll_weight",
)  # fmt: skip

Run = Callable[[Program, list[float], list[Tensor]], list[Tensor]]


@dataclass(eq=False)
class _Made:
    """What was made of formulas: a program, or the reason why there is none."""

    program: Program | str | None = None
    compared: bool = False  # with torch


@functools.lru_cache(maxsize=256)
def _made_before(keys: tuple[Hashable, ...], present: tuple[str, ...], shape: tuple[tuple[str, Any], ...]) -> _Made:
    """Empty at the first call with these arguments. They hold no function of the user, whose globals may be large."""
    return _Made()


def token_program(objective: Objective, rows: TokenRows) -> tuple[Program, list[float]]:
    """(the program, its numbers) for an objective of one pass: (loss, d loss / d log-prob, d loss / d entropy) from the log-prob,
    the entropy and those of INPUTS that `rows` has. Raises FormulaRefused where a formula cannot be traced."""
    made, numbers = _made(objective, rows)
    assert isinstance(made.program, Program)
    return made.program, numbers


def _made(objective: Objective, rows: TokenRows) -> tuple[_Made, list[float]]:
    present = tuple([name for name in INPUTS if getattr(rows, name) is not None])
    cached = objective.__dict__.get("_programs", {}).get(present)
    if cached is not None:
        theirs, keys, result = cached
        if keys == tuple(map(key_of, theirs)):
            return result
    chosen, given = formulas(objective), scalars(objective)
    shape = tuple((name, len(x) if isinstance(x, tuple) else x if x is None else -1) for name, x in given.items())
    of_chosen = {name: key_of(x) for name, x in chosen.items()}
    known = None not in of_chosen.values()  # else it is traced at each call
    made = _made_before(tuple(of_chosen.values()), present, shape) if known else _Made()
    if made.program is None:
        made.program = _traced(chosen, present, shape)
    if isinstance(made.program, str):
        raise FormulaRefused(made.program)
    result = made, made.program.numbers(_flat(given))
    if known:
        theirs = {name: x for name, x in chosen.items() if callable(x) and not is_own(x)}
        keys = tuple(of_chosen[name] for name in theirs)
        remembered(objective, "_programs", lambda _: {})[present] = tuple(theirs.values()), keys, result
    return result


def _flat(given: dict[str, Any]) -> list[float]:
    parameters: list[float] = []
    for x in given.values():
        parameters += x if isinstance(x, tuple) else () if x is None else (x,)
    return parameters


def _traced(chosen: dict[str, Any], present: tuple[str, ...], shape: tuple[tuple[str, Any], ...]) -> Program | str:
    """The program, or why there is none."""
    tracer, name = Tracer(), name_of(chosen)
    logp, entropy = tracer.input("logps"), tracer.input("entropy")
    vectors = {name: tracer.input(name) for name in present}
    parameters = {
        name: count if count is None else tracer.parameter() if count < 0 else tuple(tracer.parameter() for _ in range(count))
        for name, count in shape
    }
    try:
        loss, d_logp, _, d_entropy = _terms(logp, entropy, vectors, parameters, chosen)
        return tracer.program(name, (loss, d_logp, d_entropy))
    except Exception as error:  # a formula may do anything with a symbol
        return refusal(name, error)


def _terms(
    logp: Any, entropy: Any, vectors: dict[str, Any], numbers: dict[str, Any], chosen: dict[str, Any]
) -> tuple[Any, ...]:
    """`token_terms` of an objective of one pass, on tensors or symbols."""
    old = vectors.get("old_logps", logp)
    return token_terms(
        logp, entropy, logp - old, old, vectors.get("ref_logps"), vectors.get("sampler_logps", old), vectors["advantages"],
        vectors["policy_weight"], vectors.get("kl_weight"), vectors.get("entropy_weight"), vectors.get("nll_weight"),
        **numbers, **chosen,
    )  # fmt: skip


def name_of(chosen: dict[str, Any]) -> str:
    """The formulas in a program in words: those of the user if there are any, else the surrogate."""
    names = {getattr(f, "__qualname__", repr(f)): is_own(f) for f in chosen.values() if callable(f)}
    theirs = [name for name, own in names.items() if not own]
    return ", ".join(theirs or list(names)[:1])


def compare_once(objective: Objective, rows: TokenRows, run: Run) -> None:
    """Compare the program of an objective with torch on random inputs, unless it was compared before; where `key_of` cannot tell
    whether a formula has changed, at each call. `run` evaluates a program.
    Raises FormulaRefused where they differ: the formula does something with tensors that it does not do with symbols."""
    made, numbers = _made(objective, rows)
    if made.compared:
        return
    program = made.program
    assert isinstance(program, Program)
    inputs = random_inputs(program.inputs)
    results = run(program, numbers, inputs)
    named = dict(zip(program.inputs, inputs, strict=True))
    logp, entropy = named.pop("logps"), named.pop("entropy")
    loss, d_logp, _, d_entropy = _terms(logp, entropy, named, scalars(objective), formulas(objective))
    for what, x, expected in zip(("loss", "d_logp", "d_entropy"), results, (loss, d_logp, d_entropy), strict=True):
        expected = torch.as_tensor(expected, dtype=torch.float32).expand_as(x)
        off = ~same_numbers(x, expected, 1e-4)
        if off.any():
            i = int(off.nonzero()[0])
            at = ", ".join(f"{name}={float(v[i]):.6g}" for name, v in zip(program.inputs, inputs, strict=True))
            raise FormulaRefused(
                f"{program.name} gives {what} {float(x[i]):.6g} in the C++ kernel and {float(expected[i]):.6g} in torch, at {at}: it "
                "must do the same with every kind of number that it is given."
            )
    made.compared = True


def random_inputs(names: tuple[str, ...], points: int = 512, seed: int = 0) -> list[Tensor]:
    """fp32 [points] of each input of a token: log-probs that lie apart by up to 3 and, one in eight, up to 30, numbers with zeros
    among them, and a few that are infinite or NaN."""
    g = torch.Generator().manual_seed(seed)
    logp = -5.0 * torch.rand(points, generator=g)
    tensors = []
    for name in names:
        if name.endswith("logps"):
            x = 6.0 * torch.rand(points, generator=g) - 3.0
            x[1::8] *= 10.0
            x = logp if name == "logps" else logp + x
        elif name == "entropy":
            x = 6.0 * torch.rand(points, generator=g)
        else:
            x = torch.randn(points, generator=g) * (torch.rand(points, generator=g) < 0.75)
        odd = torch.randint(0, points, (9,), generator=g)
        tensors.append(x.index_copy(0, odd, torch.tensor([torch.inf, -torch.inf, torch.nan] * 3)))
    return tensors
