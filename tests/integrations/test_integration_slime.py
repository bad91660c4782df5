"""slime: its custom loss and its function of logits, compared with a float64 transcription, and with its own code if that is on
the path."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels import Objective
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.integrations import slime
from support.trainers import (
    DATA,
    MASK,
    Data,
    V,
    assert_same,
    clipped,
    log_softmax_of,
    stand_in,
    their_file,
    their_file_beside,
    value_and_gradient,
)

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")


def slime_args(**changes: Any) -> SimpleNamespace:
    defaults = {
        "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0,
        "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_rollout_logprobs": False,
        "use_unbiased_kl": False, "use_tis": False, "use_opsm": False, "get_mismatch_metrics": False,
    }  # fmt: skip
    return SimpleNamespace(**defaults | changes)


SLIME = {
    "grpo": {},
    "dual clip": {"eps_clip_c": 1.6, "entropy_coef": 0.05},
    "gspo": {"advantage_estimator": "gspo", "eps_clip_high": None},
    "cispo": {"advantage_estimator": "cispo"},
    "k2": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "entropy_coef": 0.03},
    "low_var_kl": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"},
    "unbiased k3": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "rollout log-probs": {"use_rollout_logprobs": True},
}


def slime_batch(data: Data) -> dict[str, Any]:
    """Three rollouts of five samples, which share denominators; the third sample is empty."""
    lengths = [7, 3, 0, 5, 6]
    cut = {name: [row[:n] for row, n in zip(getattr(data, field), lengths, strict=True)] for name, field in (
        ("log_probs", "old"), ("rollout_log_probs", "sampler"), ("ref_log_probs", "ref"), ("advantages", "advantages"))}  # fmt: skip
    masks = [row[:n].float() for row, n in zip(MASK, lengths, strict=True)]
    return cut | {
        "loss_masks": masks, "response_lengths": lengths, "total_lengths": [n + 2 for n in lengths],
        "unconcat_tokens": [torch.zeros(n + 2, dtype=torch.int64) for n in lengths],
    }  # fmt: skip


def sum_of_sample_mean(x: Tensor) -> Tensor:
    """Samples 0, 1 and 3, 4 are of one rollout each."""
    denominators = [9.0, 9.0, 1.0, 11.0, 11.0]
    total, at = x.new_zeros(()), 0
    for n, D, row in zip([7, 3, 0, 5, 6], denominators, MASK, strict=True):
        total = total + (x[at : at + n] * row[:n]).sum() / D
        at += n
    return total


def slime_loss(args: Any, batch: dict[str, Any], logps: list[Tensor], entropy: list[Tensor]) -> dict[str, Tensor]:
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    L, O, A = (torch.cat(x).double() for x in (logps, old, batch["advantages"]))
    if args.advantage_estimator == "gspo":
        parts = [
            ((o.double() - p) * m).sum() / m.sum().clamp(min=1) for p, o, m in zip(logps, old, batch["loss_masks"], strict=True)
        ]
        kl = torch.cat([k.expand_as(p) for k, p in zip(parts, logps, strict=True)])
    else:
        kl = O - L
    r, high = (-kl).exp(), args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    if args.advantage_estimator == "cispo":
        w = r.clamp(1 - args.eps_clip, 1 + high).detach()
        pg, bound = -w * A * L, clipped(r, A, args.eps_clip, high)[1]
    else:
        pg, bound = clipped(r, A, args.eps_clip, high, args.eps_clip_c)
    named = {"pg_loss": sum_of_sample_mean(pg), "entropy_loss": sum_of_sample_mean(torch.cat(entropy).double())}
    loss = named["pg_loss"] - args.entropy_coef * named["entropy_loss"]
    if args.use_kl_loss:
        d = L - torch.cat(batch["ref_log_probs"]).double()
        value = {"k1": d, "k2": d * d / 2}.get(args.kl_loss_type, (-d).exp() - 1 + d)
        if args.use_unbiased_kl:
            value = value * (L - O).exp()
        if args.kl_loss_type == "low_var_kl":
            value = value.clamp(-10, 10)
        named["kl_loss"] = sum_of_sample_mean(value)
        loss = loss + args.kl_loss_coef * named["kl_loss"]
    difference = (O - torch.cat(batch["rollout_log_probs"]).double()).abs()
    if args.use_rollout_logprobs:
        difference = torch.zeros_like(difference)
    return {
        "loss": loss, **named, "pg_clipfrac": sum_of_sample_mean(bound.double()), "ppo_kl": sum_of_sample_mean(kl),
        "train_rollout_logprob_abs_diff": sum_of_sample_mean(difference),
    }  # fmt: skip


def scores_of(logits: Tensor, lengths: list[int]) -> dict[str, list[Tensor]]:
    """Log-probs of token 1 at each response position, and entropies, packed with a prompt of two tokens before each."""
    p, entropy, at = torch.log_softmax(logits[0], -1), [], 0
    logps: list[Tensor] = []
    for n in lengths:
        rows = slice(at + 1, at + 1 + n)
        logps.append(p[rows, 1])
        entropy.append(-(p[rows].exp() * p[rows]).sum(-1))
        at += n + 2
    return {"log_probs": logps, "entropy": entropy}


@pytest.mark.parametrize("what", SLIME)
def test_slime_loss(what: str) -> None:
    args, batch = slime_args(**SLIME[what]), slime_batch(DATA)
    lengths = batch["response_lengths"]
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(1, sum(batch["total_lengths"]), V, generator=g)
    drawn = scores_of(logits, lengths)["log_probs"]
    batch["log_probs"] = [(p + o.abs().clamp(max=0.5) * s).clamp(max=-0.1) for p, o, s in zip(
        drawn, batch["log_probs"], (-1, 1, 1, -1, 1), strict=True)]  # fmt: skip
    batch["rollout_log_probs"] = [p - 0.15 for p in batch["log_probs"]]
    batch["ref_log_probs"] = [p + 0.2 for p in drawn]
    stand_in(
        "slime.backends.megatron_utils.loss",
        get_log_probs_and_entropy=lambda logits, **_: (None, scores_of(logits, lengths)),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )

    def theirs(x: Tensor) -> Any:
        scored = scores_of(x, lengths)
        named = slime_loss(args, batch, scored["log_probs"], scored["entropy"])
        return named["loss"], named

    (loss, metrics), gradient = value_and_gradient(
        lambda x: slime.policy_loss()(args, batch, x, sum_of_sample_mean), logits, torch.float32
    )
    (want, named), expected = value_and_gradient(theirs, logits, torch.float64)
    assert_same((loss, gradient), (want, expected))
    assert set(metrics) == set(named)
    for name, value in metrics.items():
        exact = named[name]
        assert float(value) == pytest.approx(float(exact.detach()), rel=1e-4, abs=1e-5), name
        assert not value.requires_grad


def test_slime_loss_of_an_objective_and_of_nothing() -> None:
    batch, logits = slime_batch(DATA), torch.randn(1, 31, V)
    lengths = batch["response_lengths"]
    scored = {"now": lengths}
    stand_in(
        "slime.backends.megatron_utils.loss",
        get_log_probs_and_entropy=lambda logits, **_: (None, scores_of(logits, scored["now"])),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )
    mine = slime.policy_loss(Objective.preset("vespo", aggregate="token-sum"))
    (loss, _), gradient = value_and_gradient(lambda x: mine(slime_args(), batch, x, sum_of_sample_mean), logits, torch.float32)
    assert torch.isfinite(loss) and gradient.any()
    with pytest.raises(ValueError, match="aggregate='token-mean'"):
        slime.policy_loss(Objective())
    scored["now"] = [3, 3, 0, 5, 6]
    with pytest.raises(ValueError, match="context parallelism has cut them"):
        mine(slime_args(), batch, logits, sum_of_sample_mean)

    empty = {name: [torch.zeros(0)] for name in ("advantages", "log_probs", "loss_masks")} | {
        "unconcat_tokens": [], "total_lengths": [], "response_lengths": []
    }  # fmt: skip
    vars(sys.modules["slime.backends.megatron_utils.loss"])["get_log_probs_and_entropy"] = lambda logits, **_: (
        None, {"log_probs": [torch.zeros(0)], "entropy": [torch.zeros(0)]}
    )  # fmt: skip
    (loss, _), gradient = value_and_gradient(
        lambda x: slime.policy_loss()(slime_args(), empty, x, lambda v: v.sum()), logits, torch.float32
    )
    assert loss == 0 and not gradient.any()

    # No samples at all, of which slime's reducer makes a plain 0: the same metrics as on other ranks.
    args = slime_args(use_kl_loss=True, kl_loss_coef=0.1)
    nothing: dict[str, Any] = {name: [] for name in batch}
    vars(sys.modules["slime.backends.megatron_utils.loss"])["get_log_probs_and_entropy"] = lambda logits, **_: (
        None, {"log_probs": [], "entropy": []}
    )  # fmt: skip
    (loss, metrics), gradient = value_and_gradient(
        lambda x: slime.policy_loss()(args, nothing, x, lambda v: 0), logits, torch.float32
    )
    assert loss == 0 and not gradient.any()
    assert {"kl_loss", "train_rollout_logprob_abs_diff"} <= set(metrics) and not any(float(v) for v in metrics.values())


def test_slime_kl_of_the_metrics_is_that_of_the_loss() -> None:
    """With a ratio summed over the sequence it is a token's own ratio that weighs its KL; no metric overflows."""
    batch, logits = slime_batch(DATA), torch.randn(1, 31, V)
    lengths = batch["response_lengths"]
    scored = scores_of(logits, lengths)
    stand_in(
        "slime.backends.megatron_utils.loss", get_log_probs_and_entropy=lambda logits, **_: (None, scored),
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
    )  # fmt: skip
    objective = Objective.preset("vespo", aggregate="token-sum", beta=0.3, kl=Kl("k3", weighting="ratio"))
    _, metrics = slime.policy_loss(objective)(slime_args(), batch, logits, sum_of_sample_mean)
    L, O, R = (torch.cat(x).double() for x in (scored["log_probs"], batch["log_probs"], batch["ref_log_probs"]))
    want = sum_of_sample_mean(((R - L).exp() - (R - L) - 1) * (L - O).exp())
    assert float(metrics["kl_loss"]) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_tis": True}, "use_tis=True"),
        ({"use_opsm": True}, "use_opsm=True"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, "custom_pg_loss_reducer_function_path='a.b'"),
        ({"eps_clip_c": 1.1}, r"eps_clip_c=1\.1"),
        ({"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "low_var_kl"}, "use_unbiased_kl"),
        ({"use_kl_loss": True, "use_unbiased_kl": True, "advantage_estimator": "gspo"}, "use_unbiased_kl"),
    ],
)
def test_slime_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slime.objective_of(slime_args(**change))


def test_slime_functions_of_logits() -> None:
    """With and without the tokens that top-p sampling kept: those bound the log-prob's softmax, not the entropy's."""

    def theirs(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1,
               log_prob_keep_mask: Any = None, with_entropy_grad: bool = True) -> Any:  # fmt: skip
        kept = logits if log_prob_keep_mask is None else logits.masked_fill(~log_prob_keep_mask, -math.inf)
        logps, entropy = log_softmax_of(kept, tokens)[0], log_softmax_of(logits, tokens)[1]
        entropy = entropy if with_entropy_grad else entropy.detach()
        return logps[:, None], entropy if with_entropy else None

    home = stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=theirs)
    loss_module = stand_in("slime.backends.megatron_utils.loss", calculate_log_probs_and_entropy=theirs)
    logits, tokens, up = torch.randn(9, V), torch.randint(V, (9,)), torch.linspace(-1, 1, 9)
    keep = (torch.rand(9, V) < 0.4).scatter(1, tokens[:, None], True)
    for options in ({}, {"with_entropy": True}, {"with_entropy": True, "with_entropy_grad": False, "chunk_size": 4},
                    {"log_prob_keep_mask": keep, "with_entropy": True}, {"log_prob_keep_mask": keep}):  # fmt: skip

        def use(x: Tensor, options: Any = options) -> Tensor:
            logps, entropy = loss_module.calculate_log_probs_and_entropy(x, tokens, None, **options)
            assert logps.shape == (9, 1) and (entropy is None) == ("with_entropy" not in options)
            return (logps[:, 0] * up).sum() + (0.0 if entropy is None else entropy.square().sum())

        want = value_and_gradient(use, logits, torch.float64)
        with slime.bind(strict=True) as slots:
            assert_same(value_and_gradient(use, logits, torch.float32), want)
            assert slots.counts == {"fused": 1}
    # The target is kept, whether top-p recorded it or not.
    dropped = keep.scatter(1, tokens[:, None], False)
    torch.testing.assert_close(
        slime.calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=dropped)[0],
        theirs(logits, tokens, None, log_prob_keep_mask=keep)[0].float(), rtol=1e-5, atol=1e-6,
    )  # fmt: skip
    with slime.bind():  # slime makes a new tensor of no tokens, without the last dimension
        for options in ({}, {"with_entropy": True}, {"with_entropy": True, "log_prob_keep_mask": keep[:0]}):
            logps, entropy = loss_module.calculate_log_probs_and_entropy(logits[:0], tokens[:0], None, **options)
            assert logps.shape == (0,) and (entropy is None if not options else entropy.shape == (0,))
    assert home.calculate_log_probs_and_entropy is theirs


# ---- its record of what top-p kept

TOTALS, RESPONSES = [6, 3, 7], [4, 2, 3]
TEXTS = [torch.arange(n) * 5 % V + b for b, n in enumerate(TOTALS)]
#: Of each response token the recorded ids: the target among others, alone, lacking; none, of a tool.
RECORDS = [[[10, 3, 15], [15], [], [20, 1, 7]], [[6, 11], [11, 0]], [[22], [5, 0, 3], [8, 9]]]


def record() -> tuple[list[Tensor], list[Tensor]]:
    ids = [torch.tensor([i for row in rows for i in row], dtype=torch.int32) for rows in RECORDS]
    offsets = [
        torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32) for rows in RECORDS
    ]
    return ids, offsets


def shifted_tokens(T: int, device: Any, tokens: list[Tensor], totals: list[int], responses: list[int], cp: bool) -> Tensor:
    """As slime's own without context parallelism."""
    assert T == sum(totals) and not cp
    return torch.cat([torch.cat([x[1:], x.new_zeros(1)]) for x in tokens])


def replayed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each response token in turn, in float64: log-prob over its recorded ids and itself; entropy over all."""
    logps, entropies, at = [], [], 0
    for text, rows in zip(TEXTS, RECORDS, strict=True):
        for t, ids in enumerate(rows, start=len(text) - len(rows)):
            row, kept = logits[at + t - 1].double(), sorted({*ids, int(text[t])})
            logps.append(row[text[t]] - row[kept].logsumexp(0))
            p = row.log_softmax(0)
            entropies.append(-(p.exp() * p).sum())
        at += len(text)
    return torch.stack(logps), torch.stack(entropies)


def responses_of(x: Tensor) -> Tensor:
    parts = x.reshape(-1).split(TOTALS)
    return torch.cat([part[-1 - n : -1] for part, n in zip(parts, RESPONSES, strict=True)])


def through_the_record(logits: Tensor, tp_group: Any = None, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
    """As slime's `get_log_probs_and_entropy` goes about it."""
    home = sys.modules["slime.backends.megatron_utils.loss"]
    keep = home._build_topp_keep_mask(len(logits), logits.shape[-1], logits.device, *record(), TOTALS, RESPONSES, False)
    tokens = home._build_shifted_tokens(len(logits), logits.device, TEXTS, TOTALS, RESPONSES, False)
    logps, entropy = home.calculate_log_probs_and_entropy(
        logits, tokens, tp_group, with_entropy=with_entropy, chunk_size=4, log_prob_keep_mask=keep
    )
    return responses_of(logps), entropy if entropy is None else responses_of(entropy)


def assert_replayed() -> None:
    """Values and gradients; tool tokens have no part in the entropy here, and one of log-prob 0 there."""
    logits, up = torch.randn(sum(TOTALS), V, generator=torch.Generator().manual_seed(4)), torch.linspace(-1, 2, sum(RESPONSES))
    own = torch.tensor([bool(ids) for rows in RECORDS for ids in rows])

    def total(pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0] * up).sum() + 0.3 * (pair[1] * up * own).sum()

    want = value_and_gradient(lambda x: total(replayed(x)), logits, torch.float64)
    assert_same(value_and_gradient(lambda x: total(through_the_record(x)), logits, torch.float32), want)
    assert through_the_record(logits, with_entropy=False)[1] is None
    assert (through_the_record(logits)[0][[1, 2]] == 0).all()


def test_slime_record_goes_to_the_rows_as_it_is() -> None:
    stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=lambda *_: None)
    home = stand_in(
        "slime.backends.megatron_utils.loss", _build_topp_keep_mask=lambda *_: None, _build_shifted_tokens=shifted_tokens,
        calculate_log_probs_and_entropy=sys.modules["slime.utils.ppo_utils"].calculate_log_probs_and_entropy,
    )  # fmt: skip
    with slime.bind(replay=True, strict=True) as slots:
        assert_replayed()
        assert set(slots.counts) == {"fused"}
        kept = home._build_topp_keep_mask(16, V, torch.device("cpu"), *record(), TOTALS, RESPONSES, False)
        assert kept.kept.rows == 16 and kept.kept.empty_rows == 8 and int((~kept.scored).sum()) == 1
        ids, offsets = record()
        with pytest.raises(ValueError, match=r"rollout_top_p_token_ids\[1\] has sets for 1 tokens, but the response has 2"):
            home._build_topp_keep_mask(
                16, V, torch.device("cpu"), [ids[0], ids[1][:2], ids[2]], [offsets[0], offsets[1][:2], offsets[2]],
                TOTALS, RESPONSES, False,
            )  # fmt: skip
        with pytest.raises(ValueError, match=r"rollout_top_p_token_ids\[0\]: .*twice in row 0"):
            home._build_topp_keep_mask(2, V, torch.device("cpu"), [[3, 3]], [[0, 2]], [2], [1], False)
    with slime.bind(replay=True, entropy_over="kept"):
        entropy = through_the_record(torch.randn(16, V))[1]
        assert (entropy[[1, 2]] == 0).all() and (entropy[0] < math.log(3) + 1e-6)


def test_slime_replay_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime's own functions on the same record: log-probs and entropy, and the rows under every layout of context parallelism."""
    place = {"context": (1, 0), "tensor_model": (1, 0)}
    mpu = SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
    for kind in place:
        setattr(mpu, f"get_{kind}_parallel_world_size", lambda kind=kind: place[kind][0])
        setattr(mpu, f"get_{kind}_parallel_rank", lambda kind=kind: place[kind][1])
    stand_in("megatron.core", mpu=mpu)
    first = their_file("slime.utils.ppo_utils", monkeypatch)
    for name, contents in (("distributed_utils", {"distributed_masked_whiten": None}), ("misc", {"load_function": None}),
                           ("types", {"RolloutBatch": dict})):  # fmt: skip
        stand_in(f"slime.utils.{name}", **contents)
    their_file_beside("slime.backends.megatron_utils.cp_utils", first)
    home = their_file_beside("slime.backends.megatron_utils.loss", first)
    logits = torch.randn(sum(TOTALS), V, generator=torch.Generator().manual_seed(4))
    want = through_the_record(logits)
    torch.testing.assert_close(want[0], replayed(logits)[0].float(), rtol=1e-5, atol=1e-5)
    with slime.bind(replay=True, strict=True):
        assert_replayed()
    for gathered, ranks in ((False, 1), (False, 2), (True, 2)):
        T = sum(-(-n // 4) * 2 for n in TOTALS) if ranks == 2 and not gathered else sum(TOTALS) // ranks
        for rank in range(ranks):
            place["context"] = ranks, rank
            given = (T, V, torch.device("cpu"), *record(), TOTALS, RESPONSES, gathered)
            rows = home._build_topp_keep_mask(*given)
            kept, scored = slime.keep_sets(*given)
            assert not rows.all() and torch.equal(kept.mask(V) & scored[:, None], rows)
