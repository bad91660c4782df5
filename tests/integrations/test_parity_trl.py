"""Parity with TRL 1.16: `GRPOTrainer._compute_loss` itself, in a real trainer with a tiny model, against ours.

Both are compared with `reference`, float64 and written from the formulas (../shared/peers.md names their papers), in loss and
in gradient with respect to hidden states and head: a factor that TRL and we have in common would show. Where TRL has a defect
it is compared with a reference that has it too, and we with one that has not.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else TRL calls home
pytest.importorskip("trl", minversion="1.16.0")

import tokenizers
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.experimental.a2po import A2POTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.utils import add_fused_lm_head

from grpo_kernels import LogitTransform, Objective, TokenBatch, group_advantages, grpo_loss, linear_grpo_loss, linear_logprobs
from grpo_kernels.formulas.filters import EntropyQuantile, OffPolicySequences
from grpo_kernels.formulas.surrogates import A2po, Cispo, Clip, Gmpo, Sapo, Vespo
from grpo_kernels.rewards.advantages import NUMERICS as ADVANTAGE_NUMERICS
from grpo_kernels.rewards.corrections import importance_weights, without_truncated
from grpo_kernels.rewards.entropy import AdaptiveEntropyCoef

Tensor = torch.Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")

TEMPERATURE, VOCAB, WIDTH, PROMPT, LENGTH = 0.9, 12, 16, 3, 9
PAD, EOS = 0, 1
ACCUMULATION, PER_GENERATION, PROCESSES = 2, 4, 2

#: The constants of the grid, none of them a default. TRL's names.
CONSTANTS: dict[str, Any] = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.27,
    "sapo_temperature_pos": 0.9,
    "sapo_temperature_neg": 1.3,
    "vespo_k_pos": 1.8,
    "vespo_lambda_pos": 2.6,
    "vespo_k_neg": 2.7,
    "vespo_lambda_neg": 2.1,
}
CAP, DELTA, BETA, COEF, SHARE, OFF_POLICY = 1.25, 1.4, 0.3, 0.2, 0.4, 0.25


# ---- TRL


def tokenizer() -> Any:
    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{chr(ord("a") + i): i + 2 for i in range(VOCAB - 2)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def language_model() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.3,
        eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(**options: Any) -> GRPOTrainer:
        torch.manual_seed(0)
        arguments = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
            per_device_train_batch_size=8, num_generations=4, max_completion_length=LENGTH, temperature=TEMPERATURE, **options,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=language_model(), args=arguments, reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["ab"] * 8}), processing_class=tokenizer(),
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1  # which its training loop would set
        return trainer

    return make


@pytest.fixture(scope="module")
def trainer(make_trainer: Any) -> GRPOTrainer:
    return make_trainer()


class Ranks:
    """An accelerator that says there are more processes; only TRL's normaliser asks."""

    def __init__(self, accelerator: Any, num_processes: int) -> None:
        self._accelerator, self.num_processes = accelerator, num_processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@dataclass(frozen=True)
class Case:
    """One configuration, in TRL's words."""

    loss_type: str = "grpo"
    level: str = "token"
    beta: float = 0.0
    corrected: bool = True
    delta: float | None = None
    on_policy: bool = False
    share: float = 1.0
    off_policy: float | None = None
    coef: float = 0.0
    accumulation: int = ACCUMULATION
    per_generation: int = PER_GENERATION
    processes: int = PROCESSES
    training: bool = True
    cap: float = CAP
    constants: tuple[tuple[str, float], ...] = tuple(CONSTANTS.items())

    @property
    def numbers(self) -> dict[str, float]:
        return dict(self.constants)


@dataclass(frozen=True, eq=False)
class Data:
    """A micro-batch as TRL has it, and the policy's hidden states and head, which give its log-probs."""

    hidden: Tensor  # [B, T, H]: row t predicts token t of the completion
    head: Tensor  # [V, H]
    prompt_ids: Tensor
    ids: Tensor  # [B, T]
    completion_mask: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    advantages: Tensor
    tool_mask: Tensor | None = None
    weights: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        return (self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask).bool()

    @property
    def num_items(self) -> int:
        """Of a generation batch, of which this is one part."""
        return 11 + PER_GENERATION * PROCESSES * int(self.mask.sum())


def configure(trainer: GRPOTrainer, case: Case, patch: pytest.MonkeyPatch) -> None:
    """Sets the attributes that `GRPOTrainer.__init__` would set from its arguments."""
    numbers = case.numbers
    on_trainer = {
        "loss_type": case.loss_type,
        "importance_sampling_level": case.level,
        "beta": case.beta,
        "epsilon_low": numbers["epsilon_low"],
        "epsilon_high": case.cap if case.loss_type == "cispo" else numbers["epsilon_high"],
        "top_entropy_quantile": case.share,
        "off_policy_mask_threshold": case.off_policy,
        "entropy_coef": case.coef,
        "_entropy_bonus_enabled": case.coef != 0,
        "current_gradient_accumulation_steps": case.accumulation,
        "accelerator": Ranks(trainer.accelerator, case.processes),
    }
    on_arguments = {
        "delta": case.delta,
        "use_bias_correction_kl": case.corrected,
        "steps_per_generation": case.per_generation,
        **{name: value for name, value in numbers.items() if not name.startswith("epsilon")},
    }
    for owner, settings in ((trainer, on_trainer), (trainer.args, on_arguments)):
        for name, value in settings.items():
            assert hasattr(owner, name)
            patch.setattr(owner, name, value)


def inputs_of(case: Case, data: Data) -> dict[str, Tensor]:
    inputs = {
        "prompt_ids": data.prompt_ids,
        "prompt_mask": (data.prompt_ids != PAD).long(),
        "completion_ids": data.ids,
        "completion_mask": data.completion_mask,
        "advantages": data.advantages,
        "num_items_in_batch": torch.tensor(data.num_items),
        "sampling_per_token_logps": data.sampler,
    }
    optional = {
        "old_per_token_logps": None if case.on_policy else data.old,
        "ref_per_token_logps": data.ref if case.beta else None,
        "tool_mask": data.tool_mask,
        "importance_sampling_ratio": data.weights,
    }
    return inputs | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Result:
    loss: float
    d_hidden: Tensor
    d_head: Tensor
    metrics: dict[str, float]
    #: The sum of the absolute values of all terms: rounding errors of the loss are relative to it.
    scale: float = 0.0


def trls(
    trainer: GRPOTrainer,
    case: Case,
    data: Data,
    method: Any = GRPOTrainer._compute_loss,
    inputs: dict[str, Any] | None = None,
) -> Result:
    """What the method of TRL's class gives. Gradients are taken at the last hidden states, below the fused head."""
    captured: list[Tensor] = []
    hook = trainer.model.model.norm.register_forward_hook(lambda module, args, output: captured.append(output))
    with pytest.MonkeyPatch.context() as patch:
        configure(trainer, case, patch)
        if data.weights is not None:
            patch.setattr(trainer, "use_vllm", True)
        trainer.model.train(case.training)
        loss = method(trainer, trainer.model, inputs or inputs_of(case, data))
    hook.remove()
    d_hidden, d_head = torch.autograd.grad(loss, [captured[0], trainer.model.lm_head.weight])
    metrics = {name: values[-1] for name, values in trainer._metrics["train" if case.training else "eval"].items()}
    trainer._metrics["train"].clear(), trainer._metrics["eval"].clear()
    trainer.model.train()
    rows = slice(data.prompt_ids.shape[1] - 1, -1)
    assert not d_hidden[:, : rows.start].any() and not d_hidden[:, -1].any()
    return Result(float(loss.detach()), d_hidden[:, rows], d_head, metrics)


# ---- ours


def surrogate_of(case: Case) -> Any:
    n = case.numbers
    if case.loss_type == "cispo":
        return Cispo(case.cap)
    if case.loss_type == "sapo":
        return Sapo(n["sapo_temperature_pos"], n["sapo_temperature_neg"])
    if case.loss_type == "vespo":
        return Vespo(n["vespo_k_pos"], n["vespo_lambda_pos"], n["vespo_k_neg"], n["vespo_lambda_neg"])
    return Clip(n["epsilon_low"], n["epsilon_high"], math.inf if case.delta is None else case.delta)


def objective_of(case: Case) -> Objective:
    changes: dict[str, Any] = {"surrogate": surrogate_of(case), "beta": case.beta}
    if case.loss_type != "vespo":  # whose level is that of its weight: TRL's option is about its KL only
        changes["level"] = case.level
    if not case.corrected:
        changes["kl"] = "k3"
    filters = (EntropyQuantile(case.share),) if case.share < 1 else ()
    if case.off_policy is not None:
        filters += (OffPolicySequences(case.off_policy),)
    coef = case.coef / (case.accumulation if case.training else 1)
    return Objective.preset(case.loss_type, numerics="trl", filters=filters, entropy_coef=coef, **changes)


def normalizer_of(case: Case, data: Data) -> float:
    """TRL's denominators as `normalizer=`."""
    accumulation = case.accumulation if case.training else 1
    if case.loss_type in ("dapo", "cispo", "vespo"):
        return max(data.num_items, 1) / case.processes * (accumulation / case.per_generation if case.training else 1)
    if case.loss_type == "bnpo":
        return max(float(data.mask.sum()), 1.0) * accumulation
    return data.ids.shape[0] * accumulation * (LENGTH if case.loss_type == "dr_grpo" else 1)


def batch_of(case: Case, data: Data) -> TokenBatch:
    return TokenBatch(
        data.ids, data.advantages, mask=data.mask, old_logps=None if case.on_policy else data.old,
        ref_logps=data.ref if case.beta else None, sampler_logps=data.sampler, weights=data.weights,
    )  # fmt: skip


def ours(case: Case, data: Data, objective: Objective | None = None, normalizer: float | None = None) -> Result:
    hidden, head = (x.clone().requires_grad_() for x in (data.hidden, data.head))
    out = grpo_loss(
        hidden @ head.T, batch_of(case, data), objective or objective_of(case),
        transform=LogitTransform(temperature=TEMPERATURE), normalizer=normalizer or normalizer_of(case, data),
    )  # fmt: skip
    d_hidden, d_head = torch.autograd.grad(out.loss, [hidden, head])
    return Result(float(out.loss.detach()), d_hidden, d_head, {name: float(value) for name, value in out.metrics.items()})


# ---- the reference, float64


def quantile(values: list[float], share: float) -> float:
    """With linear interpolation between neighbours."""
    ordered, position = sorted(values), share * (len(values) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def policy_term(
    case: Case, x: Tensor, logp: Tensor, A: Tensor, own: Tensor, weights: Tensor | None, rejected: float | None
) -> Tensor:
    """Per-token policy loss of one sequence, with log-ratios `x` at the case's level and each token's `own`."""
    n, r = case.numbers, x.exp()
    if case.loss_type in CLIPPED:
        unclipped = r if case.delta is None else r.clamp(max=case.delta)
        return -torch.minimum(unclipped * A, r.clamp(1 - n["epsilon_low"], 1 + n["epsilon_high"]) * A)
    if case.loss_type == "cispo":
        return -r.clamp(max=case.cap).detach() * A * logp
    if case.loss_type == "sapo":
        tau = torch.where(A > 0, n["sapo_temperature_pos"], n["sapo_temperature_neg"])
        return -4 / tau * torch.sigmoid(tau * (r - 1)) * A
    assert case.loss_type == "vespo"
    log_w = own.clamp(-20, 20).sum()
    if weights is not None:
        log_w = log_w + torch.where(weights > 0, weights.log(), rejected or 0.0).sum()
    log_w = log_w.clamp(math.log(1e-8), 20).detach()
    k = torch.where(A >= 0, n["vespo_k_pos"], n["vespo_k_neg"])
    rate = torch.where(A >= 0, n["vespo_lambda_pos"], n["vespo_lambda_neg"])
    return -torch.exp(rate + k * log_w - rate * log_w.exp()) * A * logp


def reference(case: Case, data: Data, *, rejected: float | None = None) -> Result:
    """From the formulas. A token of weight 0 leaves VESPO's loss and its sequence's log-ratio; with `rejected` it stays in
    the loss and adds that to the log-ratio, log 1e-8 in TRL."""
    hidden, head = (x.double().requires_grad_() for x in (data.hidden, data.head))
    log_p = torch.log_softmax(hidden @ head.T / TEMPERATURE, -1)
    logps = log_p.gather(2, data.ids[..., None])[..., 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    old = logps.detach() if case.on_policy else data.old.double()
    n, mask, sequences = case.numbers, data.mask, data.ids.shape[0]
    floor = -math.inf if case.share == 1 or not mask.any() else quantile(entropies[mask].tolist(), 1 - case.share)

    rows, kls, bonus, low, high = [], [], [], [], []
    for b in range(sequences):
        at = mask[b].nonzero()[:, 0]
        if at.numel() == 0:
            continue  # it adds nothing, but counts in B
        logp, own = logps[b, at], logps[b, at] - old[b, at]
        A = data.advantages.double()[b].expand(data.ids.shape[1])[at]
        w = None if data.weights is None else data.weights.double()[b].expand(data.ids.shape[1])[at]
        x = own if case.level == "token" else own.mean().expand(at.numel())
        loss = policy_term(case, x, logp, A, own, w, rejected)
        keep = entropies[b, at] >= floor
        bonus += entropies[b, at][keep].unbind()
        if case.off_policy is not None:
            moved = (data.sampler[b, at].double() - logp.detach()).nan_to_num(nan=0.0).mean()
            keep = keep & ((A >= 0) | (moved <= case.off_policy))
        loss = torch.where(keep, loss, 0.0)
        if w is not None and case.loss_type != "vespo":
            loss = loss * w
        elif w is not None and rejected is None:
            loss = torch.where(w > 0, loss, 0.0)
        if case.beta:
            d = data.ref[b, at].double() - logp
            kl = torch.exp(d) - d - 1
            if case.corrected:
                kl = kl * x.exp()
            kls += kl.detach().tolist()
            loss = loss + case.beta * kl
        rows.append(loss)
        top = 1 + n["epsilon_high"] if case.loss_type != "cispo" else case.cap
        low += ((x.exp() < 1 - n["epsilon_low"]) & (A < 0)).tolist()
        high += ((x.exp() > top) & (A > 0)).tolist()

    tokens = sum(row.numel() for row in rows)
    inner = [row.numel() if case.loss_type in ("grpo", "sapo") else 1 for row in rows]
    accumulation = case.accumulation if case.training else 1
    if case.loss_type in ("grpo", "sapo", "luspo"):
        outer = sequences * accumulation
    elif case.loss_type == "bnpo":
        outer = tokens * accumulation
    elif case.loss_type == "dr_grpo":
        outer = sequences * LENGTH * accumulation
    else:  # this process's share of the tokens of one optimiser step
        steps = case.per_generation / accumulation if case.training else 1
        outer = data.num_items / case.processes / steps
    terms = [row / (i * outer) for row, i in zip(rows, inner, strict=True)]
    if case.coef and bonus:
        terms.append(-case.coef / accumulation * torch.stack(bonus).mean()[None])
    loss = torch.cat(terms).sum()
    d_hidden, d_head = torch.autograd.grad(loss, [hidden, head])
    metrics = {
        "clip_low": sum(low) / tokens,
        "clip_high": sum(high) / tokens,
        "entropy": float(entropies[mask].mean().detach()),
        "kl": sum(kls) / tokens,
    }
    return Result(float(loss.detach()), d_hidden, d_head, metrics, float(torch.cat(terms).detach().abs().sum()))


def assert_same(got: Result, want: Result, what: object, tolerance: float = 1e-5) -> None:
    assert abs(got.loss - want.loss) <= tolerance * want.scale, f"{what}: loss {got.loss}, not {want.loss}"
    for name in ("d_hidden", "d_head"):
        a, b = getattr(got, name).double(), getattr(want, name)
        error, size = float((a - b).abs().max()), float(b.abs().max())
        assert error <= tolerance * size, f"{what}: {name} is off by {error} of {size}"


def different(a: Result, b: Result, share: float = 0.01) -> bool:
    return float((a.d_hidden - b.d_hidden).abs().max()) > share * float(b.d_hidden.abs().max())


# ---- the batch


@pytest.fixture(scope="module")
def plain(trainer: GRPOTrainer) -> Data:
    """Eight sequences of unequal length, one of them fully masked, one with advantage 0; old, reference and sampler away
    from the policy, in steps that differ from sequence to sequence so that mean ratios leave the clip range as well."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.tensor([9, 4, 7, 8, 9, 2, 6, 8])
    ids = torch.randint(2, VOCAB, (8, LENGTH), generator=g)
    completion_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    completion_mask[3] = 0
    prompt_ids = torch.randint(2, VOCAB, (8, PROMPT), generator=g)
    prompt_ids[1, 0] = prompt_ids[5, :2] = PAD  # on the left
    model = trainer.model
    with torch.no_grad():
        attention = torch.cat([prompt_ids != PAD, completion_mask.bool()], 1).long()
        hidden = model.model(input_ids=torch.cat([prompt_ids, ids], 1), attention_mask=attention).last_hidden_state
        hidden = hidden[:, PROMPT - 1 : -1].clone()
        head = model.lm_head.weight.clone()
        logps = torch.log_softmax(hidden @ head.T / TEMPERATURE, -1).gather(2, ids[..., None])[..., 0]
    shift = torch.tensor([0.32, -0.35, -0.3, 0.1, 0.5, 0.15, 0.05, 0.15])

    def near(spread: float, steps: Tensor | float = 0.0) -> Tensor:
        moved = logps - torch.as_tensor(steps).reshape(-1, 1) - spread * torch.randn(logps.shape, generator=g)
        return moved * completion_mask

    old = near(0.15, shift)
    sampler = old + 0.1 * torch.randn(old.shape, generator=g)
    sampler[4] += 0.4  # within the bound of the off-policy mask,
    sampler[7] += 0.5  # and beyond it
    sampler[0, 1] = sampler[2, 3] = math.nan  # not scored
    advantages = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0, -0.4])
    return Data(hidden, head, prompt_ids, ids, completion_mask, old, near(0.5, 0.2), sampler, advantages)


def with_token_weights(data: Data, reject: bool = True) -> Data:
    """As TRL makes them in mode "token_mask" (or, without rejection, "token_truncate"): 1 where not trained."""
    g = torch.Generator().manual_seed(4)
    w = torch.exp(0.3 * torch.randn(data.ids.shape, generator=g))
    w = torch.where(w > 1.35, 0.0, w) if reject else w.clamp(max=1.35)
    return replace(data, weights=torch.where(data.mask, w, 1.0))


def with_tools(data: Data) -> Data:
    tool_mask = torch.ones_like(data.completion_mask)
    tool_mask[0, 2:5] = tool_mask[2, 1] = tool_mask[7, 4:] = 0
    return replace(data, tool_mask=tool_mask)


def options(data: Data) -> dict[str, tuple[dict[str, Any], Data]]:
    """name -> (changes of the case, data)"""
    truncated = data.completion_mask.clone()
    truncated[[0, 7]] = 0  # on top of sequence 3
    per_token = data.advantages[:, None] + 0.5 * torch.randn(data.ids.shape, generator=torch.Generator().manual_seed(5))
    sequence_weights = torch.tensor([0.7, 1.6, 0.0, 1.0, 2.2, 0.9, 1.1, 1.4])[:, None]
    together = with_token_weights(with_tools(data))
    return {
        "nothing else": ({}, data),
        "on-policy": ({"on_policy": True}, data),
        "tool mask": ({}, with_tools(data)),
        "truncated completions": ({}, replace(data, completion_mask=truncated)),
        "entropy quantile": ({"share": SHARE}, data),
        "off-policy mask": ({"off_policy": OFF_POLICY}, data),
        "token weights": ({}, with_token_weights(data)),
        "sequence weights": ({}, replace(data, weights=sequence_weights)),
        "entropy bonus": ({"coef": COEF}, data),
        "advantages per token": ({}, replace(data, advantages=per_token)),
        "together": ({"share": SHARE, "off_policy": OFF_POLICY, "coef": COEF}, together),
    }


#: Options of the grid that TRL refuses, see test_what_trl_refuses.
REFUSED = {("vespo", "sequence weights")}


def cases(loss_type: str, level: str, data: Data) -> Iterator[tuple[str, Case, Data]]:
    deltas = (None, DELTA) if loss_type in CLIPPED else (None,)
    for (name, (changes, d)), (beta, corrected), delta in itertools.product(
        options(data).items(), ((0.0, True), (BETA, True), (BETA, False)), deltas
    ):
        if (loss_type, name) not in REFUSED:
            yield name, Case(loss_type, level, beta, corrected, delta, **changes), d


# ---- tests


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, "VESPO loss requires"),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate"}, "VESPO loss requires"),
        ({"vllm_importance_sampling_clip_min": 3.0}, "must be less than"),
    ],
)
def test_what_trl_refuses(make_trainer: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_trainer(use_vllm=True, **options)


def test_an_unknown_option_is_refused_by_both(trainer: GRPOTrainer, plain: Data) -> None:
    for name, value in (("loss_type", "ppo2"), ("importance_sampling_level", "group")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="Unknown"):
            configure(trainer, Case(), patch)
            patch.setattr(trainer, name, value)
            trainer._compute_loss(trainer.model, inputs_of(Case(), plain))
    with pytest.raises(ValueError, match="preset"):
        Objective.preset("ppo2", numerics="trl")
    with pytest.raises(ValueError, match="level"):
        Objective.preset("grpo", numerics="trl", level="group")
    with pytest.raises(ValueError, match="level"):
        Objective.preset("vespo", numerics="trl", level="sequence")
    with pytest.raises(ValueError, match="weights"):  # one per sequence
        objective = Objective.preset("vespo", numerics="trl")
        ours(Case("vespo"), replace(plain, weights=torch.ones(8, 1)), objective)
    with pytest.raises(ValueError, match="high"):
        importance_weights(batch_of(Case(), plain), low=3.0, high=3.0 - 1e-3)


def test_these_are_all_loss_types_of_trl() -> None:
    """A loss type that a new TRL adds is noticed here."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    conditions = re.findall(r"self\.loss_type (?:==|!=|in) (\[[^\]]*\]|\"\w+\")", source)
    assert len(conditions) > 8
    assert set(re.findall(r'"(\w+)"', " ".join(conditions))) == set(LOSS_TYPES)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_combination(trainer: GRPOTrainer, plain: Data, loss_type: str, level: str) -> None:
    """loss_type x level x (no KL, corrected KL, plain KL) x delta x masks, weights, bonus: loss, both gradients, metrics."""
    for name, case, data in cases(loss_type, level, plain):
        theirs, mine = trls(trainer, case, data), ours(case, data)
        want = reference(case, data)
        their_want = want
        if loss_type == "vespo" and data.weights is not None:  # see test_vespo_with_rejected_tokens
            their_want = reference(case, data, rejected=math.log(1e-8))
        if (loss_type, level, case.corrected) == ("vespo", "sequence", True):
            # TRL, which warns of it, then weighs VESPO's KL by a mean ratio that its loss does not have. Ours by the token's.
            want = reference(replace(case, level="token"), data)
        assert_same(theirs, their_want, f"TRL, {name}, {case}")
        assert_same(mine, want, f"ours, {name}, {case}")
        assert float(want.d_hidden.abs().max()) > 1e-4 and abs(want.loss) > 1e-4, (name, case)
        assert_metrics(mine, want, case, {})
        assert_metrics(theirs, their_want, case, THEIR_METRICS)


THEIR_METRICS = {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}


def assert_metrics(got: Result, want: Result, case: Case, names: dict[str, str]) -> None:
    """Those that mean the same. TRL's clip ratios at sequence level are means over sequences, fully masked ones included;
    ours are always means over tokens."""
    wanted = ["entropy"] + ["kl"] * (case.beta != 0)
    if case.level == "token" or not names:
        wanted += ["clip_low", "clip_high"] if case.loss_type in CLIPPED else ["clip_high"] * (case.loss_type == "cispo")
    if names and case.loss_type == "cispo":
        names = {"clip_high": "cispo_clip_ratio"}
    for name in wanted:
        assert got.metrics[names.get(name, name)] == pytest.approx(want.metrics[name], rel=1e-5, abs=1e-7), (name, case)


def test_the_grid_is_not_trivial(plain: Data) -> None:
    """Clipping acts on a good share of the tokens, delta on some, and each option changes the gradient."""
    for level in ("token", "sequence"):
        case = Case("dapo", level)
        metrics = reference(case, plain).metrics
        assert metrics["clip_low"] > 0.1 and metrics["clip_high"] > 0.1 and metrics["clip_low"] + metrics["clip_high"] < 0.6
        assert reference(Case("cispo", level), plain).metrics["clip_high"] > 0.1
        assert different(reference(replace(case, delta=DELTA), plain), reference(case, plain))
        for loss_type in LOSS_TYPES:
            base = reference(Case(loss_type, level), plain)
            for name, (changes, data) in options(plain).items():
                if name != "nothing else":
                    assert different(reference(Case(loss_type, level, **changes), data), base), (loss_type, name)
            kl = reference(Case(loss_type, level, BETA), plain)
            assert different(kl, base) and different(kl, reference(Case(loss_type, level, BETA, False), plain)), loss_type
    rows = (reference(Case("vespo"), plain).d_hidden.abs().amax(2) > 1e-4).any(1)
    assert int(rows.sum()) >= 4  # sequences that VESPO's weight has not silenced


#: TRL's defaults, from the configuration itself.
def default_constants(trainer: GRPOTrainer) -> tuple[tuple[str, float], ...]:
    arguments = trainer.args
    assert arguments.epsilon_high is None and arguments.delta is None and arguments.beta == 0
    numbers = {name: getattr(arguments, name) for name in CONSTANTS if not name.startswith("epsilon")}
    return tuple((numbers | {"epsilon_low": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high}).items())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_presets_have_trls_defaults(trainer: GRPOTrainer, plain: Data, loss_type: str) -> None:
    """Nothing passed but beta, whose KL TRL corrects by default, and an entropy bonus."""
    level = "sequence" if loss_type == "luspo" else "token"  # the one that TRL advises
    corrected = trainer.args.use_bias_correction_kl
    case = Case(loss_type, level, BETA, corrected, coef=COEF, cap=5.0, constants=default_constants(trainer))
    objective = Objective.preset(loss_type, numerics="trl", beta=BETA, entropy_coef=COEF / ACCUMULATION)
    mine = ours(case, plain, objective)
    assert_same(mine, reference(case, plain), loss_type)
    assert_same(trls(trainer, case, plain), reference(case, plain), loss_type)
    if loss_type == "grpo":
        case = replace(case, level="sequence")
        mine = ours(case, plain, Objective.preset("gspo", numerics="trl", beta=BETA, entropy_coef=COEF / ACCUMULATION))
        assert_same(mine, reference(case, plain), "gspo")


def test_cispo_without_epsilon_high(trainer: GRPOTrainer, plain: Data) -> None:
    """TRL's defect: `epsilon_high` is CISPO's cap, an absolute ratio, and defaults to `epsilon`. So all ratios are 0.2."""
    assert trainer.epsilon_high == trainer.args.epsilon == 0.2
    case = Case("cispo", cap=trainer.epsilon_high)
    assert_same(trls(trainer, case, plain), reference(case, plain), "TRL")
    default = Objective.preset("cispo", numerics="trl")
    assert default.surrogate == Cispo(5.0)
    assert_same(ours(case, plain, default), reference(replace(case, cap=5.0), plain), "ours")
    assert different(reference(case, plain), reference(replace(case, cap=5.0), plain), 0.5)


def test_vespo_with_rejected_tokens(trainer: GRPOTrainer, plain: Data) -> None:
    """TRL's defect: a token that the sampler's mask took out counts log 1e-8 in the log-ratio of its sequence, which
    silences the others. Ours leaves it out. Without rejection the two are the same."""
    case, data = Case("vespo"), with_token_weights(plain)
    rejected = (data.weights == 0).any(1)
    assert 2 <= int(rejected.sum()) <= 6
    theirs, mine = trls(trainer, case, data), ours(case, data)
    assert float(theirs.d_hidden[rejected].abs().max()) < 1e-3 * float(mine.d_hidden[rejected].abs().max())
    assert_same(mine, reference(case, data), "ours")
    data = with_token_weights(plain, reject=False)
    for got in (trls(trainer, case, data), ours(case, data)):
        assert_same(got, reference(case, data), "truncated")


def test_vespo_weights_of_padding(trainer: GRPOTrainer, plain: Data) -> None:
    """TRL's defect: the log-weights of positions that are not trained count as well. A clip range without 1 shows it."""
    case = Case("vespo")
    data = replace(plain, weights=torch.full(plain.ids.shape, 0.9))
    theirs, want = trls(trainer, case, data), reference(case, data)
    assert_same(ours(case, data), want, "ours")
    assert different(theirs, want, 0.1)
    full = plain.mask.all(1)
    assert full.any()
    assert float((theirs.d_hidden - want.d_hidden)[full].abs().max()) < 1e-5 * float(want.d_hidden.abs().max())


def test_vespo_far_from_the_old_policy(trainer: GRPOTrainer, plain: Data) -> None:
    """Log-ratios beyond the clamps: per token at 20, per sequence at log 1e-8 and at 20."""
    old = plain.old.clone()
    old[0] += 0.32
    old[0, :2] += torch.tensor([25.0, -20.5])  # clamped, they cancel
    old[2] += 5.0
    old[4] -= 5.0
    data = replace(plain, old=old)
    for got in (trls(trainer, Case("vespo"), data), ours(Case("vespo"), data)):
        assert_same(got, reference(Case("vespo"), data), "clamps")
    assert reference(Case("vespo"), data).d_hidden[0].abs().max() > 1e-4


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_delta_below_the_clip_range(trainer: GRPOTrainer, plain: Data, loss_type: str) -> None:
    """delta < 1 + epsilon_high also bounds positive advantages."""
    for level in ("token", "sequence"):
        case = Case(loss_type, level, delta=1.1)
        for got in (trls(trainer, case, plain), ours(case, plain)):
            assert_same(got, reference(case, plain), level)
        assert different(reference(case, plain), reference(replace(case, delta=DELTA), plain))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_normalizers(trainer: GRPOTrainer, plain: Data, loss_type: str) -> None:
    """Training and evaluation, accumulation steps, steps per generation, processes."""
    for training, accumulation, per_generation, processes in (
        (True, 1, 1, 1),
        (True, 3, 1, 4),
        (True, 2, 6, 1),
        (False, 3, 6, 4),
    ):
        case = Case(
            loss_type, beta=BETA, coef=COEF, training=training, accumulation=accumulation, per_generation=per_generation,
            processes=processes,
        )  # fmt: skip
        for who, got in (("TRL", trls(trainer, case, plain)), ("ours", ours(case, plain))):
            assert_same(got, reference(case, plain), (who, case))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_of_trl_are_one_batch_of_ours(trainer: GRPOTrainer, plain: Data, loss_type: str) -> None:
    """TRL accumulates two halves; ours sees both at once and needs no normalizer. Not so for bnpo, whose mean is that of
    a micro-batch: there ours is the mean of the two."""
    data = with_tools(plain)
    case = Case(loss_type, beta=BETA, accumulation=2, per_generation=2, processes=1)
    halves = [
        replace(data, **{name: getattr(data, name)[half] for name in vars(data) if name not in ("head", "weights")})
        for half in (slice(0, 4), slice(4, 8))
    ]
    tokens = int(data.mask.sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Data, "num_items", tokens)
        theirs = [trls(trainer, case, half) for half in halves]
    objective = replace(objective_of(case), max_tokens=LENGTH)

    def alone(part: Data) -> Result:
        hidden, head = (x.clone().requires_grad_() for x in (part.hidden, part.head))
        transform = LogitTransform(temperature=TEMPERATURE)
        out = grpo_loss(hidden @ head.T, batch_of(case, part), objective, transform=transform)
        return Result(float(out.loss.detach()), *torch.autograd.grad(out.loss, [hidden, head]), {})

    d_head = sum(part.d_head for part in theirs)
    mine = alone(data).d_head if loss_type != "bnpo" else sum(alone(half).d_head for half in halves) / 2
    assert float((mine - d_head).abs().max()) <= 1e-5 * float(d_head.abs().max())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_to_train_on(trainer: GRPOTrainer, plain: Data, loss_type: str, level: str) -> None:
    """A micro-batch of masked completions is a differentiable 0, whatever is switched on."""
    data = replace(plain, completion_mask=torch.zeros_like(plain.completion_mask))
    for changes in ({}, {"share": SHARE}, {"coef": COEF}, {"coef": COEF, "share": SHARE}, {"off_policy": OFF_POLICY}):
        case = Case(loss_type, level, BETA, **changes)
        for got in (trls(trainer, case, data), ours(case, data)):
            assert got.loss == 0 and not got.d_hidden.any() and not got.d_head.any(), changes


def test_adaptive_entropy_coefficient(trainer: GRPOTrainer, plain: Data) -> None:
    """TRL's controller over four optimiser steps of two micro-batches each, with `AdaptiveEntropyCoef` beside it."""
    entropy = reference(Case(), plain).metrics["entropy"]
    settings = {"entropy_target": entropy + 1e-3, "entropy_coef_delta": 0.03, "entropy_coef_min": 0.01, "entropy_coef_max": 0.1}
    mine = AdaptiveEntropyCoef(target=settings["entropy_target"], step=0.03, low=0.01, high=0.1, initial=0.05)
    accelerator = trainer.accelerator
    coefs = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(trainer.args, name, value)
        patch.setattr(trainer, "use_adaptive_entropy", True)
        for name, value in (("entropy_coef", 0.05), ("_last_world_entropy", math.inf), ("_entropy_window_stats", None)):
            patch.setattr(trainer, name, value)
        case = replace(Case(), processes=1)
        for step in range(4):
            if step == 2:  # entropy is now above the target
                patch.setattr(trainer.args, "entropy_target", entropy - 1e-3)
                mine.target = entropy - 1e-3
            coefs.append(mine.coef)
            for micro in range(2):
                patch.setattr(accelerator.gradient_state, "sync_gradients", micro == 1)
                with pytest.MonkeyPatch.context() as inner:
                    state = {"entropy_coef": trainer.entropy_coef, "_entropy_bonus_enabled": True}
                    configure(trainer, case, inner)
                    for name, value in state.items():
                        inner.setattr(trainer, name, value)
                    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs_of(case, plain))
                    updated = trainer.entropy_coef
                patch.setattr(trainer, "entropy_coef", updated)
                want = reference(replace(case, coef=mine.coef), plain)
                assert abs(float(loss.detach()) - want.loss) <= 1e-5 * want.scale
            mine.update(entropy)
            assert mine.state_dict()["coef"] == pytest.approx(trainer.entropy_coef)
    trainer._metrics["train"].clear()
    assert coefs[0] == 0 and coefs[1] == pytest.approx(0.08) and coefs[2] == 0 and coefs[3] == 0


# ---- from sampled completions to the gradient of every parameter


MODES = {
    "token_truncate": {"level": "token", "mode": "truncate", "low": 0.7, "high": 1.4},
    "token_mask": {"level": "token", "mode": "mask", "low": 0.7, "high": 1.4},
    "sequence_truncate": {"level": "sequence", "mode": "truncate", "low": 0.7, "high": 1.4},
    "sequence_mask": {"level": "sequence", "mode": "mask", "high": 3.0},  # TRL's defaults
}


@dataclass(frozen=True, eq=False)
class Rollout:
    """What a sampler returns, as lists, and the same padded to the right (prompts to the left)."""

    prompts: list[list[int]]
    completions: list[list[int]]
    environment: list[list[int]]  # 0: put there by a tool
    rewards: list[float | None]

    @classmethod
    def make(cls, g: torch.Generator) -> Rollout:
        def tokens(lengths: tuple[int, ...]) -> list[list[int]]:
            return [torch.randint(2, VOCAB, (n,), generator=g).tolist() for n in lengths]

        prompts, completions = tokens((3, 2, 3, 1, 3, 3, 2, 3)), tokens((9, 4, 7, 9, 2, 6, 8, 5))
        for i in (1, 2, 4, 5, 6, 7):
            completions[i][-1] = EOS  # the others were cut off
        environment = [[int(i % 3 > 0 or not 1 < t < 4) for t in range(len(c))] for i, c in enumerate(completions)]
        return cls(prompts, completions, environment, [1.0, 0.2, 0.0, 0.5, 0.3, None, 0.9, 0.1])

    def padded(self, rows: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (LENGTH - len(row)) for row in rows])

    @property
    def prompt_ids(self) -> Tensor:
        return torch.tensor([[PAD] * (PROMPT - len(row)) + row for row in self.prompts])

    @property
    def ids(self) -> Tensor:
        return self.padded(self.completions, PAD)

    def masks(self, without_cut_off: bool) -> tuple[Tensor, Tensor]:
        """(completion mask, tool mask)"""
        mask = self.padded([[1] * len(row) for row in self.completions], 0)
        if without_cut_off:
            mask = without_truncated(mask, torch.tensor([row[-1] == EOS for row in self.completions])).long()
        return mask, self.padded(self.environment, 1)

    def function(self, sampler: Tensor) -> Any:
        """TRL's `rollout_func`. A token that the sampler did not score is None there."""
        rows = [row[: len(c)].tolist() for row, c in zip(sampler, self.completions, strict=True)]
        logprobs = [[None if math.isnan(x) else x for x in row] for row in rows]
        returned = {"prompt_ids": self.prompts, "completion_ids": self.completions, "logprobs": logprobs}
        return lambda prompts, trainer: returned | {"env_mask": self.environment}


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize(
    "mode, loss_type, level",
    [
        ("token_truncate", "vespo", "token"),
        ("token_truncate", "cispo", "token"),
        ("token_mask", "dapo", "token"),
        ("sequence_truncate", "grpo", "sequence"),
        ("sequence_mask", "dr_grpo", "token"),
    ],
)
def test_from_rollout_to_parameters(
    trainer: GRPOTrainer, request: pytest.FixtureRequest, mode: str, loss_type: str, level: str, mask_truncated: bool
) -> None:
    """Nothing of TRL is replaced but the sampler, by its own hook for that: rewards, advantages, old and reference log-probs,
    sampler weights, masks and denominator are its own. Ours makes them from the same rollout."""
    g = torch.Generator().manual_seed(6)
    rollout, options = Rollout.make(g), MODES[mode]
    ids, prompt_ids = rollout.ids, rollout.prompt_ids
    completion_mask, tool_mask = rollout.masks(mask_truncated)
    mask = (completion_mask * tool_mask).bool()
    transform = LogitTransform(temperature=TEMPERATURE)
    policy, weights = trainer.model, copy.deepcopy(trainer.model.state_dict())
    request.addfinalizer(lambda: policy.load_state_dict(weights))
    request.addfinalizer(trainer._metrics["train"].clear)
    frozen = language_model()
    frozen.load_state_dict({name: w + 0.05 * torch.randn(w.shape, generator=g) for name, w in weights.items()})

    def hidden_of(model: Any) -> Tensor:
        attention = torch.cat([prompt_ids != PAD, completion_mask.bool()], 1).long()
        states = model.model(input_ids=torch.cat([prompt_ids, ids], 1), attention_mask=attention).last_hidden_state
        return states[:, PROMPT - 1 : -1]

    with torch.no_grad():
        old, ref = (
            linear_logprobs(hidden_of(model), model.lm_head.weight, ids, mask=mask, transform=transform)[0]
            for model in (policy, frozen)
        )
    sampler = old + 0.3 * torch.randn(old.shape, generator=g)
    sampler[7] -= 0.2  # a product of weights beyond 3
    sampler[0, 5] = sampler[6, 0] = math.nan

    case = Case(loss_type, level, BETA, accumulation=1, per_generation=1, processes=1)
    with pytest.MonkeyPatch.context() as patch:
        configure(trainer, case, patch)
        add_fused_lm_head(frozen, temperature=TEMPERATURE)
        patch.setattr(trainer, "_last_loaded_step", trainer.state.global_step, raising=False)  # vLLM has the weights
        for name, value in {
            "rollout_func": rollout.function(sampler),
            "use_vllm": True,
            "ref_model": frozen,
            "mask_truncated_completions": mask_truncated,
            "reward_funcs": [lambda completions, **_: rollout.rewards],
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": options.get("low"),
            "vllm_importance_sampling_clip_max": options["high"],
        }.items():
            patch.setattr(trainer, name, value)
        inputs = trainer._generate_and_score_completions([{"prompt": "ab"}] * 8)
        with torch.no_grad():  # the step that makes the samples off-policy
            for parameter in policy.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=g)
        loss = trainer._compute_loss(policy, inputs)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    theirs = torch.autograd.grad(loss, parameters)

    rewards = torch.tensor([math.nan if r is None else r for r in rollout.rewards])
    advantages = group_advantages(rewards, group_size=4, **ADVANTAGE_NUMERICS["trl"])
    batch = TokenBatch(ids, advantages, mask=mask, old_logps=old, ref_logps=ref, sampler_logps=sampler)
    batch = replace(batch, weights=importance_weights(batch, **options))
    assert int(inputs["num_items_in_batch"]) == int(mask.sum())
    torch.testing.assert_close(advantages, inputs["advantages"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(old, inputs["old_per_token_logps"] * mask, rtol=1e-5, atol=1e-5)
    their_weights = inputs["importance_sampling_ratio"].expand(ids.shape) * mask
    torch.testing.assert_close(batch.weights, their_weights, rtol=1e-5, atol=1e-6)
    edges = torch.tensor([0.0, options["high"], options.get("low", 0.0)])
    assert 0.05 < torch.isin(their_weights[mask], edges).float().mean() < 0.95

    hidden = hidden_of(policy)
    objective = replace(objective_of(case), max_tokens=LENGTH)
    out = linear_grpo_loss(hidden, policy.lm_head.weight, batch, objective, transform=transform)
    mine = torch.autograd.grad(out.loss, parameters)
    for name, a, b in zip(names, mine, theirs, strict=True):
        assert float((a - b).abs().max()) <= 2e-5 * float(b.abs().max()), name
    assert (out.metrics["ratio_max"] > 1.2 and out.metrics["ratio_min"] < 0.8) or loss_type == "vespo"  # a product
    data = Data(
        hidden.detach(), policy.lm_head.weight.detach(), prompt_ids, ids, completion_mask, old, ref, sampler, advantages,
        tool_mask, batch.weights,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Data, "num_items", int(mask.sum()))
        want = reference(case, data)
    for got in (float(out.loss.detach()), float(loss.detach())):
        assert abs(got - want.loss) <= 1e-5 * want.scale


# ---- TRL's other trainers of the family


def whole_sequences(term: Any, data: Data, beta: float = 0.0, temperature: float = TEMPERATURE) -> tuple[Result, float]:
    """A plain mean over sequences of term(log-ratios, reference's log-ratios, A), plus beta * the mean over sequences of their
    mean k3. And what the fully masked ones would add to the value, which TRL does."""
    hidden, head = (x.double().requires_grad_() for x in (data.hidden, data.head))
    logps = torch.log_softmax(hidden @ head.T / temperature, -1).gather(2, data.ids[..., None])[..., 0]
    terms, empty, nothing = [], 0.0, torch.zeros(0, dtype=torch.float64)
    for b in range(data.ids.shape[0]):
        at, A = data.mask[b].nonzero()[:, 0], data.advantages[b].double()
        if at.numel() == 0:
            empty += float(term(nothing, nothing, A)) / data.ids.shape[0]
            continue
        logp, d = logps[b, at], data.ref[b, at].double() - logps[b, at]
        terms.append(term(logp - data.old[b, at].double(), -d, A) + beta * (torch.exp(d) - d - 1).mean())
    loss = torch.stack(terms).sum() / data.ids.shape[0]
    scale = float(torch.stack(terms).detach().abs().sum()) / data.ids.shape[0]
    return Result(float(loss.detach()), *torch.autograd.grad(loss, [hidden, head]), {}, scale), empty


def check_whole_sequences(theirs: Result, mine: Result, want: Result, empty: float) -> None:
    """TRL's defect, in value only: a fully masked sequence, whose ratio is 1, counts. Ours is without it."""
    assert empty != 0
    assert_same(replace(theirs, loss=theirs.loss - empty), want, "TRL")
    assert_same(mine, want, "ours")


@pytest.mark.parametrize("beta", [0.0, BETA])
def test_gmpo(trainer: GRPOTrainer, plain: Data, beta: float) -> None:
    """Geometric means, clipped per token in log space. (TRL's `top_entropy_quantile` narrows the mean itself; ours, a filter,
    takes tokens out of the loss. That combination is not compared.)"""
    low, high, case = 0.2, 0.27, Case("grpo", beta=beta, accumulation=1)

    def term(x: Tensor, _: Tensor, A: Tensor) -> Tensor:
        sign = A.sign()
        clipped = sign * torch.minimum(sign * x, sign * x.clamp(-low, high))
        return -A * torch.exp(clipped.sum() / max(x.numel(), 1))

    for data in (plain, with_tools(plain)):
        theirs = trls(trainer, case, data, GMPOTrainer._compute_loss)
        objective = Objective.preset("gmpo", numerics="trl", beta=beta, surrogate=Gmpo(low, high))
        mine = ours(case, data, objective, normalizer=float(data.ids.shape[0]))
        check_whole_sequences(theirs, mine, *whole_sequences(term, data, beta))
        assert mine.metrics["entropy"] == pytest.approx(theirs.metrics["entropy"], rel=1e-5)
    assert different(whole_sequences(term, plain)[0], whole_sequences(lambda x, d, A: -A * torch.exp(x.mean()), plain)[0])
    assert Objective.preset("gmpo", numerics="trl").surrogate == Gmpo(0.4, 0.4)


def test_rloo(trainer: GRPOTrainer, plain: Data) -> None:
    """The ratio of the whole completion, clipped."""
    logps = torch.log_softmax(plain.hidden @ plain.head.T / TEMPERATURE, -1).gather(2, plain.ids[..., None])[..., 0]
    data = replace(plain, old=(logps - (logps - plain.old) / 4) * plain.completion_mask)  # a product leaves the range sooner

    def term(x: Tensor, _: Tensor, A: Tensor) -> Tensor:
        ratio = torch.exp(x.sum())
        return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)

    case = Case(constants=default_constants(trainer))
    inputs = inputs_of(case, data) | {"old_logps": (data.old * data.completion_mask).sum(1)}
    theirs = trls(trainer, case, data, RLOOTrainer._compute_loss, inputs)
    mine = ours(case, data, Objective.preset("rloo", numerics="trl"), normalizer=8.0)
    want, empty = whole_sequences(term, data)
    check_whole_sequences(theirs, mine, want, empty)
    silent = ~want.d_hidden.any(2).any(1) & data.mask.any(1) & (data.advantages != 0)
    assert 1 <= int(silent.sum()) <= 4  # clipped


def test_a2po(trainer: GRPOTrainer, plain: Data) -> None:
    """The regression of A*-PO, at temperature 1. Its anchor is the reference, in ours the batch's old_logps."""
    data, beta = replace(plain, old=plain.ref), 0.4

    def term(x: Tensor, _: Tensor, A: Tensor) -> Tensor:
        return (beta * x.sum() - A) ** 2

    base = inputs_of(Case(), data)
    attention = torch.cat([base["prompt_mask"], base["completion_mask"]], 1)
    inputs = {
        "input_ids": torch.cat([data.prompt_ids, data.ids], 1),
        "attention_mask": attention,
        "logits_to_keep": LENGTH,
        "ref_logps": (data.ref * data.completion_mask).sum(1),
        "rewards": data.advantages + 0.25,
        "v_star": torch.full((8,), 0.25),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.args, "beta2", beta, raising=False)
        patch.setattr(trainer, "model_kwarg_keys", {"logits_to_keep"}, raising=False)
        patch.setattr(trainer, "_get_sequence_logps", A2POTrainer._get_sequence_logps.__get__(trainer), raising=False)
        theirs = trls(trainer, Case(), data, A2POTrainer.compute_loss, inputs)
    objective = Objective.preset("a2po", numerics="trl", surrogate=A2po(beta))
    hidden, head = (x.clone().requires_grad_() for x in (data.hidden, data.head))
    out = grpo_loss(hidden @ head.T, batch_of(Case(), data), objective)
    mine = Result(float(out.loss.detach()), *torch.autograd.grad(out.loss, [hidden, head]), {})
    check_whole_sequences(theirs, mine, *whole_sequences(term, data, temperature=1.0))
