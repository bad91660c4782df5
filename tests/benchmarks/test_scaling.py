"""The scaling page: figures computed by hand, the bytes of the engine itself, and that the page is up to date."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import scaling, scaling_costs
from benchmarks.results import load
from benchmarks.roofline import Shape
from benchmarks.scaling_costs import MODELS, SCHEMES, cluster, megatron, vocabulary_parallel, weight_gathered
from grpo_kernels import Objective, TokenBatch, linear_grpo_loss
from grpo_kernels.distributed import VocabShard, global_normalizer
from grpo_kernels.vocabulary.blocks import CHUNK_BYTES
from grpo_kernels.vocabulary.hidden import Engine

H200 = cluster("h200")
N, H, V = 32768, 4096, 151936
QWEN = Shape(N, H, V)


def test_costs_of_our_scheme_by_hand() -> None:
    """TP 8: 18,992 columns in chunks of 2,048 rows; 16,384 rows have a gradient, so each kind of row is eight chunks, those with
    a gradient in blocks of two."""
    cost = vocabulary_parallel(QWEN, 8, 0.5)
    assert cost.held == 18992 * 4096 * (2 + 4) + 32768 * 4096 * 2 + 18992 * (2048 * 4 + 4096 * 2)
    assert cost.flops == 2 * 2 * 32768 * 4096 * 18992
    assert cost.wire == 32768 * 7 * 16 + 2 * (32768 * 4096 * 2) * 7 / 8
    assert cost.collectives == 8 + 8 + 1
    # fp32 logits written and read, read again where there is a gradient, the gradient written and read twice. d_weight: fp32
    # written, three times read and written, and rounded.
    assert cost.moved == 32768 * 18992 * (8 + 0.5 * (4 + 6)) + 18992 * 4096 * (4 + 3 * 8 + 4 + 2)
    wire = 473_432_064 / (0.75 * 450e9) + 17 * 6 * 5e-6
    assert cost.wire_seconds(H200, 8) == pytest.approx(wire)
    assert cost.seconds(H200, 8) == pytest.approx(cost.flops / 0.75 / 989e12 + cost.moved / 0.75 / 4.8e12 + wire)
    assert cost.seconds(H200, 8) == pytest.approx(18.63e-3, rel=1e-3)


def test_costs_of_the_other_schemes_by_hand() -> None:
    gathered = weight_gathered(QWEN, 8, 0.5)
    assert gathered.held == V * H * 6 + 4096 * H * 2 + V * (512 * 4 + 3072 * 2)
    assert gathered.wire == V * H * 6 * 7 / 8 and gathered.flops == 2 * 2 * 4096 * H * V
    kept = megatron(QWEN, 8, 0.5)
    assert kept.held == 18992 * H * 6 + N * H * 2 + N * 18992 * 6
    assert kept.wire == 2 * N * H * 2 * 7 / 8 + 3 * 2 * 4 * N * 7 / 8 and kept.flops == 3 * 2 * N * H * V / 8
    assert kept.moved == N * 18992 * (2 + 6 + 4 + 4 * 8 + 4 + 6 + 2 * 2)
    eager = scaling_costs.logits_gathered(QWEN, 8, 0.5)
    assert eager.held == 18992 * H * 6 + N * H * 2 + N * V * 12
    assert eager.wire == kept.wire - 3 * 2 * 4 * N * 7 / 8 + N * V * 2 * 7 / 8
    single = replace(QWEN, dtype="float32")
    assert megatron(single, 8, 0.5).held == 18992 * H * 8 + N * H * 4 + N * 18992 * 4
    assert megatron(single, 8, 0.5).moved == N * 18992 * (4 + 4 * 8 + 4 + 3 * 4)


def test_eager_holds_what_the_benchmark_measured() -> None:
    cells = [cell for path in scaling.PAGE.parent.glob("results/*/logits.json") for cell in load(path)["cells"]]
    peaks = [
        1e6 * row["extra_mb"] / (cell["rows"] * cell["vocab"])
        for cell in cells
        for row in cell["providers"]
        if row["name"] == "eager PyTorch" and row["status"] == "ok" and cell["rows"] >= 256
    ]
    assert peaks and peaks == pytest.approx([scaling_costs.EAGER_HELD] * len(peaks), rel=0.02)


def test_on_one_rank_nothing_is_sent_and_schemes_are_equal() -> None:
    costs = {name: scheme(QWEN, 1, 0.5) for name, scheme in SCHEMES.items()}
    assert all(cost.wire == cost.collectives == 0 for cost in costs.values())
    assert vocabulary_parallel(QWEN, 1, 0.5) == weight_gathered(QWEN, 1, 0.5)


@pytest.mark.parametrize("name", MODELS)
def test_more_ranks(name: str) -> None:
    """With more ranks, each holds and computes less and sends more, but never more than hidden states and partials in both
    passes."""
    model = MODELS[name]
    shape = Shape(N, model.hidden, model.vocab)
    for scheme in SCHEMES.values():
        costs = [scheme(shape, tp, 0.5) for tp in (1, 2, 4, 8)]
        for few, many in pairwise(costs):
            assert many.held < few.held and many.flops == few.flops / 2 and many.wire > few.wire
    costs = [vocabulary_parallel(shape, tp, 0.5) for tp in (1, 2, 4, 8)]
    assert all(cost.wire < N * (4 * model.hidden + 16 * 8) for cost in costs)
    times = [cost.seconds(H200, tp) for tp, cost in zip((1, 2, 4, 8), costs, strict=True)]
    assert times == sorted(times, reverse=True)
    assert times[0] / 8 < times[-1] < times[0] / 7
    by_share = [vocabulary_parallel(shape, 8, a).seconds(H200, 8) for a in (0.1, 0.5, 1.0)]
    assert by_share == sorted(by_share)


# ---- where lines cross


@pytest.mark.parametrize("hidden, tp", [(4096, 8), (7168, 2)])
def test_the_crossing_with_gathering_the_weight(hidden: int, tp: int) -> None:
    rows = int(scaling_costs.most_rows(hidden, V, tp, 2))
    assert 1.48 < rows / V < 1.5
    for n, fewer in ((rows - 8, True), (rows + 8, False)):
        shape = Shape(n, hidden, V)
        assert (vocabulary_parallel(shape, tp, 0.5).wire < weight_gathered(shape, tp, 0.5).wire) is fewer


def test_the_crossing_with_a_replicated_head() -> None:
    """At V* communication takes exactly the time of the saved products; at V it takes the share V* / V of that time."""
    for link in (H200.nvlink, H200.network):
        least = scaling_costs.least_vocabulary(H, 8, 0.5, 2, H200.flops, link)
        saved = 7 / 8 * 2 * QWEN.product / H200.flops
        assert vocabulary_parallel(QWEN, 8, 0.5).wire / link / saved == pytest.approx(least / V)
    assert scaling_costs.least_vocabulary(H, 8, 0.5, 2, 989e12, 450e9) == pytest.approx(2215, abs=1)


def test_the_least_rows_pay_for_their_latency() -> None:
    n = scaling_costs.least_rows(QWEN, 8, 0.5, H200)
    saved = n / N * 7 / 8 * 2 * QWEN.product / H200.flops
    assert saved == pytest.approx(n * (16 * 7 + 4 * H * 7 / 8) / H200.nvlink + 2 * 6 * 5e-6)


def test_links() -> None:
    """Inside a node the link is NVLink; between nodes, the network cards of the group's ranks in one node."""
    assert H200.link(8) == 0.75 * 450e9 and H200.link(2, stride=4) == 0.75 * 450e9
    assert H200.link(8, stride=8) == 0.75 * 50e9 and H200.link(64, stride=2) == 0.75 * 4 * 50e9
    assert H200.link(16) == 0.75 * 8 * 50e9
    assert cluster("b200").link(8) == 0.75 * 900e9
    assert (H200.steps(1), H200.steps(8), H200.steps(1024)) == pytest.approx((0, 30e-6, 100e-6))


def test_data_parallel_bytes() -> None:
    model = MODELS["70B"]
    assert scaling_costs.head_gradient(model, 8, 1, 2) == 0
    assert scaling_costs.head_gradient(model, 8, 64, 2) == 6 * 18992 * 8192 * 63 / 64
    sent = [scaling_costs.head_gradient(model, tp, 1024, 2) for tp in (1, 2, 4, 8)]
    assert sent == [sent[0] / tp for tp in (1, 2, 4, 8)]
    times = [x / H200.link(1024, tp) for x, tp in zip(sent, (1, 2, 4, 8), strict=True)]
    assert times == pytest.approx([times[-1]] * 4)  # fewer bytes over fewer cards


def test_shares() -> None:
    params, flops = scaling_costs.head_share(MODELS["7B"], 0.5)
    head = 4096 * 151936
    assert params == pytest.approx(head / 8.2e9)
    assert flops == pytest.approx(4 * head / (4 * head + 6 * (8.2e9 - 2 * head)))
    assert (
        scaling_costs.optimizer(2, 1) == 18
        and scaling_costs.optimizer(2, 8) == 6 + 12 / 8
        and scaling_costs.optimizer(4, 8) == 8 + 8 / 8
    )


# ---- the engine


def test_the_engine_sends_and_holds_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is one of two ranks, whose parts are equal: 75 rows with a gradient and 75 without, 64 per chunk."""
    sent: list[float] = []
    engines: list[Engine] = []

    def all_gather(out: torch.Tensor, x: torch.Tensor, group: Any = None) -> None:
        sent.append(x.numel() * x.element_size())  # to the one other rank
        out.copy_(x.expand_as(out))

    def all_reduce(x: torch.Tensor, group: Any = None) -> None:
        sent.append(2 * x.numel() * x.element_size() / 2)  # a ring of two

    for name, value in {
        "is_initialized": lambda: True,
        "get_world_size": lambda group=None: 2,
        "get_rank": lambda group=None: 0,
        "all_gather_into_tensor": all_gather,
        "all_gather_single": all_gather,
        "all_reduce": all_reduce,
    }.items():
        monkeypatch.setattr(dist, name, value, raising=name != "all_gather_single")  # new in torch 2.13
    original = Engine.whole_d_hidden
    monkeypatch.setattr(Engine, "whole_d_hidden", lambda engine: engines.append(engine) or original(engine))
    hidden_size, vocab = 24, 1000
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * vocab * 100)  # 100 rows of the whole vocabulary, in steps of 64
    shape = Shape(150, hidden_size, vocab, "bfloat16", "cpu")
    cost = vocabulary_parallel(shape, 2, 0.5)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 15, hidden_size, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(vocab // 2, hidden_size, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(vocab // 2, (10, 15), generator=generator)
    batch = TokenBatch(targets, torch.tensor([1.0, 0.0] * 5))
    linear_grpo_loss(hidden, weight, batch, Objective.preset("dapo"), normalizer=150, shard=VocabShard(0, vocab))
    assert len(sent) == cost.collectives == 5
    assert sum(sent) == cost.wire
    (engine,) = engines
    assert engine.chunk_rows == shape.plan(0.5, 2).chunk == 64
    assert engine.d_weight is not None and engine.d_hidden is not None
    # The model holds the sum of d_weight over chunks, in fp32; these rows are one chunk, which is rounded at once.
    assert engine.d_weight.dtype in (torch.bfloat16, torch.float32)
    gradients = engine.d_weight.numel() * 4 + engine.d_hidden.numel() * 2
    assert gradients + weight.numel() * 2 + 64 * (vocab // 2) * 4 == cost.held  # on a CPU the gradient is in the logits' memory

    sent.clear()
    global_normalizer(Objective.preset("dapo"), batch)
    assert sent == [24]  # three fp64, as the page says
    assert "24 bytes" in scaling.PAGE.read_text()


# ---- the page


def test_the_tables_are_current() -> None:
    text = scaling.PAGE.read_text()
    assert scaling.insert(text) == text, "run python -m benchmarks.scaling --write"


def test_the_text_has_the_constants_of_the_code() -> None:
    text = scaling.PAGE.read_text()
    assert "is an estimate" in text.split("##")[0]
    assert f"all-gather a chunk, {scaling_costs.PARTIALS} (TP - 1) bytes" in text
    single, half = (scaling_costs.megatron_held(replace(QWEN, dtype=x)) for x in ("float32", "bfloat16"))
    assert f"Megatron-LM {half} NV / TP bytes ({single} NV / TP\nin fp32), eager {scaling_costs.EAGER_HELD} NV" in text
    assert f"{CHUNK_BYTES['cuda'] >> 20} MiB of fp32 logits" in text
    assert f"{100 * 0.75:.0f} % of these rates" in text and f"takes {1e6 * H200.latency:.0f} us" in text


def table(name: str) -> dict[str, list[str]]:
    """{first cell: the others} of a generated table of the page."""
    block = scaling.PAGE.read_text().split(f"<!-- {name}:")[1].split(f"<!-- end of {name} -->")[0]
    lines = [[cell.strip() for cell in x.strip("|").split("|")] for x in block.splitlines() if x.startswith("|")]
    return {line[0]: line[1:] for line in lines}


def test_the_tables_have_these_figures() -> None:
    ours = "7B: vocabulary-parallel, fused (ours)"
    assert table("memory")[ours] == ["5.25", "2.91", "1.82", "1.05"]
    assert table("time")[ours][3:] == ["18.6 (1.91)", "14,448"]
    # The longest context: eager less our chunk and block, Megatron-LM less our part of larger ones.
    logits, own, part = 131072 * V, (512 * 4 + 3072 * 2) * V, (2048 * 4 + 4096 * 2) * V / 8
    longest = table("contexts")["131,072"]
    assert longest[:5] == ["16,384", "39.8", "239", "1.24", f"{(12 * logits - own) / 1e9:.0f}"]
    assert longest[5:8] == ["14.9", f"{part / 1e9:.3f}", f"{(6 * logits / 8 - part) / 1e9:.1f}"]
    head = vocabulary_parallel(QWEN, 8, 0.5).seconds(H200, 8) * 2  # 65,536 tokens a rank
    seconds = 6 * 18992 * H * 1023 / 1024 / (0.75 * 50e9) + 2 * 20 * 5e-6
    assert table("data_parallel")["1,024"][:2] == ["65,536", f"0.466, {1e3 * seconds:.1f}, {100 * seconds / head:.1f}"]
    cross = {name: cells[0] for name, cells in table("crossings").items()}
    assert cross["3: rows of a chunk"] == "2,048" and cross["3: rows of a block"] == "4,096"
    assert cross["2: N*"] == f"{V * 6 / (4 + 128 / H):,.0f}"
    waits = 16 * 30e-6 / vocabulary_parallel(QWEN, 8, 0.5).seconds(H200, 8)
    assert cross["1: latency of the exchanges, % of our time"] == f"{100 * waits:.2f}"
    assert table("interconnects")["H200 SXM"][:2] == ["2,215", f"{100 * 2215 / V:.2f}"]
    assert table("shares")["7B"][1] == f"{H * V / 1e9:.3f}"


def test_a_model_and_rates_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    scaling.main(["--hidden", "1000", "--vocab", "50000", "--params", "1e9", "--tokens", "1000", "--tp", "4", "--dp", "2"])
    text = capsys.readouterr().out
    assert "N = 1,000 rows" in text and "V = 50,000" in text and "7B" not in text and "H100" in text
    assert re.search(r"model +1,000 +0\.0500 +5\.00 ", text)
    # 16 * 3 + 2 * 2 * 1000 * 3 / 4 bytes a token
    assert re.search(r"vocabulary-parallel, fused \(ours\) .* 3,048$", text, re.MULTILINE)
    rates = ["--bandwidth", "2", "--flops", "500", "--nvlink", "100", "--network", "20", "--efficiency", "1"]
    scaling.main(["--model", "671B", *rates])
    text = capsys.readouterr().out
    assert "2 TB/s,\n500 TFLOP/s, 100 GB/s over NVLink" in text
    assert "7B:" not in text.replace("671B:", "") and "B200 " not in text
    assert f"{(2 + 64 / 7168) / 2 * 5000:,.0f}" in text  # V*


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--tp", "1"], "--tp 1"),
        (["--tokens", "0"], "--tokens: 0"),
        (["--dp", "8", "-1"], "--dp: -1"),
        (["--active", "1.5"], "--active: 1.5"),
        (["--hidden", "4096"], "--hidden and --params"),
        (["--model", "7B", "--hidden", "64", "--params", "1e9"], "--hidden and --params"),
        (["--dtype", "float32"], "--flops"),
    ],
)
def test_refusals(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.main(arguments)
    assert said in capsys.readouterr().err
