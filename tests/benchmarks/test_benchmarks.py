"""The benchmarks are sound: wrong results are rejected, no contender is missing without a reason, figures follow from times.
Shapes are tiny, and torch.compile runs in eager mode."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed

pytest.importorskip("transformers")  # of the step
pytest.importorskip("triton")

from benchmarks import harness, machine, results, suites
from benchmarks import measure as measuring
from benchmarks.cases import CLIP, CONTRACTS, Cell, HiddenCase, LogitsCase, StepCase, loss_of, policy_loss
from benchmarks.errors import errors
from benchmarks.inputs import make_case, reference
from benchmarks.measure import derived, measure, outside_gate
from benchmarks.printing import table
from benchmarks.providers import Provider, Unavailable, limits, peer, providers
from grpo_kernels import TokenBatch
from grpo_kernels.vocabulary import backends, blocks, memory
from support.benchmark_cells import BF16, FP32, OURS, QUICKLY, by_name, good, nothing_compiles, poisoned_memory, provider, tiny  # noqa: F401 - fixtures

Tensor = torch.Tensor

# ---- the accuracy check


def raising(failure: Exception) -> Callable[[dict], dict]:
    def change(found: dict) -> dict:
        raise failure

    return change


WRONG = {
    "gradient": lambda found: found | {"d_logits": 1.01 * found["d_logits"]},
    "loss": lambda found: found | {"loss": found["loss"] + 0.001},
    "NaN": lambda found: found | {"d_logits": math.nan * found["d_logits"]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_provider_with_wrong_results_shows_its_error_and_is_not_timed(name: str) -> None:
    candidates = [provider("wrong", WRONG[name]), provider("right", lambda found: found)]
    rows = by_name(measure(tiny("logits"), "cpu", candidates=candidates, **QUICKLY))
    assert rows["right"]["status"] == "ok" and rows["right"]["ms"] > 0
    assert rows["wrong"]["status"] == "wrong" and "off by" in rows["wrong"]["reason"]
    assert "ms" not in rows["wrong"] and set(rows["wrong"]["errors"]) == {"loss", "d_logits", "d_logits, worst row"}


def unclipped(logps: torch.Tensor, case: LogitsCase) -> torch.Tensor:
    ratio, d = torch.exp(logps - case.batch.old_logps), case.batch.ref_logps - logps
    return (-ratio * case.batch.advantages + case.cell.beta * (d.exp() - d - 1)).mean()


def without_kl(logps: torch.Tensor, case: LogitsCase) -> torch.Tensor:
    return policy_loss(logps, case.batch, 0.0)


def estimator_of_kl(logps: torch.Tensor, case: LogitsCase) -> torch.Tensor:
    """k1 for k3."""
    return policy_loss(logps, case.batch, 0.0) + case.cell.beta * (logps - case.batch.ref_logps).mean()


def slightly_off(logps: torch.Tensor, case: LogitsCase) -> torch.Tensor:
    return policy_loss(logps, case.batch, case.cell.beta) + 0.013


@pytest.mark.parametrize("loss", [unclipped, without_kl, estimator_of_kl, slightly_off])
def test_a_wrong_formula_is_wrong_even_in_16_bits(loss: Callable) -> None:
    def make(case: LogitsCase) -> measuring.Run:
        def run() -> dict:
            logps = torch.log_softmax(case.logits.float(), -1).gather(1, case.batch.targets[:, None])[:, 0]
            return case.gradients(loss(logps, case))

        return measuring.Run(run)

    wide = Cell("logits", 512, 512, BF16)
    cell = measure(wide, "cpu", candidates=[Provider("wrong", ("logits",), make)], **QUICKLY)
    assert by_name(cell)["wrong"]["status"] == "wrong"


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan], ids=["zero", "sign", "NaN"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_one_wrong_row_of_many_is_wrong(dtype: torch.dtype, factor: float) -> None:
    """In 8192 rows of 16 bits, four rows without a gradient would change the norm by half of the rounding limit only."""

    def change(found: dict) -> dict:
        row = int(found["d_logits"].float().norm(dim=1).sort().indices[len(found["d_logits"]) // 2])  # as large as usual
        found["d_logits"][row] *= factor
        return found

    cell = measure(Cell("logits", 4096, 64, dtype), "cpu", candidates=[provider("wrong", change)], **QUICKLY)
    row = by_name(cell)["wrong"]
    assert row["status"] == "wrong" and not row["errors"]["d_logits, worst row"] < 0.9


@pytest.mark.parametrize(("dtype", "off", "right"), [(FP32, 2e-4, 5e-5), (BF16, 0.2, 0.1)], ids=["fp32", "bf16"])
def test_one_wrong_log_prob_is_wrong(dtype: torch.dtype, off: float, right: float) -> None:
    def shifted(by: float) -> Callable[[LogitsCase], measuring.Run]:
        def make(case: LogitsCase) -> measuring.Run:
            found = {name: x.clone() for name, x in reference(case).items()}
            found["logps"][3] += by
            return measuring.Run(lambda: found)

        return make

    candidates = [Provider(name, ("logits-forward",), shifted(by)) for name, by in (("wrong", off), ("right", right))]
    rows = by_name(measure(tiny("logits-forward", dtype), "cpu", candidates=candidates, **QUICKLY))
    assert rows["wrong"]["status"] == "wrong" and rows["right"]["status"] == "ok"


def test_one_wrong_parameter_of_a_model_is_wrong() -> None:
    right = {"loss": torch.ones(()), "gradients": [torch.ones(1000), torch.full((3,), 1e-6)]}
    wrong = {"loss": torch.ones(()), "gradients": [torch.ones(1000), torch.zeros(3)]}
    assert errors(wrong, right)["gradients"] == 1.0 and errors(right, right)["gradients"] == 0.0
    assert outside_gate(tiny("step", BF16), errors(wrong, right)) is not None


def test_eager_is_not_measured_in_place_of_missing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda name: None if name == "eager" else "no compiler here")
    for contract in CONTRACTS:
        rows = by_name(measure(tiny(contract), "cpu", only=("nobody", *OURS[contract]), **QUICKLY))
        for name in OURS[contract]:
            assert rows[name]["status"] == ("ok" if "eager backend" in name else "skipped"), rows[name]
            assert "eager backend" in name or "no compiler here" in rows[name]["reason"]
    assert machine.machine("cpu")["backend"] == "eager (no compiler here)"


def test_a_limit_of_parts_is_the_sum_of_the_fastest_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def look() -> float:
        clock[0] += 1e-3
        return clock[0]

    monkeypatch.setattr(harness, "time", types.SimpleNamespace(perf_counter=look))
    pause = {"a, slow": 0.03, "a, fast": 0.01, "b, only": 0.02}

    def way(name: str, change: Callable[[], Any] = lambda: None) -> Provider:
        def run() -> None:
            clock[0] += pause.get(name, 0)
            change()

        part = name.partition(",")[0]
        return Provider(name, ("logits",), lambda case: measuring.Run(run), limit=True, part=part)

    def fail() -> None:
        raise RuntimeError("no such instruction")

    candidates = [provider("right", lambda found: found), *map(way, pause), way("b, broken", fail)]
    cell = measure(tiny("logits"), "cpu", candidates=candidates, **QUICKLY)
    rows = by_name(cell)
    assert set(rows) == {"right", "products"} and cell["limit"] == {"name": "products", "ms": rows["products"]["ms"]}
    found = rows["products"]
    assert found["of"] == ["a, fast", "b, only"] and found["ms"] == found["ways"]["a, fast"] + found["ways"]["b, only"]
    assert found["ways"]["a, slow"] > found["ways"]["a, fast"] and "no such instruction" in found["ways"]["b, broken"]
    assert "a " in table(cell) and "by fast (slow" in table(cell)
    alone = by_name(measure(tiny("logits"), "cpu", candidates=[candidates[0], candidates[-1]], **QUICKLY))
    assert alone["products"]["status"] == "failed" and alone["right"]["x_limit"] is None


def test_a_provider_of_another_contract_is_timed_and_not_checked() -> None:
    beside = replace(provider("beside", WRONG["loss"]), beside=True)
    rows = by_name(measure(tiny("logits"), "cpu", candidates=[beside, provider("wrong", WRONG["loss"])], **QUICKLY))
    assert rows["beside"]["ms"] > 0 and "errors" not in rows["beside"] and rows["wrong"]["status"] == "wrong"


def test_contenders_that_raise_are_reported_with_the_reason() -> None:
    candidates = [
        provider("raises", raising(KeyError("no such thing"))),
        provider("absent", raising(Unavailable("not installed: pip install it"))),
        provider("incomplete", lambda found: {"loss": found["loss"]}),
        Provider("elsewhere", ("logits",), good, devices=("cuda",)),
        Provider("narrow", ("logits",), good, dtypes=(BF16,)),
        Provider("huge", ("logits",), good, memory=lambda cell: 1e15),
        provider("known", lambda found: found),
    ]
    cell = measure(tiny("logits"), "cpu", candidates=candidates, known={"known": "broke CUDA"}, **QUICKLY)
    found = {name: (row["status"], row["reason"]) for name, row in by_name(cell).items()}
    assert found["raises"] == ("failed", "KeyError: 'no such thing'")
    assert found["absent"] == ("skipped", "not installed: pip install it")
    assert found["incomplete"][0] == "failed" and "d_logits" in found["incomplete"][1]
    assert found["elsewhere"] == ("skipped", "runs on cuda only")
    assert found["narrow"] == ("skipped", "does not take float32")
    assert found["huge"][0] == "skipped" and "would need 1000000 GB" in found["huge"][1]
    assert found["known"] == ("failed", "broke CUDA")
    text = table(cell)
    assert all(name in text for name in found) and "not installed" in text


def test_a_missing_package_is_a_reason_and_not_an_error() -> None:
    with pytest.raises(Unavailable, match="pip install some-package"):
        peer("no_such_package.kernels", "some-package")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_provider_that_runs_here_is_right(contract: str, dtype: torch.dtype) -> None:
    cell = measure(tiny(contract, dtype, active=0.5), "cpu", **QUICKLY)
    assert any(row["name"].startswith("grpo_kernels") for row in cell["providers"])
    for row in cell["providers"]:
        assert row["status"] in ("ok", "skipped"), row
        assert row["status"] == "ok" or row["reason"]
        assert (
            row["status"] == "ok"
            or not row["name"].startswith(("grpo_kernels", "eager PyTorch", "torch.compile"))
            or ("16-bit" in row["name"] and dtype == FP32)
        )
    if contract != "step":
        assert cell["limit"]["ms"] == min(row["ms"] for row in cell["providers"] if row.get("limit"))


@pytest.mark.parametrize("contract", ["hidden", "divergence"])
def test_limits_hold_no_memory_that_the_engine_beside_them_uses(monkeypatch: pytest.MonkeyPatch, contract: str) -> None:
    """Of large blocks a few are kept: a limit that holds one between runs would make the engine fault in new pages."""
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 10)
    memory.release()
    made = [
        p.make(make_case(tiny(contract, dtype=BF16), "cpu")) for p in providers(contract) if p.limit and p.name.endswith("ours")
    ]
    for run in made:
        if run.restore is not None:
            run.restore()
        run.call()
    assert len(memory._kept) > 0 and not [block for block in memory._kept if block.lease() is not None]


@pytest.fixture
def chunks_of_8_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks.CHUNK_BYTES, "cpu", 1)
    monkeypatch.setitem(blocks.CHUNK_ROWS, "cpu", 8)


@pytest.mark.parametrize("part", ["d_hidden", "d_weight"])
@pytest.mark.usefixtures("chunks_of_8_rows")
def test_limits_free_the_gradient_of_the_logits_after_the_timed_run(part: str) -> None:
    """Freeing a tensor of that size takes a seventh of a product of few columns: a limit that counts it is no limit."""
    made = [p.make(make_case(tiny("hidden"), "cpu")) for p in providers("hidden") if p.part == part]
    assert len(made) == 4
    for run in made:
        assert run.restore is not None
        run.restore()
        operand = weakref.ref(run.call.held[0])  # type: ignore[attr-defined]
        result = run.call()
        assert operand() is not None
        del result
        assert operand() is None


@pytest.mark.usefixtures("chunks_of_8_rows")
def test_the_limit_in_chunks_makes_every_product() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(21, 8), torch.randn(50, 8)
    way = limits._OursInChunks(weight, hidden)
    d_logits = way.gradient()
    assert [chunk.shape[0] for chunk in way.chunks] == [7, 7, 7]
    torch.testing.assert_close(d_logits, hidden[:7] @ weight.t())
    torch.testing.assert_close(way.logits(), hidden[14:] @ weight.t())
    torch.testing.assert_close(way.d_hidden(d_logits), (d_logits @ weight).repeat(3, 1))
    torch.testing.assert_close(way.d_weight(d_logits), d_logits.repeat(3, 1).t() @ hidden)


def test_few_rows_are_no_chunks() -> None:
    with pytest.raises(Unavailable, match="all rows at once"):
        limits._OursInChunks(torch.randn(50, 8), torch.randn(21, 8))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_plans_name_providers_that_exist(contract: str) -> None:
    names = {p.name for p in providers(contract)}
    assert len(names) == len(providers(contract))
    for suite in suites.SUITES.values():
        for device in ("cpu", "cuda"):
            full, quick = suite.plan(device, False), suite.plan(device, True)
            assert 0 < len(quick) <= len(full)
            for cell, only in full + quick:
                assert cell.contract == suite.contract
                if cell.contract == contract and only is not None:
                    assert any(name in names and name.startswith("grpo_kernels") for name in only)


@pytest.mark.parametrize(
    ("code", "option", "policy"),
    [
        ("import benchmarks", "--quick", "PASSIVE"),
        ("import benchmarks", "--busy", "None"),
        ("import examples.demo", "", "None"),
    ],
)
def test_openmp_waits_asleep_in_measurements_only(code: str, option: str, policy: str) -> None:
    """Beside a busy process the environment is a user's, as it is in the demo, which imports helpers of the benchmarks."""
    code += "; import os; print(os.environ.get('OMP_WAIT_POLICY'))"
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    assert subprocess.check_output([sys.executable, "-c", code, option], env=env, cwd=results.ROOT, text=True).strip() == policy


def stands_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """A module of a project that is not installed here."""
    names = module.split(".")
    for i in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:i]), types.ModuleType(".".join(names[:i])))
    vars(sys.modules[module]).update(functions)


def fast_llm(
    logits: Tensor, target: Tensor, advantages: Tensor, old_log_probabilities: Tensor, grad_logits: Tensor | None = None,
    grad_output: float | None = None, group: Any = None, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
    logits_scale_factor: float = 1.0, num_labels_in_seq: Tensor | None = None, divisor: float | None = None,
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """What triton_grpo_loss_forward_backward of Fast-LLM 0.4.0 (7d61a1b) says that it computes, with its parameters."""
    assert grad_output is not None and divisor is not None
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        ratio = torch.exp(leaf.float().log_softmax(-1).gather(1, target[:, None])[:, 0] - old_log_probabilities)
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).sum() / divisor
        (gradient,) = torch.autograd.grad(loss, leaf, torch.tensor(grad_output))
    return loss.detach(), gradient, None


class Megatron(torch.autograd.Function):
    """Overwrites fp32 logits [sequence, batch, V] in the forward, as megatron-core 0.16.1 does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        assert (group.rank(), group.size()) == (0, 1)
        torch.distributed.all_reduce(torch.zeros(1), group=group)
        own = logits.float()
        own -= own.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(own, target)
        return -own.gather(-1, target[..., None])[..., 0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        logp, target = ctx.saved_tensors
        p = logp.exp()
        p.scatter_add_(-1, target[..., None], torch.full_like(target[..., None], -1, dtype=p.dtype))
        return p * upstream[..., None], None, None


@pytest.mark.parametrize("name, cell", [
    ("Fast-LLM kernel + products", Cell("hidden", 32, 61, FP32, 8)),
    ("Fast-LLM kernel + products", Cell("hidden-frozen", 32, 61, BF16, 8)),
    ("miles log-probs (Megatron, torch.compile) + loss", Cell("logits", 32, 61, FP32)),
    ("miles log-probs (Megatron, torch.compile) + loss", Cell("logits", 32, 61, BF16)),
])  # fmt: skip
def test_contenders_that_are_not_installed_are_called_rightly(name: str, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, "fast_llm.functional.triton.grpo_loss", triton_grpo_loss_forward_backward=fast_llm)
    stands_in(monkeypatch, "megatron.core.fusions.fused_cross_entropy", fused_vocab_parallel_cross_entropy=Megatron.apply)
    (one,) = (replace(p, devices=("cpu",)) for p in providers(cell.contract) if p.name == name)
    (row,) = measure(cell, "cpu", candidates=[one], seconds=0.01, least=1, most=2, counters=False, memory=False)["providers"]
    assert row["status"] == "ok", row


# ---- inputs and the reference results


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("contract", ["logits", "hidden"])
def test_old_log_probs_keep_away_from_the_clip_bounds(contract: str, dtype: torch.dtype) -> None:
    cell = Cell(contract, 1024, 512, dtype, None if contract == "logits" else 64)
    case = make_case(cell, "cpu")
    logits = (case.logits if isinstance(case, LogitsCase) else case.hidden.double() @ case.weight.double().t()).detach()
    now = logits.double().log_softmax(-1).gather(1, case.batch.targets[:, None])[:, 0]
    log_ratio = now - case.batch.old_logps
    for bound in (math.log(1 - CLIP[0]), math.log(1 + CLIP[1])):
        assert (log_ratio - bound).abs().min() > 0.05
    inside = log_ratio.abs() < 0.15
    for kind in (inside, ~inside & (log_ratio > 0), ~inside & (log_ratio < 0)):
        assert kind.float().mean() > 0.15


@pytest.mark.parametrize("active", [1.0, 0.5, 0.125])
def test_one_advantage_per_sequence_and_the_share_that_was_asked_for(active: float) -> None:
    case = make_case(tiny("hidden", active=active), "cpu")
    advantages = case.batch.advantages.view(16, 2)
    assert (advantages == advantages[:, :1]).all()
    assert int((advantages[:, 0] != 0).sum()) == 16 * active
    assert int((case.batch.advantages != 0).sum()) == case.cell.active_rows


@pytest.mark.parametrize("contract", ["logits", "logits-forward", "hidden", "hidden-frozen", "hidden-forward", "cross-entropy"])
def test_the_reference_is_what_autograd_says_in_float64(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tiny(contract, active=0.5), "cpu")
    monkeypatch.setattr("benchmarks.cases.row_blocks", lambda cell, size, device: (slice(lo, lo + 8) for lo in range(0, 32, 8)))
    found = reference(case)
    if isinstance(case, LogitsCase):
        logits = z = case.pristine.double().requires_grad_()
        leaves = {"d_logits": logits}
    else:
        assert isinstance(case, HiddenCase)
        hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
        z = hidden @ weight.t()
        leaves = {"d_hidden": hidden} | ({} if contract == "hidden-frozen" else {"d_weight": weight})
    log_p = z.log_softmax(-1)
    logps = log_p.gather(1, case.batch.targets[:, None])[:, 0]
    if contract.endswith("forward"):
        expected = {"logps": logps} | ({"entropy": -(log_p.exp() * log_p).sum(-1)} if isinstance(case, LogitsCase) else {})
    else:
        loss = loss_of(case.cell, logps, case.batch)
        if contract == "cross-entropy":
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(z, case.batch.targets), rtol=1e-12, atol=0)
        expected = {"loss": loss, **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))}
    assert max(errors(found, {name: x.detach() for name, x in expected.items()}).values()) < 1e-6


def test_a_case_may_be_one_sequence() -> None:
    cell = Cell("hidden", 48, 512, FP32, 32, sequences=1)
    case = make_case(cell, "cpu")
    assert cell.length == 48 and (case.batch.advantages == case.batch.advantages[0]).all()
    rows = by_name(measure(cell, "cpu", only=("grpo_kernels", "Liger fused linear GRPO", "eager PyTorch"), **QUICKLY))
    assert {"ok"} == {row["status"] for row in rows.values()} - {"skipped"}
    for device in ("cpu", "cuda"):
        assert any(planned.cell.length >= 65536 for planned in suites.SUITES["length"].plan(device, False))


@pytest.mark.parametrize(("contract", "name"), [("logits", "grpo_kernels, in place"), ("hidden", "grpo_kernels")])
def test_the_batch_is_made_in_the_run(monkeypatch: pytest.MonkeyPatch, contract: str, name: str) -> None:
    """Checking a batch and, on a GPU, counting its rows are part of the cost of a step."""
    run = next(p for p in providers(contract) if p.name == name).make(make_case(tiny(contract), "cpu"))
    made: list[TokenBatch] = []
    monkeypatch.setattr(TokenBatch, "__post_init__", lambda batch: made.append(batch))
    for count in (1, 2):
        run.call()
        assert len(made) == count


def test_a_training_step_leaves_its_parameters_alone() -> None:
    case = make_case(tiny("step"), "cpu")
    assert isinstance(case, StepCase)
    before = [p.detach().clone() for p in case.model.parameters()]
    run = next(p for p in providers("step") if p.name == "eager PyTorch").make(case)
    first, second = float(run.call()["loss"]), float(run.call()["loss"])
    assert first == second
    assert all(torch.equal(p, q) for p, q in zip(before, case.model.parameters(), strict=True))


def test_cells_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        Cell("logits", 20, 512, FP32)
    with pytest.raises(ValueError, match="multiple"):
        Cell("logits", 20, 512, FP32, sequences=3)
    with pytest.raises(ValueError, match="contract"):
        Cell("loss", 32, 512, FP32)
    with pytest.raises(ValueError, match="hidden"):
        Cell("hidden", 32, 512, FP32)


# ---- figures


def test_two_kinds_of_runs_are_told_from_one_that_is_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = [14.8, 15.0, 15.6, 15.2], [39.0, 38.0, 40.5, 39.2, 38.6, 39.9]
    assert harness.modes([39.0, *fast, *slow[1:]]) == [[15.1, 0.4], [39.1, 0.6]]
    assert harness.modes(fast) == [] and harness.modes([7.0]) == [] and harness.modes([]) == []
    assert harness.modes([*fast, *slow[:1]]) == []  # one slow run of many is an outlier
    assert harness.modes([10.0, 11.0, 12.5, 14.0, 16.0, 18.0, 20.0, 23.0]) == []
    measured = itertools.cycle([15.0, 39.0])
    monkeypatch.setattr(harness, "timed", lambda run, device: (None, next(measured), 1.0))
    found = harness.interleaved({"two": lambda: None}, "cpu", seconds=0.1, least=6)["two"]
    assert found["modes"] == [[15.0, 0.5], [39.0, 0.5]] and found["ms"] == 27.0


def test_rates_follow_from_times() -> None:
    logits = Cell("logits", 1000 * 16, 1000, BF16)  # 32 MB
    assert derived(logits, 2.0) == pytest.approx({"gbps_2u": 32.0, "gbps_3u": 48.0})
    assert derived(Cell("logits-forward", 16000, 1000, FP32), 4.0) == pytest.approx({"gbps_1u": 16.0})
    size = {"rows": 1600, "vocab": 1000, "dtype": BF16, "hidden": 125}  # NHV = 2e8
    for contract, active, tflops, convention in (
        ("hidden", 1.0, 1.2, "6NHV"),
        ("hidden", 0.5, 0.8, "(2+4a)NHV, a=0.5"),
        ("hidden-frozen", 1.0, 0.8, "4NHV"),
        ("hidden-frozen", 0.25, 0.5, "(2+2a)NHV, a=0.25"),
        ("hidden-forward", 0.5, 0.4, "2NHV"),
    ):
        found = derived(Cell(contract, active=active, **size), 1.0)
        assert found["tflops"] == pytest.approx(tflops) and found["flop_convention"] == convention
    dense = [derived(Cell("hidden", active=a, **size), 1.0).get("tflops_dense") for a in (0.5, 1.0)]
    assert dense == [pytest.approx(1.2), None]


def test_the_gate_is_tighter_in_32_bits() -> None:
    assert outside_gate(tiny("logits"), {"loss": 9e-5, "d_logits": 9e-5}) is None
    assert outside_gate(tiny("logits"), {"loss": 0.0, "d_logits": 2e-4}) is not None
    assert outside_gate(tiny("logits", BF16), {"loss": 9e-3, "d_logits": 2e-2, "d_logits, worst row": 0.2}) is None
    assert outside_gate(tiny("logits", BF16), {"d_logits, worst row": 0.4}) is not None
    assert outside_gate(tiny("logits"), {"d_logits, worst row": 2e-3}) is not None
    assert outside_gate(tiny("logits", BF16), {"loss": 0.0, "d_logits": 4e-2}) is not None


def test_the_ratio_to_the_limit_and_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"right": 6.0, "copy": 2.0, "in-place pass": 1.5}
    rest = {"p20": 1, "p80": 9, "runs": 5, "host_ms": 0.314}
    monkeypatch.setattr(measuring, "interleaved", lambda runs, *_, **__: {n: {"ms": times[n], **rest} for n in runs})
    candidates = [provider("right", lambda found: found), *(p for p in providers("logits") if p.limit)]
    cell = measure(tiny("logits"), "cpu", candidates=candidates, **QUICKLY)
    rows = by_name(cell)
    assert cell["limit"] == {"name": "in-place pass", "ms": 1.5}  # the fastest
    assert rows["right"]["x_limit"] == 4.0 and rows["in-place pass"]["x_limit"] == 1.0 and rows["copy"]["limit"] is True
    assert rows["right"]["x_copy"] == 3.0 and rows["copy"]["x_copy"] == 1.0
    assert rows["right"]["gbps_2u"] == pytest.approx(2 * 32 * 512 * 4 / 6e-3 / 1e9)
    assert "25" in table(cell)  # percent of the limit
    assert "host ms" in table(cell) and "0.31" in table(cell)


# ---- the harness


def test_every_round_starts_with_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(harness, "timed", lambda run, device: (run(), 1000.0, 1.0))
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    found = harness.interleaved(runs, "cpu", lambda name: order.append(name.upper()), seconds=0.0, least=3)
    assert "".join(order) == "AaBbCc" + "BbCcAa" + "CcAaBb" + "AaBbCc"  # a warm-up, then three rounds
    assert found["a"] == {"ms": 1000.0, "p20": 1000.0, "p80": 1000.0, "runs": 3}


def test_slow_contenders_do_not_limit_the_runs_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"slow": 500.0, "fast": 100.0}
    monkeypatch.setattr(harness, "timed", lambda run, device: (None, cost[run()], 1.0))
    runs = {name: lambda name=name: name for name in cost}
    found = harness.interleaved(runs, "cpu", seconds=1.0, least=2, most=7)
    assert found["slow"]["runs"] == 2 and found["fast"]["runs"] == 7
    cost |= {"slow": 1500.0}
    found = harness.interleaved(runs, "cpu", seconds=1.0, least=5, most=7)
    assert found["slow"]["runs"] == 3


def test_quantiles_lie_within_the_data() -> None:
    found = harness._summary([1.0, 2.0, 4.0])
    assert found == {"ms": 2.0, "p20": pytest.approx(1.4), "p80": pytest.approx(3.2), "runs": 3}
    assert harness._summary([3.0]) == {"ms": 3.0, "p20": 3.0, "p80": 3.0, "runs": 1}


def test_times_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [7.0]
    monkeypatch.setattr(harness, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    assert harness.timed(lambda: clock.append(clock.pop() + 0.25) or "done", "cpu") == ("done", 250.0, 250.0)


def test_memory_is_that_of_the_run() -> None:
    size = 64 << 20
    for _ in range(2):  # memory freed before does not lower the second measurement
        found = harness.peak_memory(lambda: torch.ones(size, dtype=torch.uint8), "cpu")
        assert 0.9 * size < found < 1.5 * size
    pieces = [bytearray(20000) for _ in range(2000)]
    last = bytearray(20000)  # above them on the heap: what is freed below stays with malloc
    del pieces
    found = harness.peak_memory(lambda: [bytearray(b"x" * 20000) for _ in range(2000)], "cpu")
    assert 0.8 * 40e6 < found < 1.6 * 40e6 and last


def test_new_graphs_and_kernels_are_counted() -> None:
    knobs = pytest.importorskip("triton", reason="triton is not installed").knobs
    former = knobs.compilation.listener
    with harness.compilations() as count:
        assert count() == 0
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=False)
        assert count() == 1
        with torch.compiler.set_stance("default"):
            function = torch.compile(lambda x: x + 1, backend="eager")
            function(torch.ones(3))
            function(torch.ones(3))
            assert count() == 2
            function(torch.ones(4))
            assert count() == 3
    assert knobs.compilation.listener is former


def test_recompilations_are_those_after_the_first_shape_in_a_fresh_compiler() -> None:
    graph = torch.compile(policy_loss, backend="eager")

    def make(case: LogitsCase) -> measuring.Run:
        def run() -> dict:
            logps = torch.log_softmax(case.logits.float(), -1).gather(1, case.batch.targets[:, None])[:, 0]
            return case.gradients(graph(logps, case.batch, case.cell.beta))

        return measuring.Run(run, case.restore)

    compiled, cell = Provider("compiled", ("logits",), make), Cell("logits", 64, 512, FP32)
    with torch.compiler.set_stance("default"):
        for rows in (32, 48):  # torch.compile learns here that row counts vary, and must forget it
            make(make_case(Cell("logits", rows, 512, FP32), "cpu")).call()
        assert measuring.recompilations(compiled, cell, "cpu") == 1
        assert measuring.recompilations(providers("logits")[0], cell, "cpu") == 0


@pytest.mark.parametrize("sequences", (14, 1))
def test_compilations_are_counted_whatever_the_number_of_sequences(sequences: int) -> None:
    cell = Cell("hidden", 28, 512, FP32, 128, sequences=sequences)
    ours = next(p for p in providers("hidden") if p.name == "grpo_kernels")
    assert measuring._compiles(ours, cell, "cpu") == 0


def test_on_cuda_the_cache_is_flushed_first_and_only_the_run_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: log.append(f"sleep {clocks}"))
    monkeypatch.setattr(harness, "_clocks_per_ms", lambda: 2e6)
    monkeypatch.setattr(harness, "_flush_buffer", lambda: types.SimpleNamespace(zero_=lambda: log.append("flush")))
    clock = [7.0]
    monkeypatch.setattr(harness, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def run() -> None:
        clock[0] += 0.25
        log.append("run")

    _, ms, host = harness.timed(run, "cuda")
    assert ms == 1.5 and host == 250.0
    assert log == ["flush", f"sleep {round(2e6 * harness.AHEAD_MS)}", "record", "run", "record", "wait"]
    found = harness.interleaved({"one": lambda: None}, "cuda", seconds=0.0, least=2)["one"]
    assert found["ms"] == 1.5 and found["host_ms"] == 0.0 and found["runs"] == 2


def test_the_clock_of_the_sleep_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the clock that the GPU has when it is awake."""
    took = iter((2.85, 0.6, *[0.5] * 18))

    def event(enable_timing: bool) -> types.SimpleNamespace:
        return types.SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda stop: next(took))

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: None)
    assert harness._clocks_per_ms.__wrapped__() == 2e6


def test_host_syncs_are_the_warnings_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run() -> None:
        for text in ("called a synchronizing CUDA operation", "something else", "called a synchronizing CUDA operation"):
            warnings.warn(text, stacklevel=1)
        torch.cuda.Event.synchronize(object())  # torch's mode does not see it; a batch waits for its row counts so

    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", waited.append)
    wait = torch.cuda.Event.synchronize
    assert harness.host_syncs(run) == 3 and modes == ["warn", "default"] and len(waited) == 1
    assert torch.cuda.Event.synchronize is wait
