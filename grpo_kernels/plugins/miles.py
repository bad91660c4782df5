"""miles: `--custom-megatron-init-path grpo_kernels.plugins.miles.init` computes log-probs and
entropy with our kernels. They are taken over the sets that rollouts have recorded, if miles'
arguments ask for that.
"""

from typing import Any

from ..integrations import miles
from . import once


def init(args: Any) -> None:
    """Bind miles' functions in this process; args are miles' arguments.

    A second call does nothing.
    """
    once(
        "miles",
        lambda: miles.bind(args),
        lambda _: "log-probs and entropy of miles run on our kernels.",
    )
