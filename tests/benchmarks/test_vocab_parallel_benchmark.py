"""The measured cost of cutting the vocabulary: a small run, its contenders, its accuracy check, and that the page is up to date."""

from __future__ import annotations

import pytest
import torch

from benchmarks import results, vocab_parallel
from benchmarks.cases import Cell, HiddenCase, make_case, reference
from benchmarks.vocab_parallel import CALLS, FILE, PAGE, RANKS, Effort, as_whole, check, columns
from grpo_kernels.vocabulary import backends

needs_kernels = pytest.mark.skipif(backends.unavailable("cpu") is not None, reason="the C++ kernels do not run here")


@needs_kernels
def test_a_small_run() -> None:
    effort = Effort(rows=32, hidden=24, vocab=602, exchanges=(5, 64), runs=2)
    record = vocab_parallel.measure(effort)
    assert record["machine"]["threads"] == 1
    assert [(x["call"], x["dtype"]) for x in record["calls"]] == [(x, d) for x in CALLS for d in ("float32", "bfloat16")]
    for call in record["calls"]:
        gradients = {"loss", "d_hidden", "d_weight"} if call["call"] == "linear_grpo_loss" else {"loss", "d_logits"}
        assert {name.split(",")[0] for name in call["errors"]} == gradients
        assert 0 < max(call["errors"].values()) < (1e-4 if call["dtype"] == "float32" else 3e-2)
        assert all(x["runs"] == 2 and x["ms"] > 0 for x in call["times"].values())
    assert [(x["rows"], x["bytes"]) for x in record["exchanges"]] == [(5, 80), (64, 1024)]
    assert vocab_parallel.block(record).count("\n| ") == 2 + 6 + 2 + 2


@needs_kernels
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_without_exchange_has_a_comparable_task(name: str) -> None:
    """The rank's targets are among its columns and its ratios are those of the whole vocabulary, so that both clip equally
    often."""
    contract, call = CALLS[name]
    whole = make_case(Cell(contract, 32, 602, torch.float32, 24 if contract == "hidden" else None), "cpu")
    logps, _ = call(whole, None)
    if not isinstance(whole, HiddenCase):
        whole.restore()  # type: ignore[union-attr]
    own = columns(whole, slice(301, 602))
    alone = as_whole(own, logps, call)
    if not isinstance(whole, HiddenCase):
        own.restore()
    assert 0 <= alone.batch.targets.min() and alone.batch.targets.max() < 301
    now, _ = call(alone, None)
    assert not torch.allclose(now, logps, atol=0.1)
    torch.testing.assert_close(now - alone.batch.old_logps, logps - whole.batch.old_logps, rtol=1e-5, atol=1e-5)
    if whole.batch.ref_logps is not None:
        torch.testing.assert_close(now - alone.batch.ref_logps, logps - whole.batch.ref_logps, rtol=1e-5, atol=1e-5)


def test_a_contender_with_wrong_results_is_not_timed() -> None:
    case = make_case(Cell("logits", 32, 602, torch.float32), "cpu")
    expected = reference(case)
    assert max(check(case, expected, expected).values()) == 0
    with pytest.raises(ValueError, match=r"d_logits is off by .*not timed"):
        check(case, expected | {"d_logits": 1.001 * expected["d_logits"]}, expected)


def test_the_page_is_current() -> None:
    text = PAGE.read_text()
    assert vocab_parallel.insert(text, results.load(FILE)) == text, f"run `{vocab_parallel.COMMAND}`"


def test_the_figures_are_those_of_a_full_run() -> None:
    record, effort = results.load(FILE), Effort()
    assert {(x["rows"], x["vocab"], x["times"]["shard"]["runs"]) for x in record["calls"]} == {(256, 151936, effort.runs)}
    assert tuple(x["rows"] for x in record["exchanges"]) == effort.exchanges
    for call in record["calls"]:  # half of the columns, half of what is held for them
        held = call["extra_mb"]["shard"], call["extra_mb"]["whole head"]
        assert held[0] < 0.6 * held[1] or held[1] < 5
    shard = record["calls"][0]
    assert f"| {shard['times']['shard']['ms'] / shard['times']['no exchange']['ms']:.2f} |" in PAGE.read_text()
    assert ("other programs ran" in PAGE.read_text()) is (record["load"] > 0.5)
    assert RANKS == 2 and "not measured" not in PAGE.read_text().split("## Measured")[1]
