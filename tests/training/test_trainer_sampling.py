"""Sampling of the reference trainer, and the alignment of logits with completion tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")


from grpo_kernels.training.sampling import Completions, completion_logits, draw, end_ids, sample
from support.runs import tiny


class NextId:
    """A model whose logits are known: at each position nearly all mass is on (input id + 1) mod V."""

    vocabulary = 7

    def __call__(self, input_ids: torch.Tensor, *, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        hot = torch.nn.functional.one_hot((input_ids + 1) % self.vocabulary, self.vocabulary).float()
        return SimpleNamespace(logits=20 * hot[:, -logits_to_keep:])


def test_row_t_of_the_logits_predicts_completion_token_t() -> None:
    ids = torch.tensor([[0, 0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 0]])  # two prompts of width 3, each id its predecessor's successor
    attention = torch.ones_like(ids, dtype=torch.bool)
    completions = Completions(ids, attention, 3)
    logits = completion_logits(NextId(), completions)
    assert torch.equal(logits.argmax(-1), completions.targets)


class EveryId(NextId):
    def __call__(self, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        return super().__call__(input_ids, **options | {"logits_to_keep": input_ids.shape[1]})


def test_a_model_that_ignores_logits_to_keep_is_refused() -> None:
    ids = torch.arange(6)[None]
    with pytest.raises(ValueError, match="EveryId gives 5 logits for logits_to_keep=3"):
        completion_logits(EveryId(), Completions(ids, torch.ones_like(ids, dtype=torch.bool), 3))


def test_completion_logits_equal_the_models_own(tok: Any) -> None:
    model = tiny(tok).double().eval()
    ids = torch.randint(0, len(tok), (2, 7))
    attention = torch.ones_like(ids, dtype=torch.bool)
    full = model(input_ids=ids).logits
    torch.testing.assert_close(completion_logits(model, Completions(ids, attention, 4)), full[:, 3:6])


def test_left_padding_and_the_group_change_no_logit(tok: Any) -> None:
    model = tiny(tok).double()
    alone = sample(model, [[3, 10, 4, 13]], group_size=1, max_new_tokens=5, ends=[tok.eos_token_id], temperature=0)
    both = sample(
        model, [[3, 10, 4, 13], [1, 2, 3, 4, 5, 6, 7]], group_size=2, max_new_tokens=5, ends=[tok.eos_token_id], temperature=0
    )
    assert both.tokens[0] == both.tokens[1] == alone.tokens[0]
    padded, plain = completion_logits(model, both)[0], completion_logits(model, alone)[0]
    length = len(alone.tokens[0])
    torch.testing.assert_close(padded[:length], plain[:length])


def test_cached_sampling_takes_the_argmax_of_the_full_forward(tok: Any) -> None:
    model = tiny(tok)
    out = sample(model, [[1, 10, 2, 13], [5, 6]], group_size=1, max_new_tokens=6, ends=[tok.eos_token_id], temperature=0)
    expected = completion_logits(model, out).argmax(-1)
    assert torch.equal(expected[out.mask], out.targets[out.mask])


def test_the_end_token_is_trained_on_and_padding_is_not(tok: Any) -> None:
    """Padding is the end token itself here, and still only the first one counts."""
    end = tok.eos_token_id
    assert tok.pad_token_id == end
    torch.manual_seed(1)
    out = sample(tiny(tok), [[1, 2, 3]] * 8, group_size=8, max_new_tokens=12, ends=[end])
    ended = 0
    for ids, row in zip(out.targets.tolist(), out.mask.tolist(), strict=True):
        expected = ids.index(end) + 1 if end in ids else len(ids)
        ended += end in ids[:-1]
        assert row == [t < expected for t in range(len(ids))]
    assert ended > 5


def test_several_end_tokens(tok: Any) -> None:
    model = tiny(tok)
    model.generation_config.eos_token_id = [3, 5]
    assert end_ids(model, tok) == sorted({3, 5, tok.eos_token_id})
    out = sample(model, [[1, 2]] * 4, group_size=8, max_new_tokens=10, ends=end_ids(model, tok))
    assert all(not {3, 5} & set(ids[:-1]) for ids in out.tokens)


def choose(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, uniform: Any) -> torch.Tensor:
    return draw(logits, temperature, top_p, top_k, 0.0, uniform)[0]


def test_a_sampled_token_comes_with_its_log_prob_under_what_it_was_drawn_from() -> None:
    """The log-prob is after temperature, top-k, top-p and min-p, renormalised over the remaining tokens."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(400, 4)
    for options, shares in (
        ((1.0, 1.0, 0, 0.0), [0.5, 0.3, 0.15, 0.05]),
        ((1.0, 1.0, 2, 0.0), [0.625, 0.375, 0.0, 0.0]),
        ((1.0, 0.79, 0, 0.0), [0.625, 0.375, 0.0, 0.0]),
        ((1.0, 1.0, 0, 0.4), [0.625, 0.375, 0.0, 0.0]),
        ((0.5, 1.0, 3, 0.0), [0.25 / 0.3625, 0.09 / 0.3625, 0.0225 / 0.3625, 0.0]),
    ):
        tokens, logps, _ = draw(logits, *options, lambda: torch.rand(400, dtype=torch.float64))
        torch.testing.assert_close(logps, torch.tensor(shares).log()[tokens])
        assert len(set(tokens.tolist())) == sum(share > 0 for share in shares)
    assert draw(logits, 0.0, 1.0, 0, 0.0, torch.rand)[1].eq(0).all()  # greedy: it could be no other


@pytest.mark.parametrize("options", [(1.0, 1.0, 0, 0.0), (0.8, 0.9, 7, 0.0), (1.0, 1.0, 7, 0.0), (0.0, 1.0, 0, 0.0)])
def test_copies_of_a_row_are_drawn_as_rows_of_their_own(options: tuple[Any, ...]) -> None:
    logits, numbers = torch.randn(3, 20), torch.rand(12, dtype=torch.float64)
    tokens, logps, sets = draw(logits, *options, lambda: numbers, 4)
    tokens_of_rows, logps_of_rows, sets_of_rows = draw(logits.repeat_interleave(4, 0), *options, lambda: numbers)
    assert torch.equal(tokens, tokens_of_rows) and torch.equal(logps, logps_of_rows) and len(set(tokens.tolist())) > 2
    assert (sets is None) == (sets_of_rows is None)
    assert sets is None or torch.equal(sets.mask(20), sets_of_rows.mask(20))


def test_top_k_top_p_and_temperature() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)

    def draws() -> torch.Tensor:
        return torch.rand(4000, dtype=torch.float64)

    def shares(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
        return torch.bincount(choose(logits, temperature, top_p, top_k, draws), minlength=4) / 4000

    tolerance = dict(atol=0.03, rtol=0.0)
    torch.testing.assert_close(shares(), torch.tensor([0.5, 0.3, 0.15, 0.05]), **tolerance)
    torch.testing.assert_close(shares(top_k=2), torch.tensor([0.625, 0.375, 0.0, 0.0]), **tolerance)
    torch.testing.assert_close(shares(top_p=0.79), torch.tensor([0.625, 0.375, 0.0, 0.0]), **tolerance)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(shares(temperature=0.5), squared / squared.sum(), **tolerance)
    assert choose(logits, 1.0, 1e-6, 0, draws).eq(0).all()
    assert choose(logits, 0.0, 1.0, 0, draws).eq(0).all()


def test_a_number_chooses_its_token_and_never_one_that_cannot_come() -> None:
    """The cumulative probabilities are 0, 1/4, 1/4, 3/4, 1, 1: the first, third and last token have none."""
    logits = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]]).log().expand(6, 6)
    last = 1 - 2**-53
    at = torch.tensor([0.0, 0.25, 0.2499999, 0.75, 0.7499999, last], dtype=torch.float64)
    assert choose(logits, 1.0, 1.0, 0, lambda: at).tolist() == [1, 3, 1, 4, 3, 4]
    many = torch.rand(1, 5000).log_softmax(-1).expand(2, -1).masked_fill(torch.arange(5000) > 4990, -torch.inf)
    assert (choose(many, 1.0, 1.0, 0, lambda: at[[0, 5]]) <= 4990).all()
    assert choose(many, 1.0, 1.0, 0, lambda: torch.ones(2)).tolist() == 2 * [int(many[0].argmax())]
