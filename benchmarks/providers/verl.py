"""verl: its linear cross-entropy kernel, and its log-probs of logits.

`import verl` imports Ray and tokenizers, which these modules do not need. So `import_submodule`
puts empty parent packages into sys.modules.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.providers import Logps, Unavailable, logps_provider, peer


def import_submodule(name: str) -> ModuleType:
    """Import and return a module of verl without running the __init__ of `verl` and `verl.utils`.

    These import Ray and tokenizers, which need not be installed. An import takes a parent package
    from sys.modules if it is there, so an unexecuted package is put there first. It knows its
    folder, in which the module is found.

    name   full name, such as "verl.utils.torch_functional"

    Raises Unavailable if verl is not installed or the import fails.
    """
    for package_name in ("verl", "verl.utils"):
        if package_name in sys.modules:
            continue
        spec = importlib.util.find_spec(package_name)
        if spec is None:
            raise Unavailable("not installed: pip install verl --no-deps")
        unexecuted_package = importlib.util.module_from_spec(spec)
        sys.modules[package_name] = unexecuted_package
    return peer(name, "verl")


@logps_provider("verl kernel", "hidden", "hidden-frozen", "hidden-forward", devices=("cuda",))
def kernel(case: Case) -> Logps:
    """Return a function of (hidden [N, H], weight [V, H]) that returns verl's log-probs [N].

    Raises Unavailable if verl's kernel does not support the hidden size.
    """
    module = import_submodule("verl.utils.kernel.linear_cross_entropy")
    linear_cross_entropy = module.linear_cross_entropy
    if case.cell.hidden is not None and case.cell.hidden % 128:
        raise Unavailable(f"the hidden size must be a multiple of 128, not {case.cell.hidden}")
    # linear_cross_entropy takes no keyword arguments.
    temperature = 1.0
    reduction = "none"

    def logps(hidden: Tensor, weight: Tensor) -> Tensor:
        outputs = linear_cross_entropy(hidden, weight, case.batch.targets, temperature, reduction)
        return outputs[0]  # then the entropy

    return logps


# It calls the kernel of flash-attn if that is installed. Otherwise it loops over sequences in eager
# PyTorch.
EAGER = "" if importlib.util.find_spec("flash_attn") else " (no flash-attn)"


@logps_provider(f"verl log-probs{EAGER}", "logits")
def logprobs(case: Case) -> Logps:
    """Return a function of logits [N, V] that returns verl's log-probs [B, T], with N = B x T."""
    module = import_submodule("verl.utils.torch_functional")
    logprobs_from_logits = module.logprobs_from_logits
    shape = (case.cell.sequences, case.cell.length)
    targets = case.batch.targets.view(shape)
    # The backward with flash-attn overwrites the logits. Autograd does not allow this for a leaf,
    # so it gets a view.
    return lambda logits: logprobs_from_logits(logits.view(*shape, -1), targets)
