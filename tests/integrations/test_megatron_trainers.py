"""slime, miles, NeMo-RL and verl on hidden states of Megatron models, through the functions that
are bound, on stand-ins with their signatures, against float64.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from grpo_kernels.integrations import megatron, miles, nemo_rl, slime, verl
from support.inside import count_products
from support.megatron import GPTModel, Wrapper
from support.trainers import stand_in

pytestmark = pytest.mark.usefixtures("stand_ins")

H, VOCAB, PADDED = 6, 13, 16
#: Prompt and response tokens of each sample; one has no response.
TOTALS, RESPONSES = [6, 3, 7, 2], [4, 2, 3, 0]
G = torch.Generator().manual_seed(5)
WEIGHT = torch.randn(PADDED, H, generator=G)
TRUNK_INPUT = torch.randn(sum(TOTALS), 1, H, generator=G)
TEXTS = [torch.randint(VOCAB, (n,), generator=G) for n in TOTALS]
TEMPERATURE = 0.8
UPSTREAM = torch.randn(2, sum(RESPONSES), generator=G)


def starts():
    """The first row that predicts a response token, for each sample."""
    end = 0
    for total, response in zip(TOTALS, RESPONSES, strict=True):
        end += total
        yield end - response - 1


def expected(sets=None):
    """(log-probs and entropies of responses, gradients of the trunk's input and the weight)."""
    weight = WEIGHT.double().requires_grad_()
    trunk_input = TRUNK_INPUT.double().requires_grad_()
    rows = [torch.arange(start, start + n) for start, n in zip(starts(), RESPONSES, strict=True)]
    tokens = torch.cat([text[len(text) - n :] for text, n in zip(TEXTS, RESPONSES, strict=True)])
    logits = trunk_input.tanh()[torch.cat(rows), 0] @ weight[:VOCAB].T / TEMPERATURE
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    if sets is not None:
        outside = torch.ones_like(logits, dtype=torch.bool)
        for i, ids in enumerate(sets):
            outside[i, [*ids, int(tokens[i])]] = False
        log_p = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    logps = log_p.gather(-1, tokens[:, None])[:, 0]
    (UPSTREAM[0] * logps + UPSTREAM[1] * entropy).sum().backward()
    return logps.detach(), entropy.detach(), trunk_input.grad, weight.grad


def compare(logits_of, model, sets=None):
    """The results of a trainer's function on what the model returns.

    logits_of   (logits) -> results with "log_probs" and "entropy"
    """
    trunk_input = TRUNK_INPUT.clone().requires_grad_()
    logits = Wrapper(model)(None, None, None, trunk_input)
    results = logits_of(logits)
    assert [len(x) for x in results["log_probs"]] == RESPONSES
    logps = torch.cat(results["log_probs"])
    entropy = torch.cat(results["entropy"])
    (UPSTREAM[0] * logps + UPSTREAM[1] * entropy).sum().backward()
    found = (logps, entropy, trunk_input.grad, model.head.grad)
    for a, b in zip(found, expected(sets), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def arguments(**changes):
    given = {
        "vocab_size": VOCAB,
        "rollout_temperature": TEMPERATURE,
        "entropy_coef": 0.1,
        "allgather_cp": False,
        "true_on_policy_mode": False,
    }
    return SimpleNamespace(**given | changes)


LAYOUT = {
    "unconcat_tokens": TEXTS,
    "total_lengths": TOTALS,
    "response_lengths": RESPONSES,
    "with_entropy": True,
}


def test_what_is_expected_is_of_responses_alone():
    logps, _, grad_input, grad_weight = expected()
    assert len(logps) == sum(RESPONSES)
    assert int(grad_input.any(-1).sum()) == sum(RESPONSES)
    assert not grad_weight[VOCAB:].any()


def test_select_and_numbers():
    model = GPTModel(WEIGHT)
    logits = megatron.run_with_processor(
        model,
        megatron.head_processor,
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        decoder_input=TRUNK_INPUT.view(6, 3, H),
    )
    assert logits.row_numbers().shape == (3, 6, 1)
    rows = logits.row_numbers()[1, 2:4, 0].long()
    assert torch.equal(logits.select(rows).hidden, logits.hidden[1, 2:4])


# ---- slime


@pytest.fixture
def slime_home():
    def shifted(num_rows, device, tokens, totals, responses, allgather_cp):
        return torch.cat([torch.cat([x[1:], x.new_zeros(1)]) for x in tokens])

    def extract(full, entropy, totals, responses, allgather_cp):
        rows = zip(starts(), responses, strict=True)
        return [full[start : start + n] for start, n in rows], []

    def scores(
        logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
        non_loss_data=True, top_p_token_ids=None, top_p_token_offsets=None,
    ):  # fmt: skip
        return "slime's own"

    def redistributed(results, *, logits_local_len, total_lengths, response_lengths):
        results["moved"] = [logits_local_len]

    stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=lambda *_: None)
    return stand_in(
        "slime.backends.megatron_utils.loss",
        _build_shifted_tokens=shifted,
        _extract_per_sample=extract,
        _allgather_cp_redistribute=redistributed,
        get_log_probs_and_entropy=scores,
    )


def test_slime_without_logits(slime_home, monkeypatch):
    model = GPTModel(WEIGHT)
    args = arguments()
    rows = count_products(monkeypatch)
    with slime.bind(head=True, strict=True) as slots:
        for _ in range(2):  # a hook is called before every step
            slime.skip_logits(args, [Wrapper(model)])
        compare(
            lambda logits: slime_home.get_log_probs_and_entropy(logits, args=args, **LAYOUT)[1],
            model,
        )
        assert {*slots.counts} == {"fused"}
    assert rows["d_weight"] == sum(RESPONSES)


def test_slime_without_logits_over_recorded_sets(slime_home):
    model = GPTModel(WEIGHT)
    sets = [[1, 2, 3 + i % 4] for i in range(sum(RESPONSES))]
    ids = [torch.tensor(sets).flatten()[:0]] * 4
    offsets = []
    first = 0
    for sample, n in enumerate(RESPONSES):
        ids[sample] = torch.tensor(sets[first : first + n], dtype=torch.int32).flatten()
        offsets.append(torch.arange(n + 1, dtype=torch.int32) * 3)
        first += n
    args = arguments()
    with slime.bind(head=True, strict=True):
        slime.skip_logits(args, [model])
        compare(
            lambda logits: slime_home.get_log_probs_and_entropy(
                logits, args=args, top_p_token_ids=ids, top_p_token_offsets=offsets, **LAYOUT
            )[1],
            model,
            sets,
        )


def test_what_is_left_to_slime(slime_home):
    model = GPTModel(WEIGHT)
    model.role = "critic"
    with slime.bind(head=True) as slots:
        slime.skip_logits(arguments(), [model])
        assert "forward" not in vars(model)
        logits = torch.randn(1, 3, PADDED)
        found = slime_home.get_log_probs_and_entropy(logits, args=arguments(), **LAYOUT)
        assert found == "slime's own"
        assert {*slots.counts} == {"slime: logits that an output layer has computed"}
    with pytest.raises(ValueError, match="use_score_centering"):
        slime.skip_logits(arguments(use_score_centering=True), [GPTModel(WEIGHT)])


def test_slime_moves_results_between_context_ranks(slime_home):
    model = GPTModel(WEIGHT)
    args = arguments(allgather_cp=True, entropy_coef=0.0)
    with slime.bind(head=True):
        slime.skip_logits(args, [model])
        logits = model(None, None, None, TRUNK_INPUT.clone().requires_grad_())
        results = slime_home.get_log_probs_and_entropy(logits, args=args, **LAYOUT)[1]
    assert results["moved"] == [sum(TOTALS)]
    assert torch.cat(results["log_probs"]).requires_grad
    assert not torch.cat(results["entropy"]).requires_grad


# ---- miles


@pytest.fixture
def miles_home():
    def responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths, max_seq_lens):
        assert logits.dtype == torch.float32 and logits.shape[0] == 1
        for start, tokens, n in zip(starts(), unconcat_tokens, response_lengths, strict=True):
            yield logits[0, start : start + n], tokens[-n:]

    def scores(
        logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
        entropy_requires_grad=True, non_loss_data=True, max_seq_lens=None,
    ):  # fmt: skip
        return "miles' own"

    def redistributed(results, *, logits, args, total_lengths, response_lengths, max_seq_lens):
        results["moved"] = [logits.size(1)]

    home = "miles.backends.training_utils.loss_hub"
    stand_in(f"{home}.math_utils", calculate_log_probs_and_entropy=lambda *_: None)
    return stand_in(
        f"{home}.logit_processors",
        get_responses=responses,
        get_log_probs_and_entropy=scores,
        allgather_cp_redistribute=redistributed,
    )


def test_miles_without_logits(miles_home, monkeypatch):
    model = GPTModel(WEIGHT)
    args = arguments()
    rows = count_products(monkeypatch)
    with miles.bind(args, head=True, strict=True) as slots:
        miles.skip_logits(args, [Wrapper(model)])
        compare(
            lambda logits: miles_home.get_log_probs_and_entropy(logits, args=args, **LAYOUT), model
        )
        assert {*slots.counts} == {"fused"}
    assert rows["d_weight"] == sum(RESPONSES)


def test_what_is_left_to_miles_and_refused(miles_home):
    with miles.bind(arguments(), head=True) as slots:
        found = miles_home.get_log_probs_and_entropy(torch.randn(1, 3, 4), args=None, **LAYOUT)
        assert found == "miles' own"
        assert {*slots.counts} == {"miles: logits that an output layer has computed"}
        model = GPTModel(WEIGHT)
        args = arguments(allgather_cp=True)
        miles.skip_logits(args, [model])
        logits = model(None, None, None, TRUNK_INPUT)
        results = miles_home.get_log_probs_and_entropy(
            logits, args=args, entropy_requires_grad=False, **LAYOUT
        )
        assert results["moved"] == [sum(TOTALS)]
        with pytest.raises(ValueError, match="true_on_policy_mode"):
            miles_home.get_log_probs_and_entropy(
                logits, args=arguments(true_on_policy_mode=True), **LAYOUT
            )
    with pytest.raises(ValueError, match="head=True"):
        miles.bind(arguments(rollout_top_p=0.9), head=True)


# ---- verl


@pytest.fixture
def verl_home(monkeypatch):
    path = "verl"
    monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for name in ("models", "mcore", "model_forward_fused"):
        module = ModuleType(f"{path}.{name}")
        setattr(sys.modules[path], name, module)
        path = f"{path}.{name}"
        monkeypatch.setitem(sys.modules, path, module)

    def fused_output_processor(
        *, hidden_states, output_layer, output_weight, labels, context, config, **_ignored
    ):
        return "verl's own"

    module.fused_output_processor = fused_output_processor
    return module


def test_verl_passes_our_processor_to_the_model(verl_home):
    model = GPTModel(WEIGHT[:VOCAB].clone())
    labels = TEXTS[0][None]
    context = SimpleNamespace(temperature=TEMPERATURE)
    trunk_input = TRUNK_INPUT[: TOTALS[0]]
    with verl.bind(hidden=False, logits=False, megatron=True, strict=True) as slots:
        out = model(
            labels,
            labels,
            None,
            trunk_input,
            labels,
            packed_seq_params=object(),
            output_processor=verl_home.fused_output_processor,
            output_processor_context=context,
        )
        assert {*slots.counts} == {"fused"}
    logits = trunk_input[:, 0].double().tanh() @ WEIGHT[:VOCAB].double().T / TEMPERATURE
    log_p = logits.log_softmax(-1)
    logps = log_p.gather(-1, labels.T)[:, 0]
    torch.testing.assert_close(out.log_probs[0].double(), logps, rtol=1e-5, atol=1e-5)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(out.entropy[0].double(), entropy, rtol=1e-5, atol=1e-5)
    assert out.logits is None
    assert verl_home.fused_output_processor.__module__ == __name__


# ---- NeMo-RL


def test_nemo_rl(mesh):
    """Binding, and the call; test_megatron.py has the ranks."""

    def theirs(
        tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target,
        vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None,
        chunk_size=None,
    ):  # fmt: skip
        logits = tensor_parallel_hidden_states.transpose(0, 1) @ output_weight_layer.T
        return logits.log_softmax(-1)[:, :-1].gather(-1, target[:, 1:, None])[..., 0]

    home = stand_in(
        "nemo_rl.distributed.model_utils", from_parallel_hidden_states_to_logprobs=theirs
    )
    hidden = TRUNK_INPUT[:6].clone().requires_grad_()
    weight = WEIGHT.clone().requires_grad_()
    target = TEXTS[0][None]
    group = mesh.get_group()
    bounds = {"vocab_start_index": 0, "vocab_end_index": PADDED, "tp_group": group}
    want = theirs(hidden, weight, False, target, **bounds)
    want_gradients = torch.autograd.grad(want.sin().sum(), (hidden, weight))
    with (
        pytest.warns(UserWarning, match="They agree in values and gradients"),
        nemo_rl.bind() as slots,
    ):
        for _ in range(2):
            found = home.from_parallel_hidden_states_to_logprobs(
                hidden, weight, False, target, cp_group=group, chunk_size=4, **bounds
            )
        assert slots.counts == {"fused": 2}
    gradients = torch.autograd.grad(found.sin().sum(), (hidden, weight))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, want_gradients, rtol=1e-5, atol=1e-5)
    alone = nemo_rl.from_parallel_hidden_states_to_logprobs(
        hidden, weight, False, target, inference_only=True, **bounds
    )
    assert not alone.requires_grad
    bounds["vocab_end_index"] = PADDED - 1
    with pytest.raises(ValueError, match="vocab_end_index"):
        nemo_rl.from_parallel_hidden_states_to_logprobs(hidden, weight, False, target, **bounds)
