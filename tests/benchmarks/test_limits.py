"""Limits and estimates by hand: the roofline, the costs of a head over many GPUs, the resource that limits a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from benchmarks import kernel_bounds, scaling_costs
from benchmarks.cases import CONTRACTS
from benchmarks.roofline import GPUS, SCHEMES, Shape, given
from benchmarks.sass import PIPES
from benchmarks.scaling_costs import cluster, vocabulary_parallel

QWEN = Shape(8192, 4096, 151936)
N, H, V = 32768, 4096, 151936
H200 = cluster("h200")


@pytest.mark.parametrize(
    ("gpu", "unit", "product"), [("h100", 0.743, 10.309), ("h200", 0.5187, 10.309), ("b200", 0.3112, 4.5314)]
)
def test_the_worked_table(gpu: str, unit: float, product: float) -> None:
    """U = 8192 * 151936 * 2 B = 2.49 GB; a product is 2 * 8192 * 4096 * 151936 = 10.2 Tflop."""
    rates = given(gpu, *GPUS[gpu][1:])
    for contract, short, active, expected in (
        ("logits-forward", "1U", 1.0, unit), ("logits", "2U", 1.0, 2 * unit), ("logits", "3U", 1.0, 3 * unit), (None, "4U", 0.2, 4 * unit),
        ("hidden-forward", "1", 0.5, product), ("hidden", "3", 0.5, 3 * product), ("hidden", "1+2a", 0.5, 2 * product),
        ("hidden", "1+3a", 0.2, 1.6 * product), ("hidden-frozen", "1+a", 1.0, 2 * product), ("hidden-frozen", "1+2a", 1.0, 3 * product),
    ):  # fmt: skip
        (scheme,) = (s for s in SCHEMES if (s.contract, s.short) == (contract, short))
        assert rates.ms(scheme, QWEN, active) == pytest.approx(expected, rel=1e-3), (contract, short, active)
    hidden = next(s for s in SCHEMES if s.contract == "hidden")  # a data sheet's 16-bit rate says nothing about fp32 products
    assert rates.ms(hidden, Shape(64, 64, 64, "float32"), 1.0) is None
    assert {scheme.contract for scheme in SCHEMES} - {None} < set(CONTRACTS)


def test_costs_of_a_vocabulary_over_eight_ranks() -> None:
    """18,992 columns in chunks of 2,048 rows; half of the rows have a gradient. Estimates are compared with what is sent by
    gathering the weight."""
    shape = Shape(N, H, V)
    cost = vocabulary_parallel(shape, 8, 0.5)
    assert cost.held == 18992 * H * (2 + 4) + N * H * 2 + 18992 * (2048 * 4 + 4096 * 2) and cost.flops == 2 * 2 * N * H * 18992
    assert cost.wire == N * 7 * 16 + 2 * (N * H * 2) * 7 / 8 and cost.collectives == 8 + 8 + 1
    assert cost.moved == N * 18992 * (8 + 0.5 * (4 + 6)) + 18992 * H * (4 + 3 * 8 + 4 + 2)
    assert cost.seconds(H200, 8) == pytest.approx(18.63e-3, rel=1e-3)
    assert (H200.link(8), H200.link(8, stride=8), H200.link(64, stride=2)) == (0.75 * 450e9, 0.75 * 50e9, 0.75 * 4 * 50e9)
    rows = int(scaling_costs.most_rows(H, V, 8, 2))
    for n, fewer in ((rows - 8, True), (rows + 8, False)):
        gathered = scaling_costs.weight_gathered(replace(shape, rows=n), 8, 0.5)
        assert (vocabulary_parallel(replace(shape, rows=n), 8, 0.5).wire < gathered.wire) is fewer
    for scheme in scaling_costs.SCHEMES.values():
        few, many = scheme(shape, 4, 0.5), scheme(shape, 8, 0.5)
        assert many.held < few.held and many.flops == few.flops / 2 and many.wire > few.wire and scheme(shape, 1, 0.5).wire == 0


def test_the_resource_that_limits_a_kernel() -> None:
    """1000 rows of 1000 logits; a chip of 10 multiprocessors at 1 GHz, 1 TB/s. AMD's scalar unit works beside."""
    chip = kernel_bounds.Chip("a chip", "sm_90", 10, 1.0, 1.0, fp32=64)
    issued = [{"special": 1, "fp32": 2, "memory": 0.5, "other": 2.5, "scalar": 9}, {"special": 3, "fp32": 4, "other": 3}]
    visits = [{"kernel": "k", "issued": dict.fromkeys(PIPES, 0.0) | one} for one in issued]
    expected = {"issue": 16 / 128, "special": 4 / 16, "fp32": 6 / 64, "memory": 6 / 0.85e2}
    found = kernel_bounds.bounds({"bytes": 6, "visits": visits}, chip, 1000, 1000)
    assert found == pytest.approx({name: 0.1 * x for name, x in expected.items()})
