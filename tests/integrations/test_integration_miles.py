"""miles: its log-probs over recorded sets, compared with float64, and with its own code if that is on the path."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import miles
from support.trainers import V, assert_same, log_softmax_of, stand_in, their_file, their_file_beside, value_and_gradient

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("stand_ins")

HOME = "miles.backends.training_utils"
TOKENS = torch.tensor([3, 9, 0, 22, 5, 7])
#: The set of each response token: the sampled id among others, or alone, as for a tool's token.
SETS = [[3, 1, 14], [9], [8, 0], [22, 2, 6, 4, 21], [5], [10, 7]]


class Record:
    """As miles' `RolloutSamplingMask`."""

    allows_empty_rows = False

    def __init__(self, sets: list[list[int]], partial: bool = False) -> None:
        self.ids = torch.tensor([i for row in sets for i in row], dtype=torch.int32)
        self.offsets = torch.tensor([0, *(len(row) for row in sets)]).cumsum(0)
        self.allows_empty_rows = partial

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Later(Record):
    """As its later versions, whose tensors are private."""

    def __init__(self, sets: list[list[int]], partial: bool = False) -> None:
        super().__init__(sets, partial)
        self._ids, self._offsets = self.ids, self.offsets
        del self.ids, self.offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _as_tensors(self) -> tuple[Tensor, Tensor]:
        return self._ids, self._offsets


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"rollout_top_p": 0.9, "rollout_top_k": -1, "use_kl_loss": False, "kl_coef": 0.0} | changes)


def exact(logits: Tensor, sets: list[list[int]], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob over each set, entropy over all."""
    rows = logits.double() / temperature
    logps = torch.stack([row[t] - (row[s] if s else row).logsumexp(0) for row, t, s in zip(rows, TOKENS, sets, strict=True)])
    return logps, log_softmax_of(rows, TOKENS)[1]


def scores(home: tuple[Any, Any], logits: Tensor, record: Any, order: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Computes scores as miles does, with the rows in the order of context parallelism."""
    masks, maths = home
    where = {"response_length": 6} if options.pop("told", False) else {}
    mask = masks.build_local_sampling_mask(logits[[*order]], record, order, tp_rank=0, **where)
    logps, entropy = maths.calculate_log_probs_and_entropy(
        logits[[*order]], TOKENS[[*order]], None, with_entropy=True, sampling_mask=mask, **options
    )
    back = torch.tensor([*order]).argsort()
    assert logps.shape == (6, 1) and entropy.shape == (6,)
    return logps[back, 0], entropy[back]


def assert_scored(score: Callable[[Tensor], tuple[Tensor, Tensor]], temperature: float = 1.0) -> None:
    logits, up = 2 * torch.randn(6, V, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 2, 6)

    def total(pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0] * up).sum() + 0.3 * (pair[1] * up).sum()

    want = value_and_gradient(lambda x: total(exact(x, SETS, temperature)), logits, torch.float64)
    assert_same(value_and_gradient(lambda x: total(score(x)), logits, torch.float32), want)
    torch.testing.assert_close(score(logits)[0].double(), exact(logits, SETS, temperature)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Record, Later])
@pytest.mark.parametrize("homes", [("sampling_mask", "loss_hub.math_utils"), ("data.sampling_mask", "loss.hub.math_utils")])
def test_miles_record_goes_to_the_rows_as_it_is(homes: tuple[str, str], kind: type[Record]) -> None:
    def theirs(*_: Any, **__: Any) -> str:
        return "theirs"

    masks = stand_in(f"{HOME}.{homes[0]}", build_local_sampling_mask=lambda *_, **__: "theirs")
    maths = stand_in(f"{HOME}.{homes[1]}", calculate_log_probs_and_entropy=theirs)
    with miles.bind(arguments(), strict=True) as slots:
        for order in (range(6), [0, 5, 4, 2, 1, 3]):
            assert_scored(lambda x, o=order: scores((masks, maths), x, kind(SETS), o, temperature=1.3), 1.3)
        logits = torch.randn(6, V)
        got = scores((masks, maths), logits, kind([*SETS[:5], []], partial=True), range(6))
        torch.testing.assert_close(got[0].double(), exact(logits, [*SETS[:5], []])[0], rtol=1e-5, atol=1e-5)
        assert maths.calculate_log_probs_and_entropy(logits[:0], TOKENS[:0], None)[0].shape == (0,)
        assert set(slots.counts) == {"fused"}
        for sets, rows, message in (
            ([*SETS[:5], []], range(6), "no ids for response token 5"),
            ([*SETS[:5], [10]], range(6), r"targets\[5\]=7 is not in its kept set"),
            (SETS, range(5), "5 tokens, but logits has 6 rows"),
        ):
            with pytest.raises(ValueError, match=message):
                mask = masks.build_local_sampling_mask(logits, kind(sets), rows, tp_rank=0)
                maths.calculate_log_probs_and_entropy(logits, TOKENS, None, sampling_mask=mask)
        kept = masks.build_local_sampling_mask(logits, kind(SETS), range(6), tp_rank=0)
        with pytest.raises(ValueError, match="true_on_policy=True with replay"):
            maths.calculate_log_probs_and_entropy(logits, TOKENS, None, true_on_policy=True, sampling_mask=kept)
    with miles.bind(arguments(), missing="include", entropy_over="kept"):
        alone = scores((masks, maths), logits, kind([[s[0]] for s in SETS[:5]] + [[10]]), range(6))
        pair = logits[5, [10, 7]].double().log_softmax(0)
        assert float(alone[0][5]) == pytest.approx(float(pair[1]), abs=1e-5) and alone[1][1] == 0
        assert float(alone[1][5]) == pytest.approx(float(-(pair.exp() * pair).sum()), abs=1e-5)
    with miles.bind(arguments(rollout_top_p=1.0)) as slots:  # without replay
        assert masks.build_local_sampling_mask() == "theirs"
        got = maths.calculate_log_probs_and_entropy(logits, TOKENS, None)
        torch.testing.assert_close(got[0][:, 0].double(), log_softmax_of(logits, TOKENS)[0], rtol=1e-5, atol=1e-5)
        assert got[1] is None
        assert maths.calculate_log_probs_and_entropy(logits, TOKENS, None, true_on_policy=True) == "theirs"


@pytest.mark.parametrize("change", [{"use_kl_loss": True}, {"kl_coef": 0.1}, {"use_opd": True}])
def test_miles_refuses_replay_with_another_network(change: dict[str, Any]) -> None:
    stand_in(f"{HOME}.sampling_mask", build_local_sampling_mask=lambda *_, **__: None)
    stand_in(f"{HOME}.loss_hub.math_utils", calculate_log_probs_and_entropy=lambda: None)
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.* with replay"):
        miles.bind(arguments(**change))
    with pytest.raises(ValueError, match="reference_over='vocabulary'"):
        miles.bind(arguments(**change), reference_over="vocabulary")
    miles.bind(arguments(**change), reference_over="kept").undo()
    miles.bind(arguments(**change, rollout_top_p=1.0)).undo()


@pytest.mark.parametrize(
    "theirs",
    [
        lambda logits, sampling_mask_ids, sampling_mask_offsets, response_indices, *, response_length, tp_rank: None,
        lambda sampling_mask, logits, response_indices, *, tp_rank: None,
        lambda logits, sampling_mask, response_indices, more, *, tp_rank: None,
    ],
)
def test_miles_with_other_arguments_is_refused_when_it_is_bound(theirs: Callable[..., Any]) -> None:
    """Its branches disagree on what a record is, under one version. Nothing is replaced."""
    masks = stand_in(f"{HOME}.sampling_mask", build_local_sampling_mask=theirs)
    maths = stand_in(f"{HOME}.loss_hub.math_utils", calculate_log_probs_and_entropy=len)
    with pytest.raises(
        RuntimeError, match=r"build_local_sampling_mask takes \(.*, but ours takes \(logits, sampling_mask, response_"
    ):
        miles.bind(arguments())
    assert masks.build_local_sampling_mask is theirs and maths.calculate_log_probs_and_entropy is len
    miles.bind(arguments(rollout_top_p=1.0)).undo()  # without replay it is not called


def test_miles_records_of_a_packed_batch() -> None:
    sets = miles.kept_sets([Record(SETS[:2]), Later([[4, 5], []], partial=True)], [4, 3], [2, 2])
    assert sets.padded().tolist() == [[-1] * 3, [3, 1, 14], [9, -1, -1], [-1] * 3, [4, 5, -1], [-1] * 3, [-1] * 3]
    for records, lengths, message in (
        ([Record(SETS[:2])], [3], r"masks\[0\] has sets for 2 tokens, but the response has 3"),
        ([Record([[1], []])], [2], r"masks\[0\] has no ids for response token 1"),
        ([Record([[1, 1]])], [1], r"masks\[0\]: .*twice in row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            miles.kept_sets(records, [5], lengths)


def test_miles_replay_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """miles' own functions over Megatron's cross entropy, for which torch's stands in, and ours in their place."""

    def cross_entropy(logits: Tensor, tokens: Tensor, group: Any) -> Tensor:
        return -log_softmax_of(logits, tokens)[0].to(logits)

    stand_in("megatron.core.fusions.fused_cross_entropy", fused_vocab_parallel_cross_entropy=cross_entropy)
    masks = their_file(f"{HOME}.sampling_mask", monkeypatch)
    cut = ("all_gather_with_cp", "slice_log_prob_with_cp", "slice_loss_masks_for_local_cp")
    stand_in(f"{HOME}.cp_utils", **dict.fromkeys(cut))
    stand_in(f"{HOME}.parallel", get_parallel_state=None)
    maths = their_file_beside(f"{HOME}.loss_hub.math_utils", masks)

    def entropy_of(logits: Tensor, group: Any) -> Tensor:
        return log_softmax_of(logits, TOKENS[: len(logits)])[1].to(logits)

    maths.compute_entropy_from_logits = entropy_of
    record = masks.RolloutSamplingMask.from_supports(SETS)
    for order in (range(6), [0, 5, 4, 2, 1, 3]):

        def score(x: Tensor, order: Any = order) -> tuple[Tensor, Tensor]:
            return scores((masks, maths), x, record, order, told=True)

        assert_scored(score)
        with miles.bind(arguments(), strict=True):
            assert_scored(score)
