"""The limits: the least work that a contract needs, measured in the same run. This is one read and
one write of the logits (into other warm memory, or in place), one read, or the bare matrix
products. For each of the three products the fastest of all ways that are tried here counts:
torch.mm, oneDNN (on a CPU), and the kernels of our engine, which keep logits and sums in fp32 and
round gradients at the end, over all rows at once or in the engine's chunks. So an implementation
that computes the same products cannot be faster than their sum. Rows of zero advantage take part in
the first product only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import FROZEN, OF_SEQUENCES, Case
from benchmarks.providers import BETAS, Run, Unavailable, provider
from benchmarks.providers.ours import loss_of, native, objective
from grpo_kernels import Options
from grpo_kernels.core.linear_memory import LinearMemory
from grpo_kernels.core.matmuls import HeadMatmuls, make_matmuls

Call = Callable[[], Any]


def limit(name: str, *contracts: str) -> Callable[[Callable[[Case], Any]], Any]:
    return provider(name, *contracts, limit=True)


limit("copy", "logits", "logits-forms")(lambda case: lambda: case.buffer.copy_(case.pristine))
#: On a CPU this moves fewer bytes than a copy, which reads its destination from memory before it
#: writes it.
limit("in-place pass", "logits")(lambda case: lambda: case.buffer.neg_())
limit("read", "logits-forward")(lambda case: lambda: case.pristine.sum())
#: In place: the logits are read and written, the teacher's read.
limit("two reads and a write", "logits-divergence")(
    lambda case: lambda: case.buffer.add_(case.ref_logits)
)


@limit("whole vocabulary, loss without sets", "kept")
def whole_vocabulary(case: Case) -> Call:
    """Another loss, over the whole vocabulary:

    the cost for a trainer that does not use the sets.
    """
    spec, options = objective(case), Options(backend=native(case))
    return lambda: torch.autograd.grad(
        loss_of(case, case.inputs(), spec, case.plain_batch, options=options), case.inputs()
    )


@limit("one gather, rows of the weight", "kept")
def gathered(case: Case) -> Call:
    """Each row of the weight in a set of more than one id is read once, in random order, and
    written to contiguous memory.
    """
    ids = case.batch.kept.ids[(case.batch.kept.counts > 1)[case.batch.kept.row_of]].long()
    out = torch.empty(
        ids.numel(), case.weight.shape[1], dtype=case.weight.dtype, device=case.weight.device
    )
    weight = case.weight.detach()
    return lambda: torch.index_select(weight, 0, ids, out=out)


# ---- products


class _Torch:
    """torch.mm in the dtype of the operands:

    a head's weight [V, H] and the hidden states [R, H] of the rows that take part.
    """

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        self.weight, self.hidden = weight.detach(), hidden.detach()
        self.chunks: tuple[Tensor, ...] = (self.hidden,)

    def logits(self) -> Tensor:
        return self.hidden @ self.weight.t()

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return d_logits @ self.weight

    def d_weight(self, d_logits: Tensor) -> Tensor:
        return d_logits.t() @ self.hidden


class _OneDnn(_Torch):
    """oneDNN, which torch.mm does not use for fp32 operands."""

    def logits(self) -> Tensor:
        return self._times_transposed(self.hidden, self.weight)

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return self._times_transposed(d_logits, self.weight.t())

    def d_weight(self, d_logits: Tensor) -> Tensor:
        return self._times_transposed(d_logits.t(), self.hidden.t())

    def _times_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


class _Ours(_Torch):
    """The matmuls of this package, in the precision in which it computes them on this device.

    Each run allocates the buffers of a chunk again: the package keeps only a few of them, which the
    other contenders need.
    """

    def matmuls(self) -> HeadMatmuls:
        return make_matmuls(self.weight, None, self.hidden.dtype)

    def logits(self) -> Tensor:
        matmuls = self.matmuls()
        return [matmuls.logits(chunk.to(matmuls.dtype)) for chunk in self.chunks][-1]

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        matmuls = self.matmuls()
        d_logits = d_logits.to(matmuls.dtype)
        return torch.cat([matmuls.grad_hidden(d_logits[: len(chunk)]) for chunk in self.chunks])

    def d_weight(self, d_logits: Tensor) -> Tensor:
        matmuls = self.matmuls()
        total = None
        d_logits = d_logits.to(matmuls.dtype)
        for chunk in self.chunks:
            is_last = chunk is self.chunks[-1]
            hidden = chunk.to(matmuls.dtype)
            total = matmuls.add_grad_weight(total, d_logits[: len(chunk)], hidden, is_last)
        return total


class _OursInChunks(_Ours):
    """The same for some rows after the other, as many as the engine takes on a CPU. Logits then
    have the memory of one chunk, which all chunks use, and so has the gradient.
    """

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        super().__init__(weight, hidden)
        rows = (
            LinearMemory(
                *weight.shape, has_grad_buffer=False, grad_hidden_bytes=4, grad_weight_bytes=4
            )
            .plan("cpu", 0)
            .chunk
        )
        self.chunks = self.hidden.tensor_split(-(-hidden.shape[0] // rows))
        if len(self.chunks) == 1:
            raise Unavailable("the engine takes all rows at once")


BACKWARD = (
    "hidden", "hidden-frozen", *OF_SEQUENCES, "cross-entropy", "trees", "forms", "draft", *BETAS
)  # fmt: skip
#: The products, and the contracts that need each.
PARTS = {
    "teacher logits": (*BETAS, "draft"), "logits": (*BACKWARD, "hidden-forward"), "d_hidden": BACKWARD,
    "d_weight": tuple(x for x in BACKWARD if x not in FROZEN),
}  # fmt: skip
WAYS: dict[str, tuple[type[_Torch], tuple[str, ...]]] = {
    "torch.mm": (_Torch, ("cpu", "cuda")),
    "oneDNN": (_OneDnn, ("cpu",)),
    "ours": (_Ours, ("cpu", "cuda")),
    "ours in chunks": (_OursInChunks, ("cpu",)),
}


def _product(case: Case, part: str, way: type[_Torch]) -> Run:
    """Return the run of one matmul of a limit.

    The matmul of a gradient takes a random operand of the size of the logits. It is made before
    each run and returned with the result. So neither its allocation nor its release is timed (the
    release takes a seventh of a small matmul), and other contenders can use its memory. It is not
    computed from the hidden states, because a 16-bit matmul takes seconds on some CPUs.
    """
    if part == "teacher logits":
        return Run(way(case.ref_weight, case.ref_hidden).logits)
    if part == "logits":
        return Run(way(case.weight, case.hidden).logits)
    made = way(case.weight, case.hidden.detach()[case.active])
    shape = (len(made.chunks[0]), len(made.weight))
    next_operand: list[Tensor] = []

    def make_operand() -> None:
        operand = torch.randn(shape, dtype=made.weight.dtype, device=made.weight.device)
        next_operand.append(operand)

    def call() -> tuple[Tensor, Tensor]:
        operand = next_operand.pop()
        return getattr(made, part)(operand), operand

    return Run(call, make_operand)


def _register(part: str, name: str) -> None:
    """Register a way to compute a part of a limit.

    Memory beyond the inputs: the logits in fp32, their gradient, and the copy of it in oneDNN.
    """
    way, devices = WAYS[name]
    memory = None if way is _OursInChunks else lambda cell: 12.0 * cell.rows * cell.vocab
    how: dict[str, Any] = {"devices": devices, "limit": True, "part": part, "memory": memory}
    provider(f"{part}, {name}", *PARTS[part], **how)(lambda case: _product(case, part, way))


for _part in PARTS:
    for _name in WAYS:
        _register(_part, _name)
