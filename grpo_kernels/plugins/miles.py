"""miles: `--custom-megatron-init-path grpo_kernels.plugins.miles.init` puts log-probs and entropy on our kernels, over the sets
that its rollouts recorded where its arguments say that they do."""

from typing import Any

from ..integrations import miles
from ._once import once


def init(args: Any) -> None:
    """Bind miles' functions in this process; args are miles' arguments. A second call does nothing."""
    once("miles", lambda: miles.bind(args), lambda _: "log-probs and entropy of miles run on our kernels.")
