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
    """A stand-in for `datasets`: `from datasets import X` gives an empty class for any name X."""

    # importlib.util.find_spec("datasets") raises if the module has no spec.
    __spec__ = ModuleSpec("datasets", None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):  # special attributes such as __path__, which are no classes
            raise AttributeError(name)
        return type(name, (), {})


def import_submodule(name: str) -> ModuleType:
    """Import and return a module of TRL.

    If pyarrow is not installed, `import datasets` fails, and TRL's modules import it. They need
    none of its classes for what is measured, so a stand-in is then put into sys.modules.

    name   full name, such as "trl.trainer.utils"

    Raises Unavailable if the import fails.
    """
    if importlib.util.find_spec("pyarrow") is None:
        sys.modules.setdefault("datasets", _Datasets("datasets"))
    return peer(name, "trl")


@logps_provider("TRL kernel", "logits", "logits-forward", devices=("cuda",))
def kernel(case: Case) -> Logps:
    """Return a function of logits [N, V] that returns TRL's (log-probs [N], entropy [N])."""
    module = import_submodule("trl.kernels.logprob_entropy")
    log_probs_and_entropy = module.selective_log_softmax_and_entropy
    return lambda logits: log_probs_and_entropy(logits, case.batch.targets)


@logps_provider(
    "TRL fused head", "hidden", "hidden-frozen", *OF_SEQUENCES, "hidden-forward", "step"
)
def head(case: Case) -> Logps:
    """Return a function of (hidden [N, H], weight [V, H]) that returns TRL's log-probs [N].

    TRL's autograd function computes the logits of a chunk of ids at a time. The chunk is that of
    TRL's trainers.
    """
    # The backward imports trl.trainer.utils as well.
    chunk_size = import_submodule("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE
    function = import_submodule("trl.kernels.chunked_logprob").ChunkedLogProbFunction
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
        return function.apply(hidden, weight, *options)[0]  # the log-probs

    return logps


@provider("TRL chunked divergence + mean", *BETAS)
def divergence(case: Case) -> Callable[[], Result]:
    """Return a function that computes the mean divergence of a case, and its gradients, with TRL.

    TRL's function returns the divergence of each row. It runs six matmuls, or eight for the
    Jensen-Shannon divergence.
    """
    module = import_submodule("trl.kernels.chunked_divergence")
    function = module.ChunkedDivergenceFunction
    # In the order of ChunkedDivergenceFunction.forward, which takes no keyword arguments.
    bias = None
    teacher_bias = None
    teacher = (case.ref_hidden, case.ref_weight, teacher_bias)
    beta = BETAS[case.cell.contract]

    def call() -> Result:
        outputs = function.apply(case.hidden, case.weight, bias, *teacher, beta)
        divergence_of_rows = outputs[0]  # [N]
        return case.gradients(divergence_of_rows.mean())

    return call
