"""TRL: its log-prob kernel for logits, the chunked head that its trainers use, and its chunked
divergence.

The modules of the last two import classes of `datasets` that they do not need. If pyarrow is not
installed, `datasets` cannot be imported, and a stand-in replaces it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch import Tensor

from benchmarks.cases import OF_SEQUENCES, Case, Result
from benchmarks.providers import BETAS, Logps, logps_provider, peer, provider


class _Datasets(ModuleType):
    """A stand-in for `datasets`, which has a class of every name."""

    __spec__ = ModuleSpec("datasets", None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def submodule(name: str) -> ModuleType:
    """Import and return a module of TRL."""
    if importlib.util.find_spec("pyarrow") is None:
        sys.modules.setdefault("datasets", _Datasets("datasets"))
    return peer(name, "trl")


@logps_provider("TRL kernel", "logits", "logits-forward", devices=("cuda",))
def kernel(case: Case) -> Logps:
    """Return TRL's kernel for log-probs and entropy of logits."""
    function = submodule("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy
    return lambda logits: function(logits, case.batch.targets)


@logps_provider(
    "TRL fused head", "hidden", "hidden-frozen", *OF_SEQUENCES, "hidden-forward", "step"
)
def head(case: Case) -> Logps:
    """Return TRL's chunked log-probs of hidden states."""
    # The backward imports trl.trainer.utils as well.
    chunk_size = submodule("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE
    function = submodule("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    # In the order of ChunkedLogProbFunction.forward, which takes no keyword arguments.
    bias = None
    targets = case.batch.targets.view(-1)
    temperature = 1.0
    vocab_chunk = min(chunk_size, case.cell.vocab)
    softcap = None
    scale = 1.0
    outputs = ("log_probs",)
    options = (bias, targets, temperature, vocab_chunk, softcap, scale, outputs)

    def logps(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs, *_ = function.apply(hidden, weight, *options)
        return log_probs

    return logps


@provider("TRL chunked divergence + mean", *BETAS)
def divergence(case: Case) -> Callable[[], Result]:
    """Return a call of TRL's chunked divergence.

    It runs six matmuls, or eight for the Jensen-Shannon divergence.
    """
    function = submodule("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    # In the order of ChunkedDivergenceFunction.forward, which takes no keyword arguments.
    bias = None
    teacher = (case.ref_hidden, case.ref_weight, None)
    beta = BETAS[case.cell.contract]

    def call() -> Result:
        divergences, *_ = function.apply(case.hidden, case.weight, bias, *teacher, beta)
        return case.gradients(divergences.mean())

    return call
