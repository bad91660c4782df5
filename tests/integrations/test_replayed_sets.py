"""Scores over the sets that a rollout recorded, for slime, miles, SkyRL and prime-rl: their records
go to the rows as they are, through the functions that are bound, in value and gradient against
float64.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import TokenSets
from grpo_kernels.integrations import miles, prime_rl, skyrl, slime
from support.trainers import H, V, assert_scored, entropy_of, refused, stand_in

parametrize = pytest.mark.parametrize

pytestmark = pytest.mark.usefixtures("stand_ins")

G = torch.Generator().manual_seed(3)


def over(logits, ids, sets, target=False):
    """Log-probs over each set (with `target` among it), over all where there is none; entropies of
    the sets. In float64.
    """
    kept = [
        sorted({*s, int(t)} if target and s else s) or [*range(V)]
        for s, t in zip(sets, ids.tolist(), strict=True)
    ]
    rows = [row[s].log_softmax(0) for row, s in zip(logits.double(), kept, strict=True)]
    logps = [
        row[t] - row[s].logsumexp(0) for row, t, s in zip(logits.double(), ids, kept, strict=True)
    ]
    return torch.stack(logps), torch.stack([-(p.exp() * p).sum() for p in rows])


# ---- slime

TOTALS, RESPONSES = [6, 3, 7], [4, 2, 3]
TEXTS = [torch.arange(n) * 5 % V + b for b, n in enumerate(TOTALS)]
#: Of each response token the recorded ids: the target among others, alone, lacking; none, of a
#: tool.
RECORDS = [[[10, 3, 15], [15], [], [20, 1, 7]], [[6, 11], [11, 0]], [[22], [5, 0, 3], [8, 9]]]
FLAT = [ids for rows in RECORDS for ids in rows]
OWN = torch.tensor([bool(ids) for ids in FLAT])
ENDS = [sum(TOTALS[: b + 1]) for b in range(3)]
RESPONSE_ROWS = torch.tensor(
    [i for end, n in zip(ENDS, RESPONSES, strict=True) for i in range(end - 1 - n, end - 1)]
)
RESPONSE_IDS = torch.cat([text[-n:] for text, n in zip(TEXTS, RESPONSES, strict=True)])


def keep_sets(records, totals=TOTALS, responses=RESPONSES, home=slime, name="keep_sets"):
    ids = [torch.tensor([i for row in rows for i in row], dtype=torch.int32) for rows in records]
    offsets = [torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int() for rows in records]
    return getattr(home, name)(
        sum(totals), V, torch.device("cpu"), ids, offsets, totals, responses, False
    )


def through_the_record(logits):
    """As slime's `get_log_probs_and_entropy` goes about it; the entropy of a tool's tokens counts
    nothing here.
    """
    home = sys.modules["slime.backends.megatron_utils.loss"]
    tokens = home._build_shifted_tokens(len(logits), logits.device, TEXTS, TOTALS, RESPONSES, False)
    logps, entropy = home.calculate_log_probs_and_entropy(
        logits, tokens, None, with_entropy=True, chunk_size=4,
        log_prob_keep_mask=keep_sets(RECORDS, home=home, name="_build_topp_keep_mask"),
    )  # fmt: skip
    return logps.reshape(-1)[RESPONSE_ROWS], entropy[RESPONSE_ROWS] * OWN


@pytest.fixture
def slime_home():
    def shifted(T, device, tokens, totals, responses, cp):
        return torch.cat([torch.cat([x[1:], x.new_zeros(1)]) for x in tokens])

    theirs = stand_in(
        "slime.utils.ppo_utils", calculate_log_probs_and_entropy=lambda *_: None
    ).calculate_log_probs_and_entropy
    names = {
        "_build_topp_keep_mask": lambda *_: None,
        "_build_shifted_tokens": shifted,
        "calculate_log_probs_and_entropy": theirs,
    }
    return stand_in("slime.backends.megatron_utils.loss", **names)


def test_slime(slime_home):
    logits = torch.randn(sum(TOTALS), V, generator=torch.Generator().manual_seed(4))

    def exact(x):
        return (
            torch.where(OWN, over(x[RESPONSE_ROWS], RESPONSE_IDS, FLAT, target=True)[0], 0.0),
            entropy_of(x[RESPONSE_ROWS]) * OWN,
        )

    with slime.bind(replay=True, strict=True) as slots:
        assert_scored(through_the_record, exact, logits)
        assert {*slots.counts} == {"fused"}
    refused(
        (
            lambda: keep_sets([[[3]], [[4]]], [2, 3], [1, 2]),
            r"rollout_top_p_token_ids\[1\] has sets for 1 tokens",
        )
    )


# ---- miles

MILES = "miles.backends.training_utils"
TOKENS = torch.tensor([3, 9, 0, 22, 5, 7])
#: The set of each response token: the sampled id among others, or alone, as for a tool's token.
SETS = [[3, 1, 14], [9], [8, 0], [22, 2, 6, 4, 21], [5], [10, 7]]


class Record:
    """As miles' `RolloutSamplingMask`."""

    def __init__(self, sets, partial=False):
        self.ids, self.allows_empty_rows = (
            torch.tensor([i for row in sets for i in row], dtype=torch.int32),
            partial,
        )
        self.offsets = torch.tensor([0, *(len(row) for row in sets)]).cumsum(0)
        self.tokens = len(sets)

    def __len__(self):
        return self.tokens


def arguments(**changes):
    return SimpleNamespace(
        **{"rollout_top_p": 0.9, "rollout_top_k": -1, "use_kl_loss": False, "kl_coef": 0.0}
        | changes
    )


@pytest.fixture(
    params=[
        ("sampling_mask", "loss_hub.math_utils"),
        ("data.sampling_mask", "loss.hub.math_utils"),
    ],
    ids=lambda homes: homes[0],
)
def miles_homes(request):
    """The modules of two versions."""
    theirs = (
        {"build_local_sampling_mask": lambda *_, **__: "theirs"},
        {"calculate_log_probs_and_entropy": lambda *_, **__: "theirs"},
    )
    return [
        stand_in(f"{MILES}.{home}", **names)
        for home, names in zip(request.param, theirs, strict=True)
    ]


def miles_scores(homes, logits, record, order=range(6), **options):
    """As miles computes them, with the rows in the order of context parallelism."""
    masks, maths = homes
    mask = masks.build_local_sampling_mask(logits[[*order]], record, order, tp_rank=0)
    logps, entropy = maths.calculate_log_probs_and_entropy(
        logits[[*order]], TOKENS[[*order]], None, with_entropy=True, sampling_mask=mask, **options
    )
    back = torch.tensor([*order]).argsort()
    return logps[back, 0], entropy[back]


def test_miles(miles_homes):
    logits, partial = (
        2 * torch.randn(6, V, generator=torch.Generator().manual_seed(1)),
        [*SETS[:5], []],
    )

    def score(record, order=range(6), **options):
        return lambda x=logits: miles_scores(miles_homes, x, record, order, **options)

    with miles.bind(arguments(), strict=True) as slots:
        for order in (range(6), [0, 5, 4, 2, 1, 3]):
            exact = lambda x: (over(x / 1.3, TOKENS, SETS)[0], entropy_of(x / 1.3))  # noqa: E731
            assert_scored(score(Record(SETS), order, temperature=1.3), exact, logits)
        got = score(Record(partial, partial=True))()[0]
        torch.testing.assert_close(
            got.double(), over(logits, TOKENS, partial)[0], rtol=1e-5, atol=1e-5
        )
        assert {*slots.counts} == {"fused"}
        refused(
            (score(Record(partial)), "no ids for response token 5"),
            (score(Record([*SETS[:5], [10]])), r"tokens\[5\]=7 is not in its kept set"),
        )


def test_miles_without_replay_and_with_another_network(miles_homes):
    with miles.bind(arguments(rollout_top_p=1.0)):
        assert miles_homes[0].build_local_sampling_mask() == "theirs"
    given = arguments(use_kl_loss=True)
    refused((lambda: miles.bind(given), "use_kl_loss=.*with replay"))
    miles.bind(given, reference_over="kept").undo()


def test_miles_with_other_arguments_is_refused_when_it_is_bound(miles_homes):
    """Its branches disagree on what a record is, under one version. Nothing is replaced."""
    masks, maths = miles_homes
    theirs, before = (
        lambda sampling_mask, logits, response_indices, *, tp_rank: None,
        maths.calculate_log_probs_and_entropy,
    )
    masks.build_local_sampling_mask = theirs
    with pytest.raises(
        RuntimeError,
        match=(
            r"build_local_sampling_mask takes \(.*, but ours takes \(logits, sampling_mask,"
            r" response_"
        ),
    ):
        miles.bind(arguments())
    assert (
        masks.build_local_sampling_mask is theirs
        and maths.calculate_log_probs_and_entropy is before
    )


def test_miles_records_of_a_packed_batch():
    sets = miles.kept_sets([Record(SETS[:2]), Record([[4, 5], []], partial=True)], [4, 3], [2, 2])
    assert sets.padded().tolist() == [
        [-1] * 3,
        [3, 1, 14],
        [9, -1, -1],
        [-1] * 3,
        [4, 5, -1],
        [-1] * 3,
        [-1] * 3,
    ]
    refused(
        (
            lambda: miles.kept_sets([Record([[1], []])], [5], [2]),
            r"masks\[0\] has no ids for response token 1",
        )
    )


# ---- SkyRL: ids [.., K] padded with -1, of one id, of several, of none

SKYRL = "skyrl.backends.skyrl_train.utils"
SHAPE, BOUNDS = (4, 6), {"vocab_start_index": 0, "vocab_end_index": V, "tp_group": None}
HIDDEN, WEIGHT = torch.randn(*SHAPE, H, generator=G), torch.randn(V, H, generator=G)
SAMPLED = torch.randint(V, SHAPE, generator=G)
SUPPORT = torch.stack([torch.randperm(V, generator=G)[:5] for _ in range(24)]).view(*SHAPE, 5)
SUPPORT = SUPPORT.masked_fill(
    (SUPPORT == SAMPLED[..., None])
    | (torch.arange(5) > torch.randint(1, 5, (*SHAPE, 1), generator=G)),
    -1,
)
SUPPORT[..., 0] = SAMPLED
SUPPORT[1, :, 1:], SUPPORT[:, 2] = -1, -1
HAS = (SUPPORT >= 0).any(-1)
LOGITS = HIDDEN @ WEIGHT.T


def lists_of(padded):
    return [[i for i in row if i >= 0] for row in padded.flatten(0, -2).tolist()]


@pytest.fixture
def skyrl_replay():
    stand_in(f"{SKYRL}.torch_utils", logprobs_from_logits=len, chunked_entropy_from_logits=sum)
    return f"{SKYRL}.sample_support_replay"


@parametrize("leaves", [[LOGITS], [HIDDEN, WEIGHT]], ids=("logits", "hidden"))
@parametrize(
    "gradient", [None, False, True], ids=("older", "newer", "newer, entropy with a gradient")
)
def test_skyrl(skyrl_replay, leaves, gradient):
    """By the function of older versions, and by that of newer ones, with the entropy of the set; 0
    where there is none.
    """
    newer = {"sample_support_scores": max, "SampleSupportScores": SimpleNamespace}
    home = stand_in(skyrl_replay, **{"sample_support_logprobs": max} if gradient is None else newer)

    def call(rows, weight=None, **more):
        given = {"lm_head_weight": weight, "temperature": 0.7, "chunk_size": 3, **BOUNDS} | more
        return (home.sample_support_logprobs if gradient is None else home.sample_support_scores)(
            rows, SAMPLED, SUPPORT, **given
        )

    def ours(*leaves):
        if gradient is None:
            (logps, valid), entropy = call(*leaves), None
        else:
            found = call(*leaves, compute_entropy=True, entropy_requires_grad=gradient)
            logps, entropy, valid = found.logprobs, found.entropy, found.valid_mask
        assert torch.equal(valid, HAS) and (logps[~HAS] == 0).all() and (logps[1] == 0).all()
        return logps, entropy

    def exact(rows, weight=None):
        logits = (rows if weight is None else rows @ weight.T) / 0.7
        found = over(logits.flatten(0, 1), SAMPLED.flatten(), lists_of(SUPPORT))
        logps, entropy = (torch.where(HAS, y.view(SHAPE), 0.0) for y in found)
        return logps, None if gradient is None else entropy if gradient else entropy.detach()

    with skyrl.bind(replay=True, strict=True) as slots:
        assert_scored(ours, exact, *leaves)
        assert {*slots.counts} == {"fused"}


@parametrize("fault", ["a sampled id outside of its set", "a set that lists an id twice"])
def test_skyrl_scores_what_is_no_set_itself(skyrl_replay, fault):
    """It adds up the listed ids, each as often as it is listed, and not the sampled id where that
    is not among them.
    """
    sets, calls, twice = SUPPORT.clone(), [], fault.startswith("a set")
    sets[0, 1, :2] = SAMPLED[0, 1] if twice else (SAMPLED[0, 1] + 1) % V
    sets[0, 1, 1:] = sets[0, 1, 1:] if twice else -1
    home = stand_in(
        skyrl_replay, sample_support_logprobs=lambda *args, **_: calls.append(args) or "theirs"
    )
    with skyrl.bind(replay=True) as slots:
        assert home.sample_support_logprobs(LOGITS, SAMPLED, sets, **BOUNDS) == "theirs"
    assert slots.counts == {f"SkyRL: {fault}": 1} and len(calls) == 1


def test_skyrl_records_become_sets():
    """[B, A, K] and ids with offsets are the same sets; an end token may have none, and no other."""
    padded, mask = (
        torch.full((2, 3, 3), -1, dtype=torch.int32),
        torch.tensor([[1, 1, 1], [1, 0, 0]]),
    )
    padded[0, 0, :2], padded[0, 1, 0], padded[1, 0, 0] = torch.tensor([4, 2]), 7, 1
    ragged = (
        torch.tensor([4, 2, 7, 1], dtype=torch.int32),
        torch.tensor([0, 2, 3, 3, 4], dtype=torch.int32),
    )
    for support in (padded, ragged):
        assert lists_of(skyrl.kept_sets(support, mask).padded()) == [[4, 2], [7], [], [1], [], []]
    refused(
        (
            lambda: skyrl.kept_sets(padded.index_fill(1, torch.tensor([1]), -1), mask),
            r"no ids for tokens \[1, 2\] of sample 0",
        )
    )


# ---- prime-rl: no ids, and a label outside, mean the whole vocabulary

LABELS, INVERSE, STATES = (
    SAMPLED.view(-1),
    1 / (0.5 + torch.rand(24, generator=G)),
    HIDDEN.view(24, H),
)
REPLAYED = SUPPORT.view(24, 5).clone()
REPLAYED[::4, 0], REPLAYED[1::4], REPLAYED[2::4, 1:], REPLAYED[2::4, 0] = -1, -1, -1, LABELS[2::4]


@pytest.fixture
def prime_rl_head():
    theirs = type(
        "_SequenceChunkedLogProbEntropyFn", (), {"apply": staticmethod(lambda *_: "theirs")}
    )
    return stand_in(
        "prime_rl.trainer.models.layers.lm_head", _SequenceChunkedLogProbEntropyFn=theirs
    )


@parametrize(
    "more", [(), (False,), (True,)], ids=("6 arguments", "7 arguments", "log-probs of all ids")
)
def test_prime_rl(prime_rl_head, more):
    sets = lists_of(REPLAYED)
    scored = [s if t in s else [] for s, t in zip(sets, LABELS.tolist(), strict=True)]
    assert 0 < sum(map(bool, scored)) < sum(map(bool, sets)) < 24
    with prime_rl.bind() as slots:
        apply = prime_rl_head._SequenceChunkedLogProbEntropyFn.apply

        def exact(hidden, weight):
            logits = hidden @ weight.T * INVERSE[:, None]
            found = over(logits, LABELS, scored)[0], entropy_of(logits).detach()
            if more != (True,):
                return found
            own = torch.tensor([bool(s) for s in scored])[:, None] & (REPLAYED >= 0)
            z = logits.double().gather(1, REPLAYED.clamp(min=0))
            return *found, torch.where(
                own, z - z.masked_fill(REPLAYED < 0, -torch.inf).logsumexp(1, keepdim=True), 0.0
            )

        assert_scored(
            lambda h, w: apply(h, w, LABELS, INVERSE, 8, REPLAYED, *more), exact, STATES, WEIGHT
        )
        assert len(apply(STATES, WEIGHT, LABELS, INVERSE, 8, REPLAYED, *more)) == 2 + len(more)
        assert slots.counts == {"fused": 2}
    with prime_rl.bind(
        entropy_over="kept", missing="include"
    ):  # entropy over the set; a label that joins its set
        found = prime_rl_head._SequenceChunkedLogProbEntropyFn.apply(
            STATES, WEIGHT, LABELS, INVERSE, 8, REPLAYED
        )
    want = over(STATES @ WEIGHT.T * INVERSE[:, None], LABELS, sets, target=True)
    torch.testing.assert_close([x.double() for x in found], [*want], rtol=1e-5, atol=1e-5)


def test_prime_rl_records_go_to_the_rows_that_predict_their_tokens():
    """The bytes that its orchestrator sends, with a count for each token, of two texts."""

    def data(numbers, dtype=torch.int32):
        return torch.tensor(numbers, dtype=dtype).numpy().tobytes()

    ids, cuts = torch.tensor([1, 5, 7, 2, 4]), torch.tensor([0, 3, 5])
    record = SimpleNamespace(ids=data([5, 6, 7, 4]), counts=data([0, 2, 1, 0, 1]))
    sets = prime_rl.kept_sets(record, ids, cu_seqlens=cuts)
    assert (
        sets.padded().tolist() == TokenSets.from_lists([[5, 6], [7], [], [4], []]).padded().tolist()
        and sets.values is None
    )
    record.counts = data([0, 2, 2, 0, 1])
    refused(
        (
            lambda: prime_rl.kept_sets(record, ids),
            "counts give the rows 5 ids in all, but there are 4",
        )
    )
