"""TRL: its log-prob kernel on logits, the chunked head that its trainers use, and its chunked
divergence.

What the last two import asks for classes of `datasets`, which they do not need: where its pyarrow
is missing, a module of this name stands in for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

from benchmarks.cases import OF_SEQUENCES, Case, Result
from benchmarks.providers import BETAS, Logps, logps_provider, peer, provider


class _Datasets(ModuleType):
    __spec__ = ModuleSpec("datasets", None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def submodule(name: str) -> ModuleType:
    if importlib.util.find_spec("pyarrow") is None:
        sys.modules.setdefault("datasets", _Datasets("datasets"))
    return peer(name, "trl")


@logps_provider("TRL kernel", "logits", "logits-forward", devices=("cuda",))
def kernel(case: Case) -> Logps:
    function = submodule("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy
    return lambda logits: function(logits, case.batch.targets)


@logps_provider(
    "TRL fused head", "hidden", "hidden-frozen", *OF_SEQUENCES, "hidden-forward", "step"
)
def head(case: Case) -> Logps:
    chunk = submodule(
        "trl.trainer.utils"
    )._CHUNKED_LOGPROB_CHUNK_SIZE  # the backward imports this module as well
    function = submodule("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    arguments = (
        None,
        case.batch.targets.view(-1),
        1.0,
        min(chunk, case.cell.vocab),
        None,
        1.0,
        ("log_probs",),
    )
    return lambda hidden, weight: function.apply(hidden, weight, *arguments)[0]


@provider("TRL chunked divergence + mean", *BETAS)
def divergence(case: Case) -> Callable[[], Result]:
    """Six products, eight for the jsd."""
    function = submodule("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    teacher, beta = (case.ref_hidden, case.ref_weight, None), BETAS[case.cell.contract]
    return lambda: case.gradients(
        function.apply(case.hidden, case.weight, None, *teacher, beta)[0].mean()
    )
