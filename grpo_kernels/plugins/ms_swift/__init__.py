"""ms-swift: `--external_plugins "$(python -m grpo_kernels plugin ms_swift)" --use_liger_kernel
true`.

ms-swift's GRPO then calls our loss from hidden states in place of Liger's. Other losses of ms-swift
are not changed (`swift.loss.loss_map` is for supervised training). ms-swift loads this file by its
path, and puts the file's folder first on sys.path: nothing else is in it.
"""

from grpo_kernels.integrations import liger
from grpo_kernels.plugins import once

SLOTS = once(
    "ms_swift", liger.bind, lambda _: "ms-swift's GRPO loss with use_liger_kernel is ours."
)
