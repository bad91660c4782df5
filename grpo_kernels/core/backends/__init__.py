"""What a backend is, and the choice of the one that runs.

A backend has kernels over rows of logits and over (row, id) pairs of hidden states and weight. It
contains no formula of reinforcement learning: what it gets of a loss is a `TokenLossFormula`.
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
from ...formulas.token_loss import TokenLossFormula
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
    """The statistics and losses that `Backend.fused_loss` computes.

    table   fp32 [3, num_rows], or [4, num_rows] with a reference: a row for each property, in
            their order. Masked rows of logits have 0.
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
        return self.table[3] if len(self.table) == 4 else None

    @staticmethod
    def num_values(has_reference: bool) -> int:
        """Return the number of rows of the table."""
        return 4 if has_reference else 3


class Backend(ABC):
    """Kernels over rows of logits, and over (row, id) pairs of hidden states and weight.

    The public methods are `softmax_sums`, `softmax_gradient`, `fused_loss`, `evaluate_formula`,
    `scale_` and those over pairs. A subclass implements the kernels that `softmax_sums` and
    `softmax_gradient` call (`run_sums_kernel`, `run_mixture_kernel`, `run_gradient_kernel`).

    computes_all_sums   whether the kernels compute all SUMS and take all COEFFICIENTS. Otherwise
                        they know SUMS_OF_KERNELS and COEFFICIENTS_OF_KERNELS, and eager PyTorch
                        does the rest.
    """

    computes_all_sums = False

    # ---- rows of logits

    def softmax_sums(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return the named sums of rows, some of SUMS in their order.

        The sums of "jsd" and "tv" take a second pass over the rows.
        """
        sums = self.first_pass_sums(rows, names)
        if MIXTURE_SUMS[0] in names:
            sums.set_sums(MIXTURE_SUMS, self.run_mixture_kernel(rows, sums))
        return sums

    def first_pass_sums(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Return the named sums of rows that one pass over them gives.

        The kernels compute SUMS_OF_KERNELS, and eager PyTorch the others. The result has memory for
        MIXTURE_SUMS if they are named. Their values are not set.
        """
        sums = self.run_sums_kernel(rows, names)
        unknown = names_unknown_to_kernels(SUMS_OF_KERNELS, names)
        if unknown and not self.computes_all_sums:
            eager_sums = load("eager").Kernels().run_sums_kernel(rows, (*BASIC_SUMS, *unknown))
            sums.set_sums(unknown, eager_sums.values[len(BASIC_SUMS) :])
        return sums

    def softmax_gradient(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of rows into the same rows of `out`.

        sums           the sums of the rows, from `softmax_sums`
        coefficients   of the gradient. A row whose coefficients are 0 becomes 0. The reference is
                       read only if "divergence" is among them.
        out            [A, T, V]: the logits themselves, or other memory
        """
        kernels = self
        unknown = names_unknown_to_kernels(COEFFICIENTS_OF_KERNELS, coefficients.names)
        if unknown and not self.computes_all_sums:
            kernels = load("eager").Kernels()
        kernels.run_gradient_kernel(rows, sums, coefficients, out)

    @abstractmethod
    def run_sums_kernel(self, rows: LogitRows, names: tuple[str, ...]) -> SoftmaxSums:
        """Compute the named sums that one pass over the rows gives and the kernels know.

        The result has memory for all named sums. The values of the others are not set.
        """

    @abstractmethod
    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Compute MIXTURE_SUMS, fp32 [2, num_rows], in a second pass over the rows.

        With p the policy's softmax, q the reference's, m = (1 - mixture) p + mixture q, and with
        direction and mixture from `rows.reference`:

            "jsd"   KL(p || m) and KL(q || m)
            "tv"    sum_j p_j sign(p_j - q_j) / 2 and sum_j |p_j - q_j| / 2

        sums   the sums of the first pass over the whole vocabulary, which normalize p and q
        """

    @abstractmethod
    def run_gradient_kernel(
        self, rows: LogitRows, sums: SoftmaxSums, coefficients: GradientCoefficients, out: Tensor
    ) -> None:
        """Write d loss / d logits of each row into the same row of `out`, [A, T, V].

        The formula is in `GradientCoefficients`. The kernels know all the coefficients of a call.
        """

    def fused_loss(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Compute a token-level loss, its statistics and its gradient in one call.

        out   [A, T, V]: memory for d loss / d logits, possibly the logits themselves. None: no
              gradient is computed.
        """
        return self.loss_in_two_passes(rows, loss_formula, out, max(1, rows.num_rows))

    def loss_in_two_passes(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None, block_rows: int
    ) -> FusedLossValues:
        """Compute `fused_loss` in two passes over each block of `block_rows` rows.

        The first pass computes softmax sums, the second the gradient, with the formula between
        them. If a block fits the cache, its second pass costs nearly nothing.
        """
        num_rows = rows.num_rows
        tables = []
        for start in range(0, num_rows, block_rows):
            stop = min(start + block_rows, num_rows)
            block = rows.slice_rows(start, stop)
            tables.append(
                self._loss_of_block(block, loss_formula.select(slice(start, stop)), out).table
            )
        if not tables:
            num_values = FusedLossValues.num_values(rows.reference is not None)
            tables.append(
                torch.zeros(num_values, 0, dtype=torch.float32, device=rows.logits.device)
            )
        return FusedLossValues(concatenate(tables, 1))

    def _loss_of_block(
        self, rows: LogitRows, loss_formula: TokenLossFormula, out: Tensor | None
    ) -> FusedLossValues:
        """Compute `fused_loss` of one block: softmax sums, then the formula, then the gradient.

        out   memory for the gradient of all blocks, or None
        """
        names = SUMS_OF_ENTROPY
        if rows.reference is not None:
            names = sums_for(("entropy", "divergence"), rows.reference.direction)
        sums = self.softmax_sums(rows, names)
        logps, entropy = sums.logps_and_entropy()
        losses, grad_logps, grad_entropy = self.evaluate_formula(loss_formula, logps, entropy)
        grads = {"logps": grad_logps}
        if grad_entropy is not None:
            grads["entropy"] = grad_entropy
        divergences = []
        if rows.reference is not None:
            divergence = sums.divergence
            divergences.append(divergence)
            weight = loss_formula.inputs.divergence_weight
            if weight is not None:
                losses = losses + torch.where(weight == 0, 0.0, weight * divergence)
                grads["divergence"] = weight
        if rows.mask is not None:
            losses = torch.where(rows.mask, losses, 0.0)
        if out is not None:
            coefficients = GradientCoefficients.from_gradients(
                sums, grads, rows.mask, entropy=entropy
            )
            self.softmax_gradient(rows, sums, coefficients, out)
        return FusedLossValues(torch.stack([logps, entropy, losses, *divergences]))

    @abstractmethod
    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the loss of each row of a loss formula and its gradients, fp32 [num_rows].

        These are (losses, d loss / d log-prob, d loss / d entropy). The last is None without an
        entropy bonus.

        logps, entropy   fp32 [num_rows], contiguous
        """

    @abstractmethod
    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient by a 0-d factor in place.

        A factor of 1 takes no pass in C++ and Triton.
        """

    # ---- pairs of a row of hidden states and a row of the weight
    #
    # hidden is [num_rows, H], weight [V, H]; fp32, bf16 or fp16 each, with unit stride in H and any
    # stride in front. Sums are fp32, in the order of pairs, and are rounded once, when they are
    # written to `out`. A result depends on its own pairs only. Pairs that are not used, or whose
    # value is 0, read nothing. Rows of `out` without any other pair are not written. Ids and rows
    # are not checked.

    @abstractmethod
    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each pair, fp32 [num_pairs]; -inf if it is unused."""

    @abstractmethod
    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write out[row] = sum of values * weight[id] over the pairs of each row.

        values   fp32 [num_pairs]
        out      [num_rows, H]
        """

    @abstractmethod
    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """Add the sum of values * hidden[row] over the pairs of each id to out[id].

        values   fp32 [num_pairs]
        out      [V, H]
        """


class BackendWrapper(Backend):
    """A backend that calls the kernels of another one. Subclasses change those over rows of logits.

    kernels   the other backend
    """

    computes_all_sums = True

    def __init__(self, kernels: Backend) -> None:
        self.kernels = kernels

    def run_mixture_kernel(self, rows: LogitRows, sums: SoftmaxSums) -> Tensor:
        """Return MIXTURE_SUMS of each row: two sums over the vocabulary, fp32 [2, num_rows].

        With p the policy's softmax, q the reference's, m = (1 - mixture) p + mixture q, and with
        direction and mixture from `rows.reference`:

            "jsd"   KL(p || m) and KL(q || m)
            "tv"    sum_j p_j sign(p_j - q_j) / 2 and sum_j |p_j - q_j| / 2

        sums   softmax sums of the first pass over the rows, which normalize p and q
        """
        return self.kernels.run_mixture_kernel(rows, sums)

    def evaluate_formula(
        self, loss_formula: TokenLossFormula, logps: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (losses, d loss / d log-prob, d loss / d entropy), fp32 [num_rows] each.

        The last is None if the loss has no entropy bonus.

        logps, entropy   fp32 [num_rows]
        """
        return self.kernels.evaluate_formula(loss_formula, logps, entropy)

    def scale_(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply a gradient [A, T, V] by a 0-d factor in place."""
        self.kernels.scale_(gradient, factor)

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        """Return hidden[row] . weight[id] of each (row, id) pair, fp32 [num_pairs].

        It is -inf for an id of -1.
        """
        return self.kernels.pair_logits(hidden, weight, pairs)

    def write_grad_hidden_of_pairs(
        self, values: Tensor, pairs: Pairs, weight: Tensor, out: Tensor
    ) -> None:
        """Write out[row] = sum of values[i] * weight[id] over the pairs i = (row, id) of each row.

        This is the gradient of hidden states from the gradients of `pair_logits`. A pair is unused
        if its id is -1 or its value 0. Rows without a used pair are not written.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        weight, out   [V, H] and [num_rows, H]
        """
        self.kernels.write_grad_hidden_of_pairs(values, pairs, weight, out)

    def add_grad_weight_of_pairs(
        self, values: Tensor, pairs: Pairs, hidden: Tensor, out: Tensor
    ) -> None:
        """Add sum of values[i] * hidden[row] over the pairs i = (row, id) of each id to out[id].

        This is the gradient of the weight from the gradients of `pair_logits`.

        values        fp32 [num_pairs]: the gradient of each pair's logit
        hidden, out   [num_rows, H] and [V, H]
        """
        self.kernels.add_grad_weight_of_pairs(values, pairs, hidden, out)


@functools.lru_cache(maxsize=256)
def names_unknown_to_kernels(known: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that are not known to the kernels, and that no second pass computes."""
    return tuple(name for name in names if name not in known and name not in MIXTURE_SUMS)


# ---- the backend that runs

BACKENDS = ("eager", "cpu", "triton")


def native_backend(device: torch.device) -> tuple[str, str | None]:
    """Return the backend with kernels for a device, and why it cannot run there, or None.

    It is "cpu" on a CPU, and "triton" on any device that Triton's own driver serves.
    """
    if device.type == "cpu":
        return "cpu", unavailable("cpu")
    reason = unavailable("triton")
    if reason is None and not load("triton").serves(device):
        reason = f"no kernels for {device.type} tensors"
    return "triton", reason


@functools.cache
def load(name: str) -> Any:
    """Return the module of a backend. It has `available` and the class `Kernels(strict)`.

    It is imported on first use: `import grpo_kernels` needs neither Triton nor a compiler.
    """
    return importlib.import_module(f".{name}", __name__)


def unavailable(name: str) -> str | None:
    """Return why a backend cannot run here, or None if it can."""
    try:
        return load(name).available()
    except ImportError as error:
        return f"it cannot be imported ({error})"


#: (backend, strict) of the innermost block of `use`, if there is one.
_in_use: ContextVar[tuple[str, bool] | None] = ContextVar("grpo_kernels.use", default=None)


@contextlib.contextmanager
def use(*, backend: str | None = None, strict: bool | None = None) -> Iterator[None]:
    """Set the backend and strict mode of the calls in a block.

        with grpo_kernels.use(backend="eager"):
            out = linear_grpo_loss(hidden, weight, batch, objective)

    backend   "auto", "eager", "cpu" or "triton", for calls that leave `Options(backend=)` at
              "auto". None keeps the setting outside of the block.
    strict    True: a fallback to eager PyTorch raises RuntimeError. False: it warns, unless the
              call says `Options(strict=True)`. None keeps the setting outside of the block.

    Blocks nest, and hold in their own thread or task. In the environment of a process
    GRPO_KERNELS_BACKEND and GRPO_KERNELS_STRICT=1 say the same. A block takes precedence over them.
    The backward of a loss runs on the backend of its forward. Raises ValueError for an unknown
    name.
    """
    if backend is not None:
        check_name(backend)
    remedy = "pass True, False or None."
    require(strict is None or isinstance(strict, bool), "strict", strict, remedy)
    outer_backend, outer_strict = _settings()
    token = _in_use.set(
        (
            outer_backend if backend is None else backend,
            outer_strict if strict is None else strict,
        )
    )
    try:
        yield
    finally:
        _in_use.reset(token)


def _settings() -> tuple[str, bool]:
    """Return (backend, strict) of the innermost block of `use`, or else of the environment."""
    in_use = _in_use.get()
    if in_use is not None:
        return in_use
    backend = os.environ.get("GRPO_KERNELS_BACKEND", "auto")
    return backend, os.environ.get("GRPO_KERNELS_STRICT", "0") == "1"


def is_strict(strict: bool) -> bool:
    """Return whether a call is strict: by its own `strict`, by `use` or by the environment."""
    return strict or _settings()[1]


def check_name(backend: object) -> None:
    """Raise ValueError unless `backend` is "auto" or the name of a backend."""
    require_one_of("backend", backend, ("auto", *BACKENDS))


def pick(backend: str, device: torch.device, strict: bool = False) -> Backend:
    """Return the backend for data on a device.

    backend   "auto" takes the setting of `use` or of GRPO_KERNELS_BACKEND. If that is "auto", too,
              it takes the native backend, and falls back to eager PyTorch with one warning for each
              reason. It also falls back for a single call whose Triton kernel cannot run.
    strict    a fallback raises RuntimeError. `use` and GRPO_KERNELS_STRICT can say the same.

    A backend that is named never falls back: RuntimeError says why it cannot run. Raises ValueError
    for an unknown name. A Triton kernel whose tile does not fit into this GPU runs with a smaller
    one and warns, in strict mode too.
    """
    backend_in_use, strict_in_use = _settings()
    strict = strict or strict_in_use
    if backend == "auto":
        backend = backend_in_use
    if backend == "auto":
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
    backend: Backend
    if name == "triton_or_eager":
        backend = load("triton").OrEager()
    else:
        backend = load(name).Kernels(strict)
    return backend


def fall_back(instead: str, reason: str) -> None:
    """Warn once that a fallback runs in place of a kernel."""
    warn_once(
        f"grpo_kernels falls back to {instead}: {reason}. `python -m grpo_kernels doctor` says"
        " more."
    )
