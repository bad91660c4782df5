"""verl: its linear cross-entropy kernel, and its log-probs of logits.

`import verl` imports Ray and tokenizers, which these modules do not need. So the parent packages
are created without running their __init__.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.providers import Logps, Unavailable, logps_provider, peer


def submodule(name: str) -> ModuleType:
    """Import and return a module of verl without running the __init__ of its parent packages."""
    for parent in ("verl", "verl.utils"):
        if parent not in sys.modules:
            spec = importlib.util.find_spec(parent)
            if spec is None:
                raise Unavailable("not installed: pip install verl --no-deps")
            sys.modules[parent] = importlib.util.module_from_spec(spec)
    return peer(name, "verl")


@logps_provider("verl kernel", "hidden", "hidden-frozen", "hidden-forward", devices=("cuda",))
def kernel(case: Case) -> Logps:
    """Return verl's kernel for log-probs of hidden states."""
    linear_cross_entropy = submodule("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    if case.cell.hidden is not None and case.cell.hidden % 128:
        raise Unavailable(f"the hidden size must be a multiple of 128, not {case.cell.hidden}")
    # linear_cross_entropy takes no keyword arguments.
    temperature = 1.0
    reduction = "none"

    def logps(hidden: Tensor, weight: Tensor) -> Tensor:
        found, *_ = linear_cross_entropy(hidden, weight, case.batch.targets, temperature, reduction)
        return found

    return logps


# It calls the kernel of flash-attn if that is installed. Otherwise it loops over sequences in eager
# PyTorch.
EAGER = "" if importlib.util.find_spec("flash_attn") else " (no flash-attn)"


@logps_provider(f"verl log-probs{EAGER}", "logits")
def logprobs(case: Case) -> Logps:
    """Return verl's log-probs of logits."""
    function = submodule("verl.utils.torch_functional").logprobs_from_logits
    shape = (case.cell.sequences, case.cell.length)
    targets = case.batch.targets.view(shape)
    # The backward with flash-attn overwrites the logits. Autograd does not allow this for a leaf,
    # so it gets a view.
    return lambda logits: function(logits.view(*shape, -1), targets)
