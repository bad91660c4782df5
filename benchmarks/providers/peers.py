"""Projects with one or two functions to call: CCE, Fast-LLM, miles, QuACK, Unsloth."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch.distributed

from benchmarks.cases import CLIP, HALF, Case, Cell, Result, Tensor
from benchmarks.providers import Logps, Unavailable, logps_provider, peer, provider

# ---- Cut Cross-Entropy
#
# Apple's negative log-probs from hidden states. Its kernel skips blocks whose gradients are small.
# A random head has more such blocks than a trained one, so the time with this filter is a lower
# bound. It is measured with the filter and without. On a CPU its torch.compile version is measured.


def _cce(case: Case, **options: object) -> Logps:
    """Return a function of (hidden [N, H], weight [V, H]) that returns CCE's log-probs [N].

    case      gives the targets, int64 [N]
    options   keyword arguments of CCE's linear_cross_entropy
    """
    cross_entropy = peer("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    targets = case.batch.targets

    def logps(hidden: Tensor, weight: Tensor) -> Tensor:
        # The cross-entropy of a token is its negative log-prob.
        return -cross_entropy(hidden, weight, targets, reduction="none", **options)

    return logps


@logps_provider(
    "CCE, filtered (flat states)", "hidden", "hidden-frozen", devices=("cuda",), dtypes=HALF
)
@logps_provider("CCE", "hidden-forward", devices=("cuda",), dtypes=HALF)
def filtered(case: Case) -> Logps:
    """Return CCE's log-prob function (see `_cce`) with its default filter of small gradients."""
    return _cce(case)


@logps_provider(
    "CCE, unfiltered", "hidden", "hidden-frozen", "cross-entropy", devices=("cuda",), dtypes=HALF
)
def unfiltered(case: Case) -> Logps:
    """Return CCE's log-prob function (see `_cce`) without the filter, so with exact gradients."""
    return _cce(case, filter_eps=None)


@logps_provider("CCE (torch.compile)", "hidden", "hidden-frozen", "cross-entropy", "hidden-forward")
def compiled(case: Case) -> Logps:
    """Return CCE's log-prob function (see `_cce`) in its implementation by torch.compile."""
    return _cce(case, impl="torch_compile")


# ---- Fast-LLM
#
# One Triton kernel for the clipped loss of logits and their gradient. The matmuls before and after
# it are torch's. The kernel has no KL term. So it is measured from hidden states, where the
# contract has none either.


def _logits_and_gradient_bytes(cell: Cell) -> float:
    """Return the bytes of logits [N, V] and of their gradient, both in the dtype of the cell."""
    return 2.0 * cell.rows * cell.vocab * cell.dtype.itemsize


@provider(
    "Fast-LLM kernel + products",
    "hidden",
    "hidden-frozen",
    devices=("cuda",),
    memory=_logits_and_gradient_bytes,
)
def kernel(case: Case) -> Callable[[], Result]:
    """Return a function that computes the DAPO loss of a case with Fast-LLM's kernel.

    The function runs the matmul of the head in torch, the kernel, and the matmuls of the gradients.
    """
    module = peer("fast_llm.functional.triton.grpo_loss", "fast_llm")
    loss_and_gradient = module.triton_grpo_loss_forward_backward
    batch = case.batch
    assert batch.old_logps is not None
    targets = batch.targets.contiguous()
    advantages = batch.advantages.float().contiguous()
    old_logps = batch.old_logps.contiguous()
    clip_low, clip_high = CLIP

    def call() -> Result:
        """Return {"loss": scalar, "d_hidden": [N, H], "d_weight": [V, H]}.

        Gradients of inputs that do not require one are left out.
        """
        logits = case.hidden @ case.weight.t()
        loss, d_logits, _ = loss_and_gradient(
            logits,
            targets,
            advantages,
            old_logps,
            grad_output=1.0,
            epsilon_low=clip_low,
            epsilon_high=clip_high,
            divisor=float(targets.numel()),
        )
        results = {"loss": loss.reshape(())}
        if "d_hidden" in case.leaves:
            results["d_hidden"] = d_logits @ case.weight
        if "d_weight" in case.leaves:
            results["d_weight"] = d_logits.t() @ case.hidden
        return results

    # The kernel returns the gradient of the logits, so autograd has nothing to record.
    return torch.no_grad()(call)


# ---- miles
#
# Its log-probs of logits are Megatron's cross-entropy of a vocabulary that is sharded over ranks.
# Here there is one rank, which has nothing to exchange. miles has no loss kernel of its own.

#: What Megatron's cross-entropy asks of a process group, for one rank. A real process group would
#: need torch.distributed to be initialised.
SINGLE_RANK = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


@logps_provider("miles log-probs (Megatron, torch.compile)", "logits")
def logprobs(case: Case) -> Logps:
    """Return a function that returns the log-probs [N] by Megatron's vocab-parallel cross-entropy.

    The logits [N, V] come from the case, and the vocabulary is not sharded.
    """
    module = peer("megatron.core.fusions.fused_cross_entropy", "megatron-core")
    cross_entropy = module.fused_vocab_parallel_cross_entropy

    def logps(_leaf_logits: Tensor) -> Tensor:
        """Return the log-probs [N] of the targets.

        Megatron's forward overwrites fp32 logits. Autograd forbids that for a leaf, which the
        argument is. So the argument is not used: `case.output()` has the same logits, not as a
        leaf, and passes their gradient on to the leaf.
        """
        # Megatron takes logits [sequence, batch, vocabulary] and targets [sequence, batch]. Here
        # the tokens are the sequence, and the batch is 1.
        logits = case.output()[:, None]
        targets = case.batch.targets[:, None]
        # Megatron reduces over the ranks. With one rank this changes nothing, and without an
        # initialised torch.distributed the real all_reduce raises.
        with mock.patch.object(torch.distributed, "all_reduce"):
            return -cross_entropy(logits, targets, SINGLE_RANK)[:, 0]

    return logps


# ---- QuACK


@logps_provider("QuACK cross-entropy", "logits", devices=("cuda",))
def cross_entropy(case: Case) -> Logps:
    """Return a function of logits [N, V] that returns the log-probs [N] by QuACK's kernel."""
    token_losses = peer("quack.cross_entropy", "quack-kernels").cross_entropy
    targets = case.batch.targets
    return lambda logits: -token_losses(logits, targets, reduction="none", inplace_backward=True)


@logps_provider("QuACK linear cross-entropy", "hidden", "hidden-frozen", suffix="")
def linear_cross_entropy(case: Case) -> Logps:
    """Raise Unavailable: QuACK's linear cross-entropy cannot compute a policy loss."""
    raise Unavailable(
        "returns one scalar for all tokens, so it cannot take the per-token gradients of a policy"
        " loss"
    )


# ---- Unsloth
#
# Only `import unsloth` may import its package, and it replaces parts of torch and transformers. To
# import the package alone, set UNSLOTH_IS_PRESENT=1, and without a GPU also
# UNSLOTH_ZOO_DISABLE_GPU_INIT=1.


@logps_provider("Unsloth chunked log-probs", "hidden", "hidden-frozen")
def chunked(case: Case) -> Logps:
    """Return a function of (hidden [N, H], weight [V, H]) that returns Unsloth's log-probs [N]."""
    module = peer("unsloth_zoo.fused_losses.chunked_logprob", "unsloth_zoo")
    chunked_logprobs = module.unsloth_chunked_logprobs
    return lambda hidden, weight: chunked_logprobs(hidden, weight, case.batch.targets)
