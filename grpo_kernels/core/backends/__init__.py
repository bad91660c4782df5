"""The interface of a backend, and the choice of the backend that runs.

A backend has kernels over rows of logits and over (row, id) pairs of hidden states and weight. It
contains no formula of reinforcement learning: it receives them as a `TokenLossFormula`.

Logits and their gradients are tensors [A, T, V]: A * T rows (tokens) of V logits (vocabulary ids).
Row number a * T + t is tensor[a, t].
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...checks import require, require_one_of, warn_once
from ...formulas.token_loss import TokenLosses, TokenLossFormula
from ..softmax import (
    BASIC_SUMS,
    COEFFICIENTS_OF_KERNELS,
    MIXTURE_SUMS,
    SUMS_OF_KERNELS,
    GradientCoefficients,
    LogitRows,
    SoftmaxSums,
    concatenate,
    sums_for,
)

if TYPE_CHECKING:
    from ..pairs import Pairs

#: Names of the sums that log-prob and entropy follow from.
SUMS_OF_ENTROPY = sums_for(("entropy",))


class FusedLossValues(NamedTuple):
    """The values of each row of logits that `Backend.fused_loss` returns; masked rows have 0.

    table   fp32 [3, num_rows], whose rows are log-probs, entropies and losses. With a reference
            fp32 [4, num_rows]: the last row is the divergences.
    """

    table: Tensor

    @property
    def logps(self) -> Tensor:
        """Log-prob of each target, [num_rows]."""
        return self.table[0]

    @property
    def entropy(self) -> Tensor:
        """Entropy of each row in nats, [num_rows]."""
        return self.table[1]

    @property
    def losses(self) -> Tensor:
        """Loss of each row, [num_rows]. Their sum is the loss."""
        return self.table[2]

    @property
    def divergence(self) -> Tensor | None:
        """Divergence of each row from the reference, [num_rows]; None without a reference."""
        has_reference = self.table.shape[0] == self.num_values(has_reference=True)
        return self.table[3] if has_reference else None

    @staticmethod
    def num_values(has_reference: bool) -> int:
        """Return len(table): how many values each row of logits has."""
        return 4 if has_reference else 3


class Backend(ABC):
    """Kernels over rows of logits, and over (row, id) pairs of hidden states and weight.

    The public methods are `softmax_sums`, `softmax_gradient`, `fused_loss`, `evaluate_formula`,
    `scale_` and those over pairs. A subclass implements the kernels that `softmax_sums` and
    `softmax_gradient` call (`run_sums_kernel`, `run_mixture_kernel`, `run_gradient_kernel`).

    computes_all_sums   True if the kernels compute all `softmax.SUMS` and take all
                        `softmax.COEFFICIENTS`. False if they support only SUMS_OF_KERNELS and
                        COEFFICIENTS_OF_KERNELS. Then eager PyTorch computes the others.
    """

    computes_all_sums = False

    # ---- rows of logits

    def softmax_sums(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums of each row, such as max_logit and sum_exp.

        MIXTURE_SUMS, from which the divergences "jsd" and "tv" follow, depend on the other sums, so
        they take a second pass over the rows.

        names   some of `softmax.SUMS`, in their order; both of MIXTURE_SUMS or neither
        """
        sums = self.first_pass_sums(rows, names)
        needs_second_pass = MIXTURE_SUMS[0] in names
        if needs_second_pass:
            sums.set_sums(MIXTURE_SUMS, self.run_mixture_kernel(rows, sums))
        return sums

    def first_pass_sums(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums of each row, such as max_logit and sum_exp, from one pass over it.

        If MIXTURE_SUMS are named, which need a second pass, the result has uninitialized memory for
        them. `softmax_sums` sets them afterwards.

        names   some of `softmax.SUMS`, in their order. Eager PyTorch computes those that the
                kernels do not support.
        """
        sums = self.run_sums_kernel(rows, names)
        unsupported = unsupported_names(names, SUMS_OF_KERNELS)
        if unsupported and not self.computes_all_sums:
            # The eager kernel always computes BASIC_SUMS. They are the first rows of its result,
            # and are skipped, because `sums` has them already.
            eager_names = (*BASIC_SUMS, *unsupported)
            eager_sums = load("eager").Kernels().run_sums_kernel(rows, eager_names)
            sums.set_sums(unsupported, eager_sums.values[len(BASIC_SUMS) :])
        return sums

    def softmax_gradient(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of each row of logits into the same row of `out`.

        `GradientCoefficients` has the formula. If the kernels do not support one of the
        coefficients, eager PyTorch computes the gradient.

        sums           softmax sums of the rows, from `softmax_sums`
        coefficients   factors of each row in the formula. A row whose coefficients are all 0
                       becomes 0. The reference is read only if "divergence" is among them.
        out            [A, T, V] like `rows.logits` (A * T rows of V logits); may be their memory
        """
        kernels = self
        unsupported = unsupported_names(coefficients.names, COEFFICIENTS_OF_KERNELS)
        if unsupported and not self.computes_all_sums:
            kernels = load("eager").Kernels()
        kernels.run_gradient_kernel(rows, sums, coefficients, out)

    @abstractmethod
    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return softmax sums of each row, such as max_logit and sum_exp, from one pass over it.

        The result has memory for all names. The values of MIXTURE_SUMS, and of sums that these
        kernels do not support (see `computes_all_sums`), are not set.

        names   some of `softmax.SUMS`, in their order
        """

    @abstractmethod
    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS of each row, fp32 [2, num_rows], in a second pass over the rows.

        They are sums over the vocabulary, from which the divergences "jsd" and "tv" follow. With p
        the policy's softmax and q the reference's:

            direction   row 0                            row 1
            "jsd"       KL(p || m)                       KL(q || m)
            "tv"        sum_j p_j sign(p_j - q_j) / 2    sum_j |p_j - q_j| / 2

        m = (1 - b) p + b q is a mixture with the weight b. `rows.reference` has the direction and
        b, its `mixture`. For "tv" row 1 is the divergence. In both directions the gradient needs
        row 0, see `SoftmaxSums.gradient_center`.

        sums   the sums of the first pass over the whole vocabulary, which normalize p and q
        """

    @abstractmethod
    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of each row into the same row of `out`.

        The formula is in `GradientCoefficients`. `softmax_gradient` calls this only with
        coefficients that these kernels support.

        rows           the rows of the call: logits, targets and transform
        sums           softmax sums of the rows, from `softmax_sums`
        coefficients   factors of each row in the formula. A row whose coefficients are all 0
                       becomes 0.
        out            [A, T, V] like `rows.logits` (A * T rows of V logits); may be their memory
        """

    def fused_loss(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Return log-prob, entropy and loss of each row, and write d loss / d logits to `out`.

        With a reference the divergence of each row is returned as well. This default takes two
        passes over the logits: one for the log-probs, one for the gradient. The C++ and Triton
        kernels need one.

        loss_formula   computes the loss of a row from its log-prob and entropy
        out            [A, T, V] like `rows.logits` (A * T rows of V logits): memory for the
                       gradient, possibly that of the logits. None: no gradient is computed.
        """
        return self.loss_in_two_passes(
            rows, loss_formula, out, rows_per_block=max(1, rows.num_rows)
        )

    def loss_in_two_passes(
        self,
        rows: LogitRows,
        loss_formula: TokenLossFormula,
        out: Tensor | None,
        rows_per_block: int,
    ) -> FusedLossValues:
        """Return log-prob, entropy and loss of each row, and write d loss / d logits to `out`.

        The rows are processed in blocks. `_loss_of_block` reads the logits of a block twice: for
        the log-probs, and after the loss formula for the gradient. If the logits of a block fit the
        cache, the second pass reads them from there and costs nearly nothing.

        loss_formula     computes the loss of a row from its log-prob and entropy
        out              [A, T, V] like `rows.logits`: memory for the gradient, possibly that of the
                         logits. None: no gradient is computed.
        rows_per_block   number of rows of a block; the last block may have fewer
        """
        num_rows = rows.num_rows
        tables = []  # of each block: fp32 [3 or 4, rows of the block], see `FusedLossValues`
        for start in range(0, num_rows, rows_per_block):
            stop = min(start + rows_per_block, num_rows)
            block = rows.slice_rows(start, stop)
            block_formula = loss_formula.select(slice(start, stop))
            # `out` is passed whole, because `block.row_range` says which of its rows to write.
            block_values = self._loss_of_block(block, block_formula, out)
            tables.append(block_values.table)
        if not tables:  # there are no rows, so return a table without columns
            num_values = FusedLossValues.num_values(rows.reference is not None)
            tables.append(
                torch.zeros(num_values, 0, dtype=torch.float32, device=rows.logits.device)
            )
        return FusedLossValues(concatenate(tables, 1))

    def _loss_of_block(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Return log-prob, entropy and loss of each row of a block, and write d loss / d logits.

        The loss of a row is the formula of its log-prob and entropy. With a reference and weights
        for it, the row's divergence_weight * divergence is added. The logits are read twice: by
        `softmax_sums` and by `softmax_gradient`.

        rows           the rows of the block. `rows.logits` and `out` are whole, and
                       `rows.row_range` says which of their rows belong to the block.
        loss_formula   the formula with the inputs of these rows
        out            [A, T, V], the gradient of all blocks, of which the rows of this block are
                       written; None: no gradient is computed
        """
        # First pass over the logits. Log-prob, entropy and divergence follow from a few sums.
        names = SUMS_OF_ENTROPY
        if rows.reference is not None:
            names = sums_for(("entropy", "divergence"), rows.reference.direction)
        sums = self.softmax_sums(rows, names)
        logps, entropy = sums.logps_and_entropy()
        token_losses = self.evaluate_formula(loss_formula, logps, entropy)
        losses = token_losses.losses
        grads = {"logps": token_losses.grad_logps}
        if token_losses.grad_entropy is not None:
            grads["entropy"] = token_losses.grad_entropy
        divergences = []
        if rows.reference is not None:
            divergence = sums.divergence
            divergences.append(divergence)
            weight = loss_formula.inputs.divergence_weight
            if weight is not None:
                # A row with the weight 0 has no divergence term, even if its divergence is infinite
                # or NaN. A product with 0 would be NaN.
                losses = losses + torch.where(weight == 0, 0.0, weight * divergence)
                grads["divergence"] = weight
        if rows.mask is not None:
            losses = torch.where(rows.mask, losses, 0.0)
        if out is not None:
            # Second pass over the logits.
            coefficients = GradientCoefficients.from_gradients(
                sums, grads, rows.mask, entropy=entropy
            )
            self.softmax_gradient(rows, sums, coefficients, out)
        return FusedLossValues(torch.stack([logps, entropy, losses, *divergences]))

    @abstractmethod
    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> TokenLosses:
        """Return the loss of each row, and its gradients in log-prob and entropy.

        Kernels do not call the Python functions of the formula. They run a program: the list of its
        operations, which is recorded by running the formula once on symbols in place of tensors. A
        formula that branches on values, or that calls other functions than `formulas.ops`, cannot
        be recorded. It runs in torch, with one warning, or in strict mode raises FormulaRefused.

        loss_formula     computes the loss of a row from its log-prob and entropy
        logps, entropy   fp32 [num_rows], contiguous

        Return `TokenLosses`: losses and gradients, fp32 [num_rows] each.
        """

    @abstractmethod
    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient [A, T, V] (A * T rows of V) by a 0-d factor in place.

        If the factor is 1, the C++ and Triton kernels do not touch the gradient. It usually is: a
        loss on which `backward()` is called has the upstream gradient 1.
        """

    # ---- pairs of a row of hidden states and a row of the weight
    #
    # hidden is [num_rows, H], weight [V, H], with H the hidden size; fp32, bf16 or fp16 each, with
    # unit stride in H. A pair is unused if its id is -1, or in the two gradients if its value is 0.
    # Nothing is read for unused pairs, and rows of `out` without a used pair are not written. Sums
    # are fp32, in the order of the pairs, and are rounded once, when they are written to `out`. A
    # sum does not depend on the pairs of other rows or ids. Ids and rows are not checked.

    @abstractmethod
    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each (row, id) pair, fp32 [num_pairs].

        This is the logit of a token id at one position, as a single dot product.

        hidden   [num_rows, H], the hidden states
        weight   [V, H], the weight of the output head
        pairs    the pairs, sorted by row. The id -1 marks an unused pair, whose logit is -inf.
        """

    @abstractmethod
    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write to out[row] the sum of values[i] * weight[id] over all pairs i = (row, id).

        This is the gradient of hidden states from the gradients of `pair_logits`.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        pairs         the pairs, sorted by row
        weight        [V, H]
        out           [num_rows, H]
        """

    @abstractmethod
    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """For each pair i = (row, id): out[id] += values[i] * hidden[row].

        This is the gradient of the weight from the gradients of `pair_logits`. A pair is unused if
        its id is -1 or its value 0.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        pairs         the pairs, sorted by row
        hidden        [num_rows, H]
        out           [V, H]
        """


class BackendWrapper(Backend):
    """A backend that forwards its methods to another backend.

    A subclass overrides some of the methods, for example to merge the sums of vocabulary shards.

    kernels   the other backend
    """

    computes_all_sums = True

    def __init__(self, kernels: Backend) -> None:
        """Forward the methods to the backend `kernels`."""
        self.kernels = kernels

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS of each row, fp32 [2, num_rows], in a second pass over the rows.

        They are the sums over the vocabulary from which the divergences "jsd" and "tv" follow.
        `Backend.run_mixture_kernel` has their formulas.

        sums   softmax sums of the first pass over the rows, which normalize policy and reference
        """
        return self.kernels.run_mixture_kernel(rows, sums)

    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> TokenLosses:
        """Return the loss of each row, and its gradients in log-prob and entropy.

        loss_formula     computes the loss of a row from its log-prob and entropy
        logps, entropy   fp32 [num_rows], contiguous

        Return `TokenLosses`: losses and gradients, fp32 [num_rows] each.
        """
        return self.kernels.evaluate_formula(loss_formula, logps, entropy)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient [A, T, V] (A * T rows of V) by a 0-d factor in place."""
        self.kernels.scale_(gradient, factor)

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each (row, id) pair, fp32 [num_pairs].

        This is the logit of a token id at one position, as a single dot product.

        hidden   [num_rows, H], the hidden states
        weight   [V, H], the weight of the output head
        pairs    the pairs, sorted by row. The id -1 marks an unused pair, whose logit is -inf.
        """
        return self.kernels.pair_logits(hidden, weight, pairs)

    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write to out[row] the sum of values[i] * weight[id] over all pairs i = (row, id).

        This is the gradient of hidden states from the gradients of `pair_logits`. A pair is unused
        if its id is -1 or its value 0. Rows without a used pair are not written.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        pairs         the pairs, sorted by row
        weight        [V, H]
        out           [num_rows, H]
        """
        self.kernels.write_grad_hidden_of_pairs(values, pairs, weight, out)

    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """For each pair i = (row, id): out[id] += values[i] * hidden[row].

        This is the gradient of the weight from the gradients of `pair_logits`. A pair is unused if
        its id is -1 or its value 0.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        pairs         the pairs, sorted by row
        hidden        [num_rows, H]
        out           [V, H]
        """
        self.kernels.add_grad_weight_of_pairs(values, pairs, hidden, out)


@functools.lru_cache(maxsize=256)
def unsupported_names(names: tuple[str, ...], supported: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that the kernels do not support, so that eager PyTorch computes them.

    The two MIXTURE_SUMS are never returned, because `run_mixture_kernel` of every backend computes
    them.

    names       names of softmax sums, or of gradient coefficients
    supported   the names that the kernels support
    """
    return tuple(name for name in names if name not in supported and name not in MIXTURE_SUMS)


# ---- the backend that runs

BACKENDS = ("eager", "cpu", "triton")


def native_backend(device: torch.device) -> tuple[str, str | None]:
    """Return (name, reason): the compiled backend for a device, and whether it can run there.

    name     "cpu" for a CPU, "triton" for any other device
    reason   why the backend cannot run on the device; None if it can
    """
    if device.type == "cpu":
        return "cpu", unavailable("cpu")
    reason = unavailable("triton")  # why it cannot run on this machine at all
    if reason is None and not load("triton").serves(device):
        reason = f"no kernels for {device.type} tensors"
    return "triton", reason


@functools.cache
def load(name: str) -> Any:
    """Import and return the module of a backend, one of BACKENDS.

    The module has the function `unavailable_reason` and the class `Kernels(strict)`. It is imported
    on first use, so `import grpo_kernels` needs neither Triton nor a compiler.
    """
    return importlib.import_module(f".{name}", __name__)


def unavailable(name: str) -> str | None:
    """Return the reason why a backend cannot run on this machine, or None if it can."""
    try:
        return load(name).unavailable_reason()
    except ImportError as error:
        return f"it cannot be imported ({error})"


#: (backend, strict) of the innermost `use` block, or None outside of any block.
_in_use: ContextVar[tuple[str, bool] | None] = ContextVar("grpo_kernels.use", default=None)


@contextlib.contextmanager
def use(*, backend: str | None = None, strict: bool | None = None) -> Iterator[None]:
    """Set the backend and strict mode of the calls in a `with` block.

        with grpo_kernels.use(backend="eager"):
            out = linear_grpo_loss(hidden, weight, batch, objective)

    backend   "auto", "eager", "cpu" or "triton", for calls that leave `Options(backend=)` at
              "auto". None keeps the setting outside of the block.
    strict    True: a fallback to eager PyTorch raises RuntimeError. False: it warns, unless the
              call says `Options(strict=True)`. None keeps the setting outside of the block.

    Blocks can be nested, and affect only their own thread or task. The environment variables
    GRPO_KERNELS_BACKEND and GRPO_KERNELS_STRICT=1 have the same effect outside of blocks. The
    backward of a loss runs on the backend of its forward. Raises ValueError for an unknown name.
    """
    if backend is not None:
        check_name(backend)
    remedy = "pass True, False or None."
    require(strict is None or isinstance(strict, bool), "strict", strict, remedy)
    new_backend = backend_in_use() if backend is None else backend
    new_strict = strict_in_use() if strict is None else strict
    token = _in_use.set((new_backend, new_strict))
    try:
        yield
    finally:
        _in_use.reset(token)


def backend_in_use() -> str:
    """Return the backend that the innermost `use` block names, or outside the environment."""
    in_use = _in_use.get()
    return os.environ.get("GRPO_KERNELS_BACKEND", "auto") if in_use is None else in_use[0]


def strict_in_use() -> bool:
    """Return whether the innermost `use` block sets strict mode, or outside the environment."""
    in_use = _in_use.get()
    return os.environ.get("GRPO_KERNELS_STRICT", "0") == "1" if in_use is None else in_use[1]


def is_strict(strict: bool) -> bool:
    """Return whether a call is strict: by its own argument, by `use` or by the environment.

    strict   the argument of the call, `Options(strict=)`
    """
    return strict or strict_in_use()


def check_name(backend: object) -> None:
    """Raise ValueError unless `backend` is "auto" or the name of a backend."""
    require_one_of("backend", backend, ("auto", *BACKENDS))


def pick(backend: str, device: torch.device, strict: bool = False) -> Backend:
    """Return the backend for data on a device.

    backend   a name in BACKENDS, or "auto": the setting of `use` or of GRPO_KERNELS_BACKEND. If
              that is "auto" as well, the result is the `native_backend` of the device, or eager
              PyTorch with a warning if it cannot run. Eager PyTorch then also computes a single
              call whose Triton kernel cannot run.
    strict    raise RuntimeError instead of such a fallback, as with `use(strict=True)`

    A backend that is named never falls back. Raises RuntimeError if it cannot run, and ValueError
    for an unknown name. A Triton kernel whose tile does not fit into this GPU runs with a smaller
    tile and warns, in strict mode as well.
    """
    strict = is_strict(strict)
    if backend == "auto":
        backend = backend_in_use()
    if backend == "auto":  # still: neither the call nor `use` names a backend
        return _pick_automatically(device, strict)
    check_name(backend)
    reason = unavailable(backend)
    if reason is None and backend == "cpu" and device.type != "cpu":
        reason = f"the data is on {device}"
    if reason is None and backend == "triton" and not load(backend).serves(device):
        is_cpu = device.type == "cpu"
        reason = "the data is on the CPU" if is_cpu else f"no kernels for {device.type} tensors"
    if reason is not None:
        raise RuntimeError(
            f'backend="{backend}" cannot run: {reason}. Use backend="auto", or see `python -m'
            " grpo_kernels doctor`."
        )
    return _make_backend(backend, strict)


def _pick_automatically(device: torch.device, strict: bool) -> Backend:
    """Return the native backend of a device, or eager PyTorch with a warning if it cannot run.

    strict   raise RuntimeError instead of a fallback
    """
    name, reason = native_backend(device)
    if reason is None:
        # Triton compiles its kernels at their first call, and a kernel may fail to compile. Unless
        # strict, PyTorch then computes this call.
        falls_back = name == "triton" and not strict
        return _make_backend("triton_or_eager" if falls_back else name, strict)
    message = (
        f"grpo_kernels falls back to eager PyTorch, which is slow: {reason}. `python -m"
        " grpo_kernels doctor` says more."
    )
    if strict:
        raise RuntimeError(f"{message} (strict mode: no fallback)")
    warn_once(message)
    return _make_backend("eager", strict)


@functools.cache
def _make_backend(name: str, strict: bool) -> Backend:
    """Return the backend object of a name in BACKENDS, or of "triton_or_eager".

    "triton_or_eager" is Triton with eager PyTorch for each call whose kernel cannot run.
    """
    backend: Backend
    if name == "triton_or_eager":
        backend = load("triton").OrEager()
    else:
        backend = load(name).Kernels(strict)
    return backend


def fall_back(instead: str, reason: str) -> None:
    """Warn that slower code runs in place of a kernel, once for each message.

    instead   the code that runs, for example "eager PyTorch, which is slow"
    reason    why the kernel does not run
    """
    warn_once(
        f"grpo_kernels falls back to {instead}: {reason}. `python -m grpo_kernels doctor` says"
        " more."
    )
