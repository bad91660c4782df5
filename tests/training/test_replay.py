"""The reference trainer over the sets from which its tokens were sampled, compared with plain rules and log-softmaxes."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_kernels.training import sampling
from grpo_kernels.training.command_line import parse_args
from grpo_kernels.training.sampling import Completions, completion_logits, sample
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import RUN, config, lines, parameters, tiny, trainer
from support.sets import lists

Tensor = torch.Tensor

#: Sampling that leaves tokens out, by name: top_k, top_p, min_p and the temperature.
CUTS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "all, cooler": {"top_k": 7, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
}
SOME = {"top_k": 9, "top_p": 0.8}


def plain_rule(logits: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0) -> Any:
    """{id: log-prob} of what vLLM would keep of one row, in Python floats."""
    top = max(logits)
    shares = {i: math.exp((z - top) / temperature) for i, z in enumerate(logits)}
    kept = [i for i in shares if shares[i] >= min_p]
    kept = sorted(kept, key=lambda i: -shares[i])[: top_k or None]
    total, before, count = sum(shares[i] for i in kept), 0.0, 0
    while count < len(kept) and before < top_p * total:
        before += shares[kept[count]]
        count += 1
    return {i: math.log(shares[i] / before) for i in sorted(kept[:count])}


def completions_of(t: Trainer) -> tuple[Any, Completions]:
    c, rows = t.config, t.train_rows[: t.config.prompts_per_step]
    generator = torch.Generator().manual_seed(3)
    return rows, t.sample(rows, c.group_size, c.temperature, c.top_p, c.top_k, c.min_p, generator)


def over_sets(model: Any, completions: Completions, temperature: float) -> Tensor:
    """float64 log-probs [B, T] of the tokens, all logits outside of their sets masked to -inf."""
    logits = completion_logits(model, completions).double() / temperature
    mask = completions.kept.mask(logits.shape[-1]).view(logits.shape)
    logps = logits.masked_fill(~mask, -math.inf).log_softmax(-1)
    return logps.gather(-1, completions.targets[..., None])[..., 0]


# ---- what is recorded


@pytest.mark.parametrize("name", CUTS)
def test_each_token_comes_with_the_set_of_a_plain_rule(tok: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[list[float]]] = []

    def watched(logits: Tensor, *arguments: Any) -> Any:
        seen.append(logits.repeat_interleave(arguments[-1], 0).tolist())  # the copies
        return draw(logits, *arguments)

    draw = sampling.draw
    monkeypatch.setattr(sampling, "draw", watched)
    torch.manual_seed(1)
    end = tok.eos_token_id
    out = sample(tiny(tok), [[1, 2, 3], [4, 5]], group_size=6, max_new_tokens=9, ends=[end, 17, 19], **CUTS[name])
    assert out.kept is not None and not out.mask.all()
    recorded, (count, width) = lists(out.kept), out.targets.shape
    assert len(recorded) == count * width
    sizes = set()
    for b in range(count):
        for t in range(width):
            if not out.mask[b, t]:
                assert recorded[b * width + t] == [end]
                continue
            expected = plain_rule(seen[t][b], **CUTS[name])
            assert recorded[b * width + t] == list(expected)
            assert float(out.logps[b, t]) == pytest.approx(expected[int(out.targets[b, t])], abs=1e-5)
            sizes.add(len(expected))
    assert max(sizes) < len(tok) and (len(sizes) > 1 or name == "top-k")


def test_rows_of_completions_take_their_sets_along(tok: Any) -> None:
    torch.manual_seed(1)
    out = sample(tiny(tok), [[1, 2, 3], [4, 5]], group_size=3, max_new_tokens=5, ends=[tok.eos_token_id], **SOME)
    whole, width = lists(out.kept), out.targets.shape[1]
    of_each = [whole[b * width : (b + 1) * width] for b in range(6)]
    assert len({str(x) for x in of_each}) > 3
    assert lists(out[2:4].kept) == of_each[2] + of_each[3]
    assert lists(out[torch.tensor([5, 0])].kept) == of_each[5] + of_each[0]
    assert lists(out[torch.arange(6) % 3 == 1].kept) == of_each[1] + of_each[4]
    assert lists(out[:0].kept) == []


def test_sets_are_there_where_sampling_cuts_and_replay_is_wanted(tok: Any, tmp_path: Path) -> None:
    for i, (changes, wanted) in enumerate(
        (({}, False), (SOME, True), ({**SOME, "replay": False}, False), ({"min_p": 0.1}, True))
    ):
        _, completions = completions_of(trainer(tok, tmp_path / str(i), **changes))
        assert (completions.kept is not None) == wanted, changes
    # A top-k that holds the vocabulary cuts nothing off.
    assert completions_of(trainer(tok, tmp_path / "k", top_k=len(tok)))[1].kept is None


# ---- what is trained on


@pytest.mark.parametrize("loss", ["linear", "logits", "eager"])
def test_the_first_ratio_is_1_over_the_sets_and_the_mass_of_the_set_over_the_vocabulary(
    tok: Any, tmp_path: Path, loss: str
) -> None:
    def first(name: str, **changes: Any) -> dict[str, float]:
        return trainer(tok, tmp_path / name, loss=loss, lr=0.0, **SOME, **changes).train_step()

    with_policy = first("policy", num_updates=2)  # to log-probs that the trainer computed before
    assert with_policy["ratio_min"] == with_policy["ratio_max"] == 1.0
    replayed = first("replayed", ratio_to="sampler", entropy_over="vocabulary")
    assert replayed["ratio_min"] == pytest.approx(1.0, abs=1e-5) == replayed["ratio_max"]
    assert replayed["clip_low"] == replayed["clip_high"] == replayed["outside_set"] == 0
    plain = first("plain", ratio_to="sampler", replay=False)
    assert plain["ratio_max"] < 1 and plain["ratio_mean"] < 0.85 and plain["clip_low"] > 0.1
    assert plain["ratio_mean"] == pytest.approx(replayed["kept_mass"], abs=1e-5)
    assert plain["entropy"] == pytest.approx(replayed["entropy"], abs=1e-5)
    assert plain["entropy"] > with_policy["entropy"] + 0.1


def test_log_probs_before_the_update_are_bitwise_those_of_the_update(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, num_updates=2, lr=0.0, **SOME)
    _, completions = completions_of(t)
    batch = t.credit.batch(completions, torch.linspace(-1, 1, 12))
    old = t.losses.logps(t.model, completions).detach()
    torch.testing.assert_close(old.double(), over_sets(t.model, completions, 1.0) * completions.mask, rtol=1e-5, atol=1e-6)
    assert torch.equal(t.losses.loss(t.model, completions, batch, t.objective, torch.tensor(1.0)).logps, old)


@pytest.mark.parametrize("micro_batch", [0, 5])
@pytest.mark.parametrize("loss", ["linear", "logits", "eager"])
def test_the_gradient_is_that_over_the_sets_in_float64(tok: Any, tmp_path: Path, loss: str, micro_batch: int) -> None:
    """GRPO with a KL to a reference that is elsewhere, both over the sets, written out with log-softmaxes that mask the rest."""
    temperature, beta = 0.7, 0.3
    t = trainer(
        tok, tmp_path, temperature=temperature, beta=beta, loss=loss, micro_batch=micro_batch, max_grad_norm=float("inf"),
        gradient_checkpointing=micro_batch > 0, **SOME,
    )  # fmt: skip
    t.reference.model.load_state_dict(tiny(tok, seed=9).state_dict())
    rows, completions = completions_of(t)
    of_each = t.credit.advantages(rows, completions, t.score(rows, completions, 4))
    exact = copy.deepcopy(t.model).double()
    logps = over_sets(exact, completions, temperature)
    away = over_sets(copy.deepcopy(t.reference.model).double(), completions, temperature) - logps
    terms = -of_each[:, None].double() * (logps - logps.detach()).exp() + beta * (away.exp() - away - 1)
    mask = completions.mask
    value = (torch.where(mask, terms, 0.0).sum(1) / mask.sum(1)).mean()
    expected = torch.autograd.grad(value, list(exact.parameters()))
    t.optimizer.step = t.optimizer.zero_grad = lambda: None
    metrics = t.update(completions, of_each)
    assert metrics["loss"] == pytest.approx(value.item(), rel=1e-4) and metrics["kl"] > 0.1
    assert max(float(g.abs().max()) for g in expected) > 1e-2
    for p, gradient in zip(t.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.double(), gradient, rtol=1e-4, atol=1e-5)


def test_squared_probabilities_are_those_of_the_sets(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, advantages="optimal_token", micro_batch=5, **SOME)
    _, completions = completions_of(t)
    logits = completion_logits(t.model, completions).double()
    kept = completions.kept.mask(logits.shape[-1]).view(logits.shape)
    expected = logits.masked_fill(~kept, -math.inf).softmax(-1).square().sum(-1) * completions.mask
    found = t.credit._of_policy(t.losses.sum_squares, completions)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert t.train_step()["grad_norm"] > 0


def test_with_replay_correction_weights_are_one(tok: Any, tmp_path: Path) -> None:
    t = trainer(tok, tmp_path, corrections=["importance_weights:high=inf"], **SOME)
    _, completions = completions_of(t)
    weights = t.credit.batch(completions, torch.linspace(-1, 1, 12)).weights[completions.mask]
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [SOME, {**SOME, "ratio_to": "sampler"}, {**SOME, "replay": False}], ids=str)
def test_a_resumed_run_is_bitwise_the_same(tok: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    options = {**RUN, **changes, "steps": 4, "drop_zero_variance": False, "micro_batch": 5}
    straight = trainer(tok, tmp_path / "a", **options)
    assert straight.train()
    assert trainer(tok, tmp_path / "b", **{**options, "steps": 2}).train()
    again = trainer(tok, tmp_path / "b", **options, resume=True)
    assert again.train()
    assert all(torch.equal(p, parameters(straight)[name]) for name, p in parameters(again).items())
    assert lines(tmp_path / "b") == lines(tmp_path / "a") and len(lines(tmp_path / "a")) == 5


# ---- options


def test_replay_on_the_command_line() -> None:
    def replays(*options: str) -> bool:
        return parse_args(["--model", "m", "--dataset", "d", *options], TrainConfig).replays

    assert not replays() and replays("--top-p", "0.9") and not replays("--top-p", "0.9", "--no-replay")
    assert replays("--top-k", "20", "--replay") and replays("--min-p", "0.05")
    with pytest.raises(SystemExit):
        replays("--replay")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replay": True}, "replay=True: nothing is cut off at top_p=1, top_k=0, min_p=0"),
        ({"top_k": 1}, "top_k=1: it leaves one token to sample from.*replay=False"),
        ({"min_p": 1.0}, "min_p=1.0: it leaves one token"),
        ({"min_p": 1.5}, r"min_p=1.5: it must be in \[0, 1\]"),
        ({"ratio_to": "engine"}, "ratio_to='engine': it must be one of policy, sampler"),
        ({"ratio_to": "sampler", "corrections": ["tis"]}, "ratio_to='sampler': .*corrections=.'tis'. weigh a second time"),
        ({"entropy_over": "set"}, "entropy_over='set': it must be one of kept, vocabulary"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)
    config(tmp_path, top_k=1, replay=False)
