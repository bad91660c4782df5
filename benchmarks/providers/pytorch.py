"""Plain PyTorch: eager with an fp32 softmax as in trainers, eager with the softmax in the 16-bit
dtype of the operands, torch.compile of head, log-softmax and loss together, and
linear_cross_entropy of torch 2.13 with its options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import (
    DIRECTIONS,
    HALF,
    OF_SEQUENCES,
    Case,
    Cell,
    Result,
    mean_divergence,
    policy_loss,
)
from benchmarks.providers import BETAS, Logps, Unavailable, logps_provider, provider
from grpo_kernels import TokenBatch

#: A function without arguments that is timed. It computes the results of a case.
Call = Callable[[], Result]


def whole_logits(cell: Cell) -> float:
    """Return the bytes of three fp32 tensors [N, V]: log-probs, their gradient, and the gradient of
    the logits.
    """
    bytes_per_logit = 3.0 * 4
    return bytes_per_logit * cell.rows * cell.vocab


def logits_of(*inputs: Tensor) -> Tensor:
    """Return the logits [N, V] of (logits) or of (hidden states, weight)."""
    if len(inputs) == 1:
        return inputs[0]
    hidden, weight = inputs
    return hidden @ weight.t()


def logps_of(
    *inputs: Tensor, targets: Tensor, upcast: bool = True, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probs [N] of the targets, or with `entropy` the tuple (log-probs, entropy).

    inputs    (logits [N, V]) or (hidden states [N, H], weight [V, H])
    targets   int64 [N]
    upcast    whether the softmax is computed in fp32. Otherwise in the dtype of the inputs
    """
    logits = logits_of(*inputs)
    log_p = torch.log_softmax(logits.float() if upcast else logits, -1)
    logps = log_p.gather(-1, targets[..., None])[..., 0]
    if not entropy:
        return logps
    return logps, -(log_p.exp() * log_p).sum(-1)


def loss_of(*inputs: Tensor, batch: TokenBatch, cell: Cell) -> Tensor:
    """Return the policy loss of (logits) or of (hidden states, weight), a scalar in fp32."""
    logps = logps_of(*inputs, targets=batch.targets.view(-1))
    return policy_loss(logps.view(batch.targets.shape), batch, cell)


def mean_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the targets, with an fp32 softmax."""
    return F.cross_entropy((hidden @ weight.t()).float(), targets)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function. All cases share it, as in a real program."""
    return torch.compile(function)


def _logps(case: Case, upcast: bool = True, function: Callable[..., Any] = logps_of) -> Logps:
    """Return a function of the inputs of a case that returns log-probs, or also the entropy.

    function   `logps_of`, or `logps_of` compiled
    """
    entropy = case.cell.contract == "logits-forward"
    return lambda *inputs: function(
        *inputs, targets=case.batch.targets.view(-1), upcast=upcast, entropy=entropy
    )


LOSSES = ("logits", "hidden", "hidden-frozen", *OF_SEQUENCES)
FORWARD = ("logits-forward", "hidden-forward")


@logps_provider("eager PyTorch", *LOSSES, *FORWARD, "step", suffix="", memory=whole_logits)
def eager(case: Case) -> Logps:
    """Return the log-probs with an fp32 softmax."""
    return _logps(case)


@logps_provider(
    "eager PyTorch, 16-bit softmax", *LOSSES, *FORWARD, suffix="", dtypes=HALF, memory=whole_logits
)
def eager_half(case: Case) -> Logps:
    """Return the log-probs with a softmax in the dtype of the operands."""
    return _logps(case, upcast=False)


@logps_provider("torch.compile", *FORWARD, memory=whole_logits)
def compiled_forward(case: Case) -> Logps:
    """Return the compiled log-probs."""
    return _logps(case, function=compiled(logps_of))


@provider("torch.compile", *LOSSES, "step", memory=whole_logits)
def compiled_loss(case: Case) -> Call:
    """Return a call of the compiled loss."""
    loss = compiled(loss_of)
    return lambda: case.gradients(loss(*case.inputs(), batch=case.batch, cell=case.cell))


# ---- cross-entropies

#: Arguments of LinearCrossEntropyOptions by the name of the provider. None: no options, which
#: computes all logits at once. Sums are always in fp32, as with "auto".
OPTIONS: dict[str, dict[str, Any] | None] = {
    "": None,
    "auto": {},
    "accurate": {"acc_policy": "accurate"},
    "compact": {"acc_policy": "compact"},
    "chunks of 256 rows": {"batch_chunk_size": 256},
}


def _linear_cross_entropy(options: dict[str, Any] | None, case: Case) -> Callable[..., Tensor]:
    """Return torch's linear_cross_entropy with these options.

    options   arguments of LinearCrossEntropyOptions, see OPTIONS. None: no options

    Raises Unavailable if torch is older than 2.13.
    """
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy, 2.13 has")
    if options is None:
        return function
    if case.cell.dtype in HALF:
        options = options | {"acc_dtype": torch.float32}
    return functools.partial(function, options=torch.nn.LinearCrossEntropyOptions(**options))


def _cross_entropy(case: Case, function: Callable[..., Tensor]) -> Call:
    """Return a function that computes a mean cross-entropy of the case, and its gradients.

    function   takes (hidden [N, H], weight [V, H], targets [N]) and returns the loss, a scalar
    """
    return lambda: case.gradients(function(case.hidden, case.weight, case.batch.targets))


def _register_linear_cross_entropy(name: str, options: dict[str, Any] | None) -> None:
    """Register linear_cross_entropy with these options.

    It is registered for the contract "cross-entropy", and as log-probs for policy losses if `name`
    is "" or "auto".

    name, options   a key of OPTIONS and its value
    """
    label = "torch linear_cross_entropy"
    if name:
        label += f", {name}"
    memory = whole_logits if options is None else None

    def make(case: Case) -> Call:
        return _cross_entropy(case, _linear_cross_entropy(options, case))

    def make_logps(case: Case) -> Logps:
        function = _linear_cross_entropy(options, case)
        return lambda *inputs: -function(*inputs, case.batch.targets, reduction="none")

    provider(label, "cross-entropy", memory=memory)(make)
    if name in ("", "auto"):
        # On a CPU it takes minutes in chunks with reduction="none" and 16 bits.
        devices = ("cpu", "cuda") if options is None else ("cuda",)
        register = logps_provider(label, "hidden", *OF_SEQUENCES, memory=memory, devices=devices)
        register(make_logps)


provider("eager PyTorch", "cross-entropy", memory=whole_logits)(
    lambda case: _cross_entropy(case, mean_cross_entropy)
)
provider("torch.compile", "cross-entropy", memory=whole_logits)(
    lambda case: _cross_entropy(case, compiled(mean_cross_entropy))
)
for _name, _options in OPTIONS.items():
    _register_linear_cross_entropy(_name, _options)


# ---- divergences


def two_softmaxes(cell: Cell) -> float:
    """Return the bytes of seven and a half fp32 tensors [N, V], for policy and teacher."""
    bytes_per_logit = 7.5 * 4
    return bytes_per_logit * cell.rows * cell.vocab


def _teacher(case: Case, function: Callable[..., Tensor]) -> Call:
    """Return a function that computes the mean divergence of a case, and its gradients.

    function   takes the direction and fp32 logits [N, V] of policy and teacher, and returns the
               mean divergence, a scalar
    """
    direction = DIRECTIONS[case.cell.contract]

    def call() -> Result:
        """Return the loss and the gradients of the policy's logits, or hidden states and weight."""
        if case.hidden is None:
            loss = function(direction, case.logits.float(), case.ref_logits.float())
            return case.gradients(loss)
        with torch.no_grad():
            teacher_logits = (case.ref_hidden @ case.ref_weight.t()).float()
        # The policy's logits have no name here, so that their memory is free in the backward.
        loss = function(direction, (case.hidden @ case.weight.t()).float(), teacher_logits)
        return case.gradients(loss)

    return call


provider("eager PyTorch", *BETAS, "logits-divergence", memory=two_softmaxes)(
    lambda case: _teacher(case, mean_divergence)
)
provider("torch.compile", *BETAS, "logits-divergence", memory=two_softmaxes)(
    lambda case: _teacher(case, torch.compile(mean_divergence))
)


# ---- draft heads


def soft_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cross-entropy of the student's softmax with the teacher's.

    student, teacher   fp32 logits [..., V]
    """
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


def _draft(case: Case, function: Callable[..., Tensor]) -> Call:
    """Return a function that computes the loss of a draft head, and its gradient, as trainers do.

    The logits of all positions are computed, in the dtype of the operands. Position t of the draft
    learns from position t + 1 of the policy.

    function   takes fp32 logits of draft and policy, [B, T - 1, V], and returns the loss, a scalar
    """
    shape = (case.cell.sequences, case.cell.length, -1)

    def call() -> Result:
        """Return {"loss": scalar, "d_hidden": [N, H]}."""
        student = (case.hidden @ case.weight.t()).view(shape)[:, :-1]
        with torch.no_grad():
            teacher = (case.ref_hidden @ case.weight.t()).view(shape)[:, 1:]
        return case.gradients(function(student.float(), teacher.float()))

    return call


provider("eager PyTorch", "draft", memory=two_softmaxes)(
    lambda case: _draft(case, soft_cross_entropy)
)
provider("torch.compile", "draft", memory=two_softmaxes)(
    lambda case: _draft(case, compiled(soft_cross_entropy))
)


# ---- candidate sets (`kept`)


def masked_logits(cell: Cell) -> float:
    """Return the bytes of three fp32 tensors and a mask [N, V]."""
    bytes_per_logit = 3.0 * 4 + 1
    return bytes_per_logit * cell.rows * cell.vocab


@provider("eager PyTorch, masked logits", "kept", memory=masked_logits)
def masked(case: Case) -> Call:
    """Return a function that computes the DAPO loss over candidate sets, from all logits.

    Logits [N, V] of ids outside a row's candidate set are replaced by -inf. Trainers that replay
    candidate sets compute it in this way.
    """
    # bool [N, V]
    outside = ~case.batch.kept.mask(case.cell.vocab)

    def call() -> Result:
        logits = (case.hidden @ case.weight.t()).float().masked_fill(outside, -torch.inf)
        target_logits = logits.gather(1, case.batch.targets[:, None])[:, 0]
        logps = target_logits - logits.logsumexp(1)
        return case.gradients(policy_loss(logps, case.plain_batch, case.cell))

    return call


@provider("pairs in PyTorch, autograd", "kept")
def pairs(case: Case) -> Call:
    """Return a function that computes the DAPO loss over candidate sets, from their logits alone.

    SkyRL's replay head computes it in this way. Each (row, candidate) pair is one dot product in
    the dtype of the operands. The gradient of the weight is an index_add into new memory. Rows with
    one candidate have a log-prob of 0.
    """
    candidate_sets = case.batch.kept
    # K is the size of the largest set. Smaller sets are padded with the id 0.
    candidates = candidate_sets.padded(0).long()  # [N, K]
    position = torch.arange(candidates.shape[1], device=candidates.device)
    is_candidate = position < candidate_sets.counts[:, None]  # bool [N, K]: not padding
    is_target = (candidates == case.batch.targets[:, None]) & is_candidate
    target_position = is_target.to(torch.int64).argmax(1)  # [N], of the target in its set
    has_several = candidate_sets.counts != 1  # bool [N]

    def call() -> Result:
        """Return {"loss": scalar, "d_hidden": [N, H], "d_weight": [V, H]}.

        R is the number of rows with several candidates, P the number of their (row, id) pairs.
        """
        rows = has_several.nonzero()[:, 0]  # [R]
        ids = candidates[rows]  # [R, K]
        is_pair = is_candidate[rows]  # bool [R, K]
        row_of_pair, _ = is_pair.nonzero(as_tuple=True)  # [P], indices into `rows`
        hidden_of_pair = case.hidden[rows][row_of_pair]  # [P, H]
        # The rows of the weight [P, H] have no name here, so that the backward can free them.
        pair_logits = (hidden_of_pair * case.weight[ids[is_pair]]).sum(1).float()  # [P]
        logits = torch.full(ids.shape, -torch.inf, device=pair_logits.device)
        logits = logits.masked_scatter(is_pair, pair_logits)  # [R, K], -inf where padded
        target_logits = logits.gather(1, target_position[rows, None])[:, 0]
        # The other rows have one candidate, the target, with probability 1.
        logps = torch.zeros(case.cell.rows, device=logits.device)
        logps = logps.index_put((rows,), target_logits - logits.logsumexp(1))
        return case.gradients(policy_loss(logps, case.plain_batch, case.cell))

    return call
