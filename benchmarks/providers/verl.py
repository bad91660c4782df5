"""verl: its linear cross-entropy kernel, and its log-probs of given logits, each with the loss in torch.

`import verl` imports Ray and tokenizers, which the kernel does not need. The parent packages are therefore created without
running their __init__, and the module of the kernel is imported as usual."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from benchmarks.cases import HiddenCase, LogitsCase, Result, policy_loss
from benchmarks.providers import Unavailable, peer, provider

Call = Callable[[], Result]


def submodule(name: str) -> ModuleType:
    for parent in ("verl", "verl.utils"):
        if parent not in sys.modules:
            spec = importlib.util.find_spec(parent)
            if spec is None:
                raise Unavailable("not installed: pip install verl --no-deps")
            sys.modules[parent] = importlib.util.module_from_spec(spec)
    return peer(name, "verl")


def _kernel(case: HiddenCase) -> Callable[[], torch.Tensor]:
    linear_cross_entropy = submodule("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    if case.cell.hidden is not None and case.cell.hidden % 128:
        raise Unavailable(f"the hidden size must be a multiple of 128, not {case.cell.hidden}")
    return lambda: linear_cross_entropy(case.hidden, case.weight, case.batch.targets, 1.0, "none")[0]


@provider("verl kernel + loss", "hidden", "hidden-frozen", devices=("cuda",))
def kernel(case: HiddenCase) -> Call:
    logps = _kernel(case)
    return lambda: case.gradients(policy_loss(logps(), case.batch, case.cell.beta))


@provider("verl kernel", "hidden-forward", devices=("cuda",))
def kernel_forward(case: HiddenCase) -> Call:
    logps = _kernel(case)
    return torch.no_grad()(lambda: {"logps": logps()})


# It calls flash-attn's kernel where that is installed, and loops over sequences in eager PyTorch otherwise.
EAGER = "" if importlib.util.find_spec("flash_attn") else " (no flash-attn)"


@provider(f"verl log-probs{EAGER} + loss", "logits")
def logprobs(case: LogitsCase) -> Call:
    logprobs_from_logits = submodule("verl.utils.torch_functional").logprobs_from_logits

    shape = (case.cell.sequences, case.cell.length)

    def run() -> Result:
        # A view, because its flash-attn path overwrites the logits in the backward, which a leaf does not allow.
        logps = logprobs_from_logits(case.logits.view(*shape, -1), case.batch.targets.view(shape)).view(-1)
        return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

    return run
