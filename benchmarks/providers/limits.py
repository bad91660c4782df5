"""The limits: the least work that a contract needs, measured in the same run.

For contracts on logits this is one read and one write of the logits (to other warm memory, or in
place), or one read. For contracts on hidden states it is the matmuls alone. The fastest way to
compute each matmul counts: torch.mm, oneDNN (on a CPU), and the kernels of this package, which keep
logits and sums in fp32 and round gradients at the end, for all rows at once or in chunks. So no
implementation with the same matmuls can be faster than their sum. Rows with an advantage of 0 take
part in the first matmul only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import FROZEN, OF_SEQUENCES, Case, Cell
from benchmarks.providers import BETAS, Run, Unavailable, provider
from benchmarks.providers.ours import loss_of, native, objective
from grpo_kernels import Options
from grpo_kernels.core.linear_memory import LinearMemory
from grpo_kernels.core.matmuls import HeadMatmuls, make_matmuls

#: A function without arguments that is timed. Its results are not used.
Call = Callable[[], Any]


def limit(name: str, *contracts: str) -> Callable[[Callable[[Case], Any]], Any]:
    """Return a decorator that registers a limit. The decorated function takes a case and returns
    the function that is timed.
    """
    return provider(name, *contracts, limit=True)


limit("copy", "logits", "logits-forms")(lambda case: lambda: case.buffer.copy_(case.pristine))
#: On a CPU this moves fewer bytes than a copy. A copy also reads its destination before it writes.
limit("in-place pass", "logits")(lambda case: lambda: case.buffer.neg_())
limit("read", "logits-forward")(lambda case: lambda: case.pristine.sum())
#: The policy's logits are read and overwritten. The teacher's are read.
limit("two reads and a write", "logits-divergence")(
    lambda case: lambda: case.buffer.add_(case.ref_logits)
)


@limit("whole vocabulary, loss without sets", "kept")
def whole_vocabulary(case: Case) -> Call:
    """Return a function that computes the DAPO loss over the whole vocabulary, and its gradients.

    The contract is another loss, over candidate sets. The time of this one is the cost for a
    trainer that does not use the sets.
    """
    spec = objective(case)
    options = Options(backend=native(case))

    def call() -> tuple[Tensor, ...]:
        loss = loss_of(case, case.inputs(), spec, case.plain_batch, options=options)
        return torch.autograd.grad(loss, case.inputs())

    return call


@limit("one gather, rows of the weight", "kept")
def gathered(case: Case) -> Call:
    """Return a function that copies the weight's row of each id of the sets of more than one id.

    The rows are read in random order and written to contiguous memory [number of ids, H]. A set of
    one id needs no row of the weight, because the log-prob of its id is 0.
    """
    candidate_sets = case.batch.kept
    is_in_larger_set = (candidate_sets.counts > 1)[candidate_sets.row_of]  # bool, for each id
    ids = candidate_sets.ids[is_in_larger_set].long()
    weight = case.weight.detach()
    out = torch.empty(ids.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
    return lambda: torch.index_select(weight, 0, ids, out=out)


# ---- matmuls


class _Torch:
    """The three matmuls of a head by torch.mm, in the dtype of the operands.

    weight   [V, H]
    hidden   [R, H], the hidden states of the rows that take part
    chunks   the rows of `hidden` that each matmul takes at a time
    """

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        self.weight = weight.detach()
        self.hidden = hidden.detach()
        self.chunks: tuple[Tensor, ...] = (self.hidden,)

    def logits(self) -> Tensor:
        """Return the logits [R, V]."""
        return self.hidden @ self.weight.t()

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        """Return the gradient of the hidden states [R, H]."""
        return d_logits @ self.weight

    def d_weight(self, d_logits: Tensor) -> Tensor:
        """Return the gradient of the weight [V, H]."""
        return d_logits.t() @ self.hidden


class _OneDnn(_Torch):
    """The matmuls by oneDNN, which torch.mm does not use for fp32 operands."""

    def logits(self) -> Tensor:
        return self._times_transposed(self.hidden, self.weight)

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return self._times_transposed(d_logits, self.weight.t())

    def d_weight(self, d_logits: Tensor) -> Tensor:
        return self._times_transposed(d_logits.t(), self.hidden.t())

    def _times_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b.t() by oneDNN's linear layer, without bias and activation.

        This operator is private. It is the one that torch.compile calls.
        """
        return torch.ops.mkldnn._linear_pointwise(
            X=a, W=b, B=None, attr="none", scalars=[], algorithm=""
        )


class _Ours(_Torch):
    """The matmuls of this package, in the precision in which it computes them on this device.

    Each run allocates the buffers of a chunk again: the package keeps only a few of them, which the
    other contenders need.
    """

    def matmuls(self) -> HeadMatmuls:
        """Return the package's matmuls with this weight, without a bias, in the hidden's dtype."""
        return make_matmuls(self.weight, None, self.hidden.dtype)

    def logits(self) -> Tensor:
        """Compute the logits of each chunk and return those of the last one, [chunk, V]."""
        matmuls = self.matmuls()
        logits_of_chunks = [matmuls.logits(chunk.to(matmuls.dtype)) for chunk in self.chunks]
        return logits_of_chunks[-1]

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        """Return the gradient of the hidden states [R, H].

        d_logits   [largest chunk, V]: every chunk uses the same, because only the time matters
        """
        matmuls = self.matmuls()
        d_logits = d_logits.to(matmuls.dtype)
        return torch.cat([matmuls.grad_hidden(d_logits[: len(chunk)]) for chunk in self.chunks])

    def d_weight(self, d_logits: Tensor) -> Tensor:
        """Return the gradient of the weight [V, H], a sum over the chunks.

        d_logits   [largest chunk, V]: every chunk uses the same, because only the time matters
        """
        matmuls = self.matmuls()
        total = None  # the first chunk allocates it
        d_logits = d_logits.to(matmuls.dtype)
        for chunk in self.chunks:
            is_last = chunk is self.chunks[-1]
            hidden = chunk.to(matmuls.dtype)
            total = matmuls.add_grad_weight(total, d_logits[: len(chunk)], hidden, is_last)
        return total


class _OursInChunks(_Ours):
    """The matmuls of this package in chunks of rows, as many as it takes at a time on a CPU.

    All chunks share one buffer for the logits and one for their gradient.
    """

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        """Split the rows of `hidden` into chunks of the size that the package plans on a CPU.

        Raises Unavailable if there is only one chunk, which "ours" measures already.
        """
        super().__init__(weight, hidden)
        vocab, hidden_size = weight.shape
        # Gradients are fp32, of 4 bytes per element.
        memory = LinearMemory(
            vocab, hidden_size, has_grad_buffer=False, grad_hidden_bytes=4, grad_weight_bytes=4
        )
        chunk_rows = memory.plan("cpu", 0).chunk
        num_chunks = -(-hidden.shape[0] // chunk_rows)  # rounded up
        self.chunks = self.hidden.tensor_split(num_chunks)
        if num_chunks == 1:
            raise Unavailable("the engine takes all rows at once")


#: Contracts with the gradient of hidden states.
BACKWARD = (
    "hidden", "hidden-frozen", *OF_SEQUENCES, "cross-entropy", "trees", "forms", "draft", *BETAS
)  # fmt: skip
#: The contracts that need each matmul.
PARTS = {
    "teacher logits": (*BETAS, "draft"),
    "logits": (*BACKWARD, "hidden-forward"),
    "d_hidden": BACKWARD,
    "d_weight": tuple(contract for contract in BACKWARD if contract not in FROZEN),
}
#: The ways to compute a matmul, with the devices that each supports.
WAYS: dict[str, tuple[type[_Torch], tuple[str, ...]]] = {
    "torch.mm": (_Torch, ("cpu", "cuda")),
    "oneDNN": (_OneDnn, ("cpu",)),
    "ours": (_Ours, ("cpu", "cuda")),
    "ours in chunks": (_OursInChunks, ("cpu",)),
}


def _product(case: Case, part: str, way: type[_Torch]) -> Run:
    """Return the run of one of the matmuls that a contract needs.

    part    a key of PARTS
    way     the class that computes the matmuls, a value of WAYS

    The matmul of a gradient takes a random operand of the size of the logits. It is made before
    each run and returned with the result. So neither its allocation nor its release is timed (the
    release takes a seventh of a small matmul), and other contenders can use its memory. It is not
    computed from the hidden states, because a 16-bit matmul takes seconds on some CPUs.
    """
    if part == "teacher logits":
        return Run(way(case.ref_weight, case.ref_hidden).logits)
    if part == "logits":
        return Run(way(case.weight, case.hidden).logits)
    matmuls = way(case.weight, case.hidden.detach()[case.active])
    weight = matmuls.weight
    shape = (len(matmuls.chunks[0]), len(weight))
    next_operand: list[Tensor] = []  # empty, or the operand of the next run

    def make_operand() -> None:
        """Draw the gradient of the logits for the next run. This is not timed."""
        operand = torch.randn(shape, dtype=weight.dtype, device=weight.device)
        next_operand.append(operand)

    def call() -> tuple[Tensor, Tensor]:
        """Return the result of the matmul, and its operand, so that it is freed after the run."""
        operand = next_operand.pop()
        return getattr(matmuls, part)(operand), operand

    return Run(call, make_operand)


def _register(part: str, name: str) -> None:
    """Register a provider that times a matmul, computed in one way.

    part    a key of PARTS
    name    a key of WAYS

    Memory in addition to the inputs: three fp32 tensors [N, V], for the logits, their gradient, and
    the copy of it in oneDNN.
    """
    way, devices = WAYS[name]

    def logits_memory(cell: Cell) -> float:
        bytes_per_logit = 3.0 * 4
        return bytes_per_logit * cell.rows * cell.vocab

    def make(case: Case) -> Run:
        return _product(case, part, way)

    register = provider(
        f"{part}, {name}",
        *PARTS[part],
        devices=devices,
        limit=True,
        part=part,
        memory=None if way is _OursInChunks else logits_memory,
    )
    register(make)


for _part in PARTS:
    for _name in WAYS:
        _register(_part, _name)
