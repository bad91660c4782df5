"""verl: its linear cross-entropy kernel, and its log-probs of given logits.

`import verl` imports Ray and tokenizers, which the kernel does not need. The parent packages are
therefore created without running their __init__, and the module of the kernel is imported as usual.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from benchmarks.cases import Case
from benchmarks.providers import Logps, Unavailable, logps_provider, peer


def submodule(name: str) -> ModuleType:
    for parent in ("verl", "verl.utils"):
        if parent not in sys.modules:
            spec = importlib.util.find_spec(parent)
            if spec is None:
                raise Unavailable("not installed: pip install verl --no-deps")
            sys.modules[parent] = importlib.util.module_from_spec(spec)
    return peer(name, "verl")


@logps_provider("verl kernel", "hidden", "hidden-frozen", "hidden-forward", devices=("cuda",))
def kernel(case: Case) -> Logps:
    linear_cross_entropy = submodule("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    if case.cell.hidden is not None and case.cell.hidden % 128:
        raise Unavailable(f"the hidden size must be a multiple of 128, not {case.cell.hidden}")
    return lambda hidden, weight: linear_cross_entropy(
        hidden, weight, case.batch.targets, 1.0, "none"
    )[0]


# It calls flash-attn's kernel where that is installed, and loops over sequences in eager PyTorch
# otherwise.
EAGER = "" if importlib.util.find_spec("flash_attn") else " (no flash-attn)"


@logps_provider(f"verl log-probs{EAGER}", "logits")
def logprobs(case: Case) -> Logps:
    function = submodule("verl.utils.torch_functional").logprobs_from_logits
    shape = (case.cell.sequences, case.cell.length)
    # A view, because its flash-attn path overwrites the logits in the backward, which a leaf does
    # not allow.
    return lambda logits: function(logits.view(*shape, -1), case.batch.targets.view(shape))
