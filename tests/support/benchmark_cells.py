"""Tiny cells for tests of the benchmarks, and fixtures that such a file imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("transformers")  # of the step
pytest.importorskip("triton")

from benchmarks import measure as measuring
from benchmarks.cases import CONTRACTS, Cell, LogitsCase, policy_loss
from benchmarks.providers import Provider, providers

FP32, BF16 = torch.float32, torch.bfloat16
QUICKLY = {"seconds": 0.0, "least": 1, "counters": False, "memory": False}


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Switches the poisoning off: other projects may leave new tensors uninitialised."""


@pytest.fixture(autouse=True)
def nothing_compiles() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def tiny(contract: str, dtype: torch.dtype = FP32, active: float = 1.0) -> Cell:
    hidden = None if contract.startswith("logits") else 128
    return Cell(
        contract,
        32,
        512,
        dtype,
        hidden,
        active,
        layers=1 if contract == "step" else None,
        entropy=2.0 if contract == "sparse" else None,
    )


OURS = {contract: [p.name for p in providers(contract) if p.name.startswith("grpo_kernels")] for contract in CONTRACTS}


def by_name(cell: dict) -> dict[str, dict]:
    return {row["name"]: row for row in cell["providers"]}


def good(case: LogitsCase) -> Callable[[], dict]:
    def run() -> dict:
        logps = torch.log_softmax(case.logits.float(), -1).gather(1, case.batch.targets[:, None])[:, 0]
        return case.gradients(policy_loss(logps, case.batch, case.cell.beta))

    return run


def provider(name: str, change: Callable[[dict], dict]) -> Provider:
    return Provider(name, ("logits",), lambda case: measuring.Run(lambda: change(good(case)()), case.restore))
