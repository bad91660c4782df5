"""Terms of a loss in the log-probs of ids that are listed for each row, beside its token: soft targets, top-k KL, score
centering (see centering.py).

A function of these has the arguments

    logp       log-probs of the ids, fp32 [k]
    values     what is listed beside each id, fp32 [k]
    advantage  of the row of each id, fp32 [k]
    sums       a function: the sum of x [k] over the ids of a row, for each of its ids, [k]

and returns (term, slope), each [k]: a row's term is the sum over its ids, the slope d term of the row / d logp. Kernels run it as a
program (program.py), if it is arithmetic; elsewhere it runs in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from .program import FormulaRefused, Made, Program, Tracer, key_of, refusal

Tensor = torch.Tensor
ListedFunction = Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]


def logp_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v c_v log p_v, with the values c."""
    return torch.where(values == 0, 0.0, values * logp), values


def prob_term(logp: Tensor, values: Tensor, advantage: Tensor, sums: Any) -> tuple[Tensor, Tensor]:
    """sum_v r_v p_v, with the values r."""
    term = values * logp.exp()
    return term, term


class ListedTerms(NamedTuple):
    """The terms of all rows. `parts`: functions as above with their values; ids lie in the order of rows.

    offsets   int64 [n + 1], where the ids of each row begin."""

    parts: tuple[tuple[ListedFunction, Tensor], ...]
    offsets: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [k], the row of each id. Made anew at each call."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=self.parts[0][1].numel())

    def of(self, logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(the term of each row, fp32 [n], d term / d log-prob [k]) from log-probs [k] and advantages [n]. Sums are fp64, in the
        order of ids."""
        terms, slopes, rows = torch.zeros_like(logps), torch.zeros_like(logps), self.rows
        for function, values in self.parts:
            made = function(logps, values, advantages[rows], lambda x: self._sums(x)[rows])
            if not isinstance(made, tuple) or [getattr(x, "shape", None) for x in made] != 2 * [logps.shape]:
                raise ValueError(f"listed={function!r} returned no pair of tensors of the shape of logp: return (term, slope).")
            term, slope = made
            terms, slopes = terms + term, slopes + slope
        return self._sums(terms), slopes

    def program(self) -> Program:
        """The program (the term of a row, d term / d log-prob) of its ids, whose inputs are log-probs, the advantage of the row and
        the values of each part. Raises FormulaRefused where a function cannot be traced."""
        return self._made().checked()

    def compare_once(self, run: Callable[[Program, list[float], list[Tensor]], list[Tensor]]) -> None:
        """Compare the program with torch on random inputs of one row, as `TokenStage.compare_once` does."""
        made = self._made()
        if made.compared:
            return
        program, g, points = made.checked(), torch.Generator().manual_seed(0), 64
        logps, values = -5.0 * torch.rand(points, generator=g), [torch.randn(points, generator=g) for _ in self.parts]
        parts = tuple((function, x) for (function, _), x in zip(self.parts, values, strict=True))
        row = ListedTerms(parts, torch.tensor([0, points]))
        inputs = [logps, torch.full((points,), 0.7), *values]
        found = run(program, program.numbers(()), inputs)
        made.compare(inputs, found, dict(zip(("term", "slope"), row.of(logps, torch.tensor([0.7])), strict=True)))

    def _made(self) -> Made:
        functions = tuple(function for function, _ in self.parts)
        keys = tuple(map(key_of, functions))
        made = Made() if None in keys else _made_before(keys)
        if made.program is None:
            made.program = _traced(functions)
        return made

    def taken(self, which: Tensor, offsets: Tensor) -> ListedTerms:
        """The terms of other rows, whose ids are `which` of these, [m]."""
        return ListedTerms(tuple((function, values[which]) for function, values in self.parts), offsets)

    def _sums(self, x: Tensor) -> Tensor:
        total = torch.segment_reduce(x.to(torch.float64), "sum", offsets=self.offsets, initial=0, unsafe=True)
        return total.to(torch.float32)


@functools.lru_cache(maxsize=256)
def _made_before(keys: tuple[Hashable, ...]) -> Made:
    """Empty at the first call with these keys."""
    return Made()


def _traced(functions: tuple[ListedFunction, ...]) -> Program | str:
    """The program of functions whose terms are added up, or why there is none."""
    tracer, name = Tracer(), ", ".join(getattr(f, "__qualname__", repr(f)) for f in functions)
    logp, advantage, *values = map(tracer.input, ("logps", "advantages", *(f"values {i}" for i in range(len(functions)))))
    term: Any = -0.0  # plus a number that number; no function adds it, so that the sum of the terms is one of its own
    slope: Any = 0.0
    try:
        for function, of_part in zip(functions, values, strict=True):
            of_term, of_slope = function(logp, of_part, advantage, tracer.sum)  # type: ignore[arg-type]
            if not (tracer.number(of_term).in_row and tracer.number(of_slope).in_row):
                raise FormulaRefused("a term or a slope that is no number of an id.")
            term, slope = term + of_term, slope + of_slope
        return tracer.program(name, (tracer.sum(term), slope))
    except Exception as error:  # a function may do anything with a symbol
        return refusal(name, error)
