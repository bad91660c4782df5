"""Everything that the core refuses:

a ValueError before any work, which names the argument, its value and the remedy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels
from grpo_kernels import (
    Denominators,
    Exact,
    FutureKl,
    Head,
    LogitTransform,
    Objective,
    Options,
    SamplerMismatch,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.batch import shift_sets, shift_targets
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.formulas.centering import ScoreCentering
from grpo_kernels.formulas.filters import EntropyFloor, OffPolicySequences, TrustRegion
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.formulas.surrogates import A2po, Cispo, Clip, ClipCov, Dro, Gmpo, KlCov, Vespo
from grpo_kernels.loss_output import ABSENT_UNLESS, METRICS
from grpo_kernels.losses import objective_loss
from grpo_kernels.model import FusedLMHead
from grpo_kernels.objective import NUMERICS, PRESETS
from grpo_kernels.rewards.corrections import CORRECTIONS
from grpo_kernels.rewards.estimators import ADVANTAGES, Evidence
from grpo_kernels.token_sets import check_sets
from support.bits import snapshot
from support.inside import values_unseen
from support.public_functions import with_options

Call = Callable[[], Any]

B, T, V, H = 3, 4, 11, 8
INF, NAN, MEAN = math.inf, math.nan, "seq-mean-token-mean"
IDS = torch.arange(B * T).view(B, T) % V
ONES, PER_TOKEN = torch.ones(B), torch.ones(B, T)
LOGITS, HIDDEN, WEIGHT = (
    torch.randn(s, generator=torch.Generator().manual_seed(0))
    for s in ((B, T, V), (B, T, H), (V, H))
)
BIAS, OTHER = torch.ones(V), torch.zeros(V, H)
KEPT = TokenSets.from_lists([[i, 10] for i in range(9)] + [[]] * 3)
FIELDS = {field.name for field in dataclasses.fields(TokenBatch)}
EXACT = Objective.preset("dapo", beta=0.3, kl=Exact())
TEACHER = HIDDEN, OTHER
PACKED = Objective(aggregate="token-sum")
RIGHT = TokenBatch(IDS, ONES)


def batch(**changes):
    return TokenBatch(**{"targets": IDS, "advantages": ONES, **changes})


def packed(cu_seqlens=None, **changes):
    cuts = None if cu_seqlens is None else torch.as_tensor(cu_seqlens)
    return batch(
        **{"targets": IDS.view(-1), "advantages": torch.ones(B * T), "cu_seqlens": cuts, **changes}
    )


def of_given(given):
    """A batch, whose fields may stand among the keywords of a loss."""
    return (
        given.pop("of")
        if "of" in given
        else batch(**{k: given.pop(k) for k in FIELDS & given.keys()})
    )


def loss(objective=PACKED, logits=LOGITS, **given):
    of = of_given(given)
    return grpo_loss(logits, of, objective, **with_options(**{"backend": "eager", **given}))


def linear(objective=PACKED, hidden=HIDDEN, weight=WEIGHT, **given):
    of = of_given(given)
    weight = Head(weight, given.pop("bias")) if "bias" in given else weight
    return linear_grpo_loss(
        hidden, weight, of, objective, **with_options(**{"backend": "eager", **given})
    )


def logps(logits=LOGITS, targets=IDS, **options):
    return token_logprobs(logits, targets, **with_options(**{"backend": "eager", **options}))


def linear_logps(hidden=HIDDEN, weight=WEIGHT, targets=IDS, **options):
    weight = Head(weight, options.pop("bias")) if "bias" in options else weight
    return linear_logprobs(
        hidden, weight, targets, **with_options(**{"backend": "eager", **options})
    )


def with_ids(value):
    return IDS.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value))


def sets(ids, value=-1.0):
    """Of all rows, with a value."""
    lists = TokenSets.from_lists(ids * (B * T // len(ids)))
    return lists.with_values(torch.full((lists.ids.numel(),), value))


def head(*given, **options):
    return FusedLMHead(torch.nn.Linear(H, V))(HIDDEN, *given, **options)


def objective_given(logps=PER_TOKEN, batch=RIGHT, objective=PACKED, **options):
    return objective_loss(logps, batch, objective, **options)


def transform(temperature):
    return LogitTransform(temperature)


def kl_where_old(logp, old_logp, ref_logp):
    return ops.where(logp - old_logp > -2.5, logp - ref_logp, 0.0), ops.where(
        logp - old_logp > -2.5, 1.0, 0.0
    )


#: What a message must say, its parts between bars -> what is wrong: keywords, or the value of the
#: one that the message begins with.
Wrong = dict[str, Any]


def wrong(says, value):
    return (
        value
        if isinstance(value, dict)
        else {says.split("|")[0].split(" ")[0].split("=")[0].split("[")[0]: value}
    )


#: Fields of a batch.
BATCH = {
    "targets|[3, 4, 8]|[B, T]": torch.zeros(B, T, 8, dtype=torch.int64),
    "targets|torch.float32|int64": PER_TOKEN,
    "targets|list|int64 tensor": [1],
    "advantages|[4]|[3, 4], [3] or [3, 1]": torch.ones(T),
    "advantages|torch.bool|floating-point": ONES > 0,
    "advantages|list|tensor": [1.0],
    "advantages|[3]|[12]|cu_seqlens": {"targets": IDS.view(-1)},
    "nll_weights|[4]|[3, 4], [3] or [3, 1]": torch.ones(T),
    "mask|[3, 5]|[3, 4]|the same": torch.ones(B, T + 1).bool(),
    "mask|torch.float32|.bool()": PER_TOKEN,
    "mask[1, 2]=-100|bool (or 0/1 integer)|labels != -100 or segments > 0": with_ids(-100).clamp(max=1),
    "on_policy|[4]|[3, 4], [3] or [3, 1]": torch.ones(T).bool(),
    "on_policy|torch.float32|.bool()": ONES,
    "on_policy[1, 2]=2|bool (or 0/1 integer)": (IDS * 0).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(2)),
    "on_policy is a list: pass a bool tensor": [True],
    "groups|[3, 4]|one integer id per sequence|[3]": IDS,
    "groups|torch.float32|integer": ONES,
    "cu_seqlens|[3, 4]|packed": torch.tensor([0, 12]),
    "targets has shape [1, 12]. Pass targets[0], and the same of what goes with it.": {
        "targets": IDS.view(1, -1), "advantages": torch.ones(1, B * T), "cu_seqlens": torch.tensor([0, 12])
    },
    "rows|[12]|[3, 4]|the same": IDS.view(-1),
    "rows|torch.float32|int64": PER_TOKEN,
    "rows is a list: pass a tensor": [0, 1],
    "kept is a list: pass": [[1], [2]],
    "has 12 tokens, but kept have 3 rows": {"kept": KEPT[:3]},
    "missing='drop': it must be one of": "drop",
    "logp_terms|give each id its coefficient": KEPT,
    "prob_terms|list the ids of both in both": {"logp_terms": sets([[1]]), "prob_terms": sets([[2]])},
    "logp_terms have 3 rows": {"logp_terms": sets([[1]])[:3]},
    "context_group|init_process_group": object(),
    **{f"{name}|[3]|[3, 4]|the same": {name: ONES} for name in ("old_logps", "ref_logps", "sampler_logps")},
    **{f"{name}|torch.int64|floating-point": {name: IDS} for name in ("old_logps", "sampler_logps", "nll_weights")},
    **{
        f"{name}|meta|cpu|move": {name: x.to("meta")}
        for name, x in {
            "advantages": ONES, "mask": PER_TOKEN > 0, "groups": IDS[:, 0], "nll_weights": ONES, "on_policy": ONES > 0,
            **dict.fromkeys(("old_logps", "ref_logps", "weights", "sampler_logps"), PER_TOKEN),
        }.items()
    },
}  # fmt: skip

OFFSETS = {
    "cu_seqlens|[1, 12]|from 0": [1, 12],
    "cu_seqlens|[0, 5, 11]|12": [0, 5, 11],
    "cu_seqlens|[0, 7, 5, 12]|rise": [0, 7, 5, 12],
    "cu_seqlens|torch.float32|int32": [0.0, 12.0],
}

#: Keywords of both functions of logits.
OF_LOGITS = {
    "logits|[3, 3, 11]|[3, 4]|logits[:, :-1]": LOGITS[:, :-1],
    "logits|[3, 4, 0]|vocabulary is empty": LOGITS[..., :0],
    "logits|torch.int64|float32, bfloat16 or float16": LOGITS.long(),
    "logits|list|tensor": [1.0],
    "logits|meta|cpu|move": LOGITS.to("meta"),
    "temperature|[4]|[3, 4]": {"transform": transform(torch.ones(T))},
    "temperature|0.0|above 0": {"transform": transform(torch.tensor([1.0, 0.0, 1.0]))},
    "temperature|-2.0|above 0": {"transform": transform(torch.tensor(-2.0))},
    "transform is 0.7: pass a LogitTransform, for example LogitTransform(temperature=0.7)": 0.7,
    "backend|'cuda-fast'|eager, cpu, triton": "cuda-fast",
    "inplace=True|[3, 4, 11]|[0, 11, 1]|inplace=False": {"logits": LOGITS[:1].expand(B, T, V), "inplace": True},
    "inplace=True|[4, 1, 1]|share memory|inplace=False": {"logits": torch.zeros(23).as_strided((B, T, V), (T, 1, 1)), "inplace": True},
}  # fmt: skip

#: Keywords of both functions of hidden states.
OF_HIDDEN = {
    "hidden|[3, 4, 8]|weight|[11, 7]|must agree": {"weight": WEIGHT[:, :-1]},
    "hidden|[3, 4, 8]|weight|[8, 11]|[V, H]": {"weight": WEIGHT.t()},
    "weight|[3, 4, 8]|hidden|[11, 8]|changed places": {"weight": HIDDEN, "hidden": WEIGHT},
    "hidden|[3, 4, 11]|[11, 8]|logits|grpo_loss": LOGITS,
    "hidden|[3, 5, 8]|[3, 4]|ids[:, 1:]": HIDDEN.repeat(1, 2, 1)[:, :5],
    "hidden has shape [11, 8], but targets has [3, 4]": {
        "hidden": WEIGHT,
        "weight": HIDDEN.view(-1, H),
    },
    "bias|[10]|[11, 8]|must be [11]": BIAS[:-1],
    "it looks sharded|weight|[0]|ZeRO-3|GatheredParameters|full_tensor": {"weight": torch.empty(0)},
    "weight|[88]|sharded|FSDP|full_tensor": WEIGHT.view(-1),
    "weight|torch.int8|float32, bfloat16 or float16": WEIGHT.to(torch.int8),
    "weight is the module Linear: pass its tensor, Head(lm_head.weight, lm_head.bias)": (
        torch.nn.Linear(H, V)
    ),
    "hidden|dict|tensor": {"hidden": {"last_hidden_state": HIDDEN}},
    **{
        f"{name}|torch.float64|float32, bfloat16 or float16": {name: x.double()}
        for name, x in (("hidden", HIDDEN), ("weight", WEIGHT))
    },
    **{
        f"{name}|meta|cpu|move": {name: x.to("meta")}
        for name, x in (("hidden", HIDDEN), ("weight", WEIGHT), ("bias", BIAS))
    },
    "weight_grad has shape [11, 7], but weight has [11, 8]: they must be the same": torch.zeros(
        V, 7
    ),
    "weight_grad is torch.bfloat16: pass float32": torch.zeros(V, H).bfloat16(),
    "must not require grad": {"weight_grad": torch.zeros(V, H, requires_grad=True)},
    "does not require grad: leave it out for a frozen head": {
        "weight": WEIGHT.detach(),
        "weight_grad": torch.zeros(V, H),
    },
    "weight_grad |no two rows in one memory": torch.zeros(1, H).expand(V, H),
}

#: Fields of an objective. The message begins with the name of the first.
OBJECTIVES = [
    {"surrogate": "clip"}, {"level": "group"}, {"aggregate": "mean"},
    {"kl_aggregate": "mean"}, {"entropy_aggregate": "token_mean"}, {"beta": -0.1}, {"beta": NAN}, {"beta": "0.1"},
    {"kl": "k4"}, {"kl": None}, {"entropy_coef": INF}, {"max_tokens": 0}, {"max_tokens": 2.5},
    {"filters": [EntropyFloor(1.0)]}, {"filters": (Clip(),)}, {"log_ratio_bounds": 20.0}, {"log_ratio_bounds": (-20.0,)},
    {"log_ratio_bounds": (-20.0, -1.0)},
    {"filters": (SamplerMismatch(),), "kl": Exact(), "beta": 0.1}, {"future_kl": 32.0}, {"future_kl": FutureKl(), "level": "sequence"},
    {"log_ratio_bounds": (-20.0, NAN)}, {"log_ratio_bounds": (-20.0, 20.0), "surrogate": Dro()},
    *({"level": level, "surrogate": one} for one, known in (
        (Vespo(), "sequence-sum"), (Gmpo(), "sequence"), (A2po(), "sequence-sum"), (Dro(), "token"), (ClipCov(), "token"), (KlCov(), "token"),
    ) for level in ("token", "sequence", "sequence-token", "sequence-sum") if level != known),
]  # fmt: skip

#: What an objective lacks in a batch of packed rows -> the objective, fields of the batch.
CUT, REF = {"cu_seqlens": torch.tensor([0, 12])}, {"ref_logps": torch.zeros(B * T)}
LACKING = [
    ("advantages is None|Clip|group_advantages", {}, {"advantages": None}),
    ("ref_logps is None|beta=0.1|beta=0", {"beta": 0.1}, {}),
    ("sampler_logps is None", {"filters": (TrustRegion(anchor="sampler"),)}, {}),
    ("max_tokens is None|constant|normalizer=", {"aggregate": "constant"}, CUT),
    ("groups is None", {"aggregate": "group-mean"}, CUT),
    *(("cu_seqlens is None|seq-mean", {"aggregate": f"seq-mean-token-{how}"}, {}) for how in ("mean", "sum")),
    ("cu_seqlens is None", {"aggregate": "constant", "max_tokens": 5}, {}),
    ("cu_seqlens is None", {"kl_aggregate": MEAN, "beta": 1.0}, REF),
    *(("cu_seqlens is None|sequence|pass", {"level": f"sequence{more}"}, {}) for more in ("", "-token", "-sum")),
    ("cu_seqlens is None", {"filters": (OffPolicySequences(),)}, {}),
    ("cu_seqlens is None", {"future_kl": FutureKl()}, {}),
    ("cu_seqlens is None", {"filters": (SamplerMismatch(),)}, {"sampler_logps": torch.zeros(B * T)}),
    ("sampler_logps is None|SamplerMismatch", {"filters": (SamplerMismatch(),)}, CUT),
    ("weights holds negative numbers", {"surrogate": Vespo(), "level": "sequence-sum"}, {**CUT, "weights": -torch.ones(B * T)}),
]  # fmt: skip

FIVE, TWO = (
    TokenSets.from_lists([[3, 1], [], [7], [2, 9, 4], []]),
    torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
)
TOO_HIGH = sets([[V]])
#: What is called -> what the message must say -> what is wrong.
CALLS = [
    (loss, {
        "targets[1, 2]|11|[0, 11)|mask": with_ids(V),
        "targets[1, 2]|-100|[0, 11)": {"targets": with_ids(-100), "mask": IDS > 3},
        "If the logits are hidden states: those go to linear_grpo_loss": {"targets": IDS + 40},
        "batch|dict|TokenBatch": {"of": {"targets": IDS}},
        "objective|str|Objective.preset": "grpo",
        "normalizer|[2]|0-d": torch.ones(2),
        "normalizer=0.0: the denominator": torch.tensor(0.0),
        "normalizer=-1": {"objective": Objective(beta=0.1), "ref_logps": PER_TOKEN, "normalizer": Denominators(1.0, -1.0, 1.0)},
        "kept holds id 12 in row 0: it is outside of the vocabulary [0, 11)": sets([[12]]),
        "targets[0, 1]=1 is not in its kept set": {"kept": sets([[0]]), "missing": "raise"},
        "ref_logits is None|needs the whole distribution": {"objective": EXACT},
        "ref_logits is a tuple|(logits, LogitTransform(...))": {"objective": EXACT, "ref_logits": TEACHER},
        "ref_logits holds id 11 in row 0": {"objective": EXACT, "ref_logits": TOO_HIGH},
        "ref_logits is a whole distribution|kl='k3' is an estimate": {"objective": Objective(beta=0.1), "ref_logits": LOGITS},
        "ref_logits='Tensor': with beta=0": LOGITS,
        "ref_logits has a vocabulary of 10, but the policy has 11": {"objective": EXACT, "ref_logits": LOGITS[..., :-1] + 1, "inplace": True},
        "logp_terms holds id 11 in row 0": TOO_HIGH,
        "logp_terms is None, but listed": {"objective": Objective(listed=ScoreCentering())},
        "inplace=True, but a teacher": {"objective": EXACT, "ref_logits": sets([[1]]), "logp_terms": sets([[1]]), "inplace": True},
        "rows[0, 2]=12|none of the 12 rows|mask the token": {"rows": IDS + 10, "mask": IDS > 1},
        "temperature=tensor|rows=|as a number": {"rows": IDS, "transform": transform(PER_TOKEN)},
        "temperature=tensor|share its softmax": {"rows": IDS, "objective": EXACT, "ref_logits": (LOGITS + 1, transform(PER_TOKEN))},
        "ref_logits='TokenSets'|over a kept set|objective_loss": {"objective": EXACT, "kept": KEPT, "ref_logits": sets([[1]])},
        "ref_logits='list'|token_divergence|objective_loss": {"objective": EXACT, "ref_logits": [(LOGITS + 1, 1.0)]},
    }),
    (linear, {
        f"targets[1, 2]|{2**40}|[0, 11)|mask": {"targets": with_ids(2**40)},
        "ref_logps are log-probs of the sampled tokens": {"objective": EXACT, "ref_logps": PER_TOKEN, "reference": TEACHER},
        "with beta=0 nothing looks at it": {"reference": TEACHER},
        "batch.ref_logps are both given": {"objective": Objective(beta=0.1), "ref_logps": PER_TOKEN, "reference": TEACHER},
        "reference='list'|one teacher is taken": {"objective": Objective(beta=0.1), "reference": [*TEACHER]},
        "reference=TokenSets|it has no values|sets.with_values": {"objective": EXACT, "reference": KEPT},
        "reference: hidden is the module Linear: pass the hidden states": {"objective": EXACT, "reference": (torch.nn.Linear(H, V), WEIGHT)},
        "the values of row 0 are log-probs of 2 in all": {"objective": EXACT, "reference": sets([[0, 1]], 0.0)},
        "reference='list'|one teacher|linear_divergence|objective_loss": {"objective": EXACT, "reference": [(TEACHER, 1.0)]},
        "reference has a vocabulary of 10, but the policy has 11": {"objective": EXACT, "reference": (HIDDEN, OTHER[1:])},
        "logp_terms holds id 11 in row 0": TOO_HIGH,
    }),
    (logps, {
        "logits|[3, 4, 11]|[12]|must be": {"targets": IDS.view(-1)},
        "targets|torch.float32|int64": IDS.float(),
        "mask|[3]|[3, 4]|the same": ONES > 0,
        "mask is a list: pass a bool tensor": [1, 1],
        "entropy|'yes'|\"detached\"": "yes",
        "rows[2, 3]=-1|none of the 12 rows": {"rows": IDS - (torch.arange(12).view(B, T) == 11).long()},
        "temperature=tensor|rows=": {"rows": IDS, "transform": transform(PER_TOKEN)},
        "missing='drop': it must be one of": {"kept": KEPT, "missing": "drop"},
        "targets[0, 1]=1 is not in its kept set": {"kept": sets([[0]]), "missing": "raise"},
        "two gradients": {"kept": KEPT, "inplace": True, "also": ("log_kept_mass",)},
    }),
    (linear_logps, {
        "targets[1, 2]|12|[0, 11)|mask": with_ids(12),
    }),
    (functools.partial(token_divergence, LOGITS), {
        "divergence='k3'": {"ref_logits": LOGITS, "divergence": "k3"},
        "ref_logits='list'|token_divergence": {"ref_logits": [(LOGITS + 1, 1.0)]},
    }),
    (functools.partial(linear_divergence, HIDDEN, WEIGHT), {
        "reference=None|needs the whole": None, "reference='list'|linear_divergence": {"reference": [(TEACHER, 1.0)]},
    }),
    (LogitTransform, {
        "temperature|requires grad|.detach()": ONES.clone().requires_grad_(),
        "temperature|torch.int64|float": IDS[:, 0],
        "temperature|-1|above 0": -1,
        "softcap|0.0|None": 0.0,
        "scale|0.0|not 0": 0.0,
    }),
    (ScoreCentering, {"surrogate='min'": "min", "surrogate=ClipCov": ClipCov(), "trust='ratio'": "ratio"}),
    (Objective, {
        "listed|pass a function": ScoreCentering,
        "kl='forward': it must be one of|an Exact|Did you mean kl=Exact(\"forward\")": "forward",
        "kl='K3'|Did you mean k3?": "K3",
        "kl=['k3']: it must be one of": {"kl": ["k3"]},
    }),
    (Kl, {"estimator='tv'|Did you mean kl=Exact(\"tv\")": "tv"}),
    (Cispo, {f"low={low}|[0, cap]": {"low": low} for low in (-1, 6.0)}),
    (Objective.preset, {
        "preset='grop'|must be one of grpo, dapo": {"name": "grop"},
        "preset='DAPO'|Did you mean dapo?": {"name": "DAPO"},
        "preset='gpro'|Did you mean grpo?": {"name": "gpro"},
        **{f"preset='{x}_loss'|Did you mean {x}?": {"name": f"{x}_loss"} for x in ("dapo", "ppo", "gspo", "dr_grpo")},
        "preset='DAPO loss'|Did you mean dapo?": {"name": "DAPO loss"},
        "numerics='trl2': it must be one of trl, liger": {"name": "grpo", "numerics": "trl2"},
        "beta|-1|>= 0": {"name": "dapo", "beta": -1},
        "pass surrogate=Clip(eps_low=0.2, eps_high=0.28, delta=inf)": {"name": "grpo", "eps_high": 0.28},
        "cap is a number of the surrogate, not of the Objective: pass surrogate=Cispo(cap=4.0": {"name": "cispo", "cap": 4.0},
    }),
    (Exact, {
        "mixture=0.5: \"reverse\" has none": 0.5,
        "direction='backward'": "backward",
        "temperature_squared=2": 2,
    }),
    (batch().to, {"device=|pass a device": torch.bfloat16, "device='nowhere'|pass a device": "nowhere"}),
    (batch().same_group, {"groups is None": {}}),
    (objective_given, {
        "divergence is None, but kl=Exact": {"objective": EXACT},
        "divergence is given, but kl='k3'": PER_TOKEN,
        "logps has shape [3, 3], but targets has [3, 4]": PER_TOKEN[:, 1:],
        "entropy is None, but the objective has an entropy bonus": {"objective": Objective(entropy_coef=0.1)},
        "token_weights has shape [4]": torch.ones(T),
        "objective is a str": "dapo",
        "objective_loss does not have": {"batch": batch(logp_terms=sets([[1]]))},
    }),
    (head, {
        "pass a TokenBatch with an Objective": {"targets": batch()},
        "metrics=True": {"targets": IDS, "metrics": True},
        "transform is an option of this call": {"targets": IDS, "transform": LogitTransform(scale=2.0)},
        "bias is an option": {"targets": batch(), "objective": PACKED, "bias": BIAS},
    }),
    (global_normalizer, {
        "batches=[]": {"objective": PACKED, "batches": []},
        "objective='str'": {"objective": "grpo", "batches": batch()},
        "reduce=True, but torch.distributed is not initialised": {"objective": PACKED, "batches": batch(), "reduce": True},
    }),
    (functools.partial(shift_targets, IDS.view(-1)), {
        "both given": {**CUT, "segment_ids": IDS.view(-1)},
        "segment_ids has shape [3], but ids has [12]": IDS[:, 0],
        "cu_seqlens|[0, 5]": torch.tensor([0, 5]),
    }),
    (shift_targets, {"ids is torch.float32": PER_TOKEN}),
    (functools.partial(check_sets, "kept"), {
        "targets of shape [2, 3] has 6 tokens, but kept have 5 rows": {"sets": FIVE, "targets": IDS[:2, :3], "vocab": 10},
        "targets is torch.float32: pass a tensor of integers": {"sets": FIVE, "targets": torch.zeros(5), "vocab": 10},
        "kept are on cpu, but targets is on meta: pass sets.to('meta')": {"sets": FIVE, "targets": IDS.view(-1)[:5].to("meta"), "vocab": 10},
        "kept holds id 9 in row 2: it is outside|[0, 9)": {"sets": FIVE[1:], "targets": IDS[0], "vocab": 9},
    }),
    (FIVE.mask, {"ids holds id 9 in row 3": {"vocab": 9}, "vocab=0: the size of the vocabulary is a whole number": 0}),
    (FIVE.contains, {"targets of shape [4] has 4 tokens, but these sets have 5 rows": IDS[0]}),
    (functools.partial(shift_sets, FIVE), {"targets of shape [3, 4] has 12 tokens, but sets have 5 rows": {"ids": IDS}}),
    (lambda **given: grpo_kernels.use(**given).__enter__(), {"backend='cuda'": "cuda", "strict=1": 1}),
]  # fmt: skip

MASK = torch.tensor([[0, 1, 1], [1, 0, 0]])
RECORDS = {"generated": MASK}
#: How sets of ids are made -> what is right of it, and what a message must say -> what is changed.
SETS = [
    (TokenSets, {"ids": torch.tensor([4, 6, 1]), "offsets": torch.tensor([0, 2, 3]), "values": torch.zeros(3)}, {
        "ids is a list: pass int32 or int64 [nnz]": [1, 2, 3],
        "ids is torch.float32: pass int32 or int64": ONES,
        "ids has shape [3, 1]|TokenSets.from_padded": IDS[:, :1],
        "offsets is torch.bool: pass int32 or int64 [rows + 1]": torch.tensor([False, True]),
        "offsets has shape [0]: pass [rows + 1], a single 0 for no row": IDS[0, :0],
        "offsets[0]=1: the ids of row 0 start at 0": torch.tensor([1, 3]),
        "offsets give row 1 -1 ids": torch.tensor([0, 2, 1, 3]),
        "offsets give the rows 2 ids in all, but there are 3": torch.tensor([0, 1, 2]),
        "ids[2]=-1, in row 1: ids are at least 0|from_padded": torch.tensor([4, 6, -1]),
        "ids[1]=4, in row 0: an id may occur only once in a set": torch.tensor([4, 4, 1]),
        "values has shape [4], but ids has [3]: they must be the same": torch.zeros(4),
        "values[2]=nan, in row 1": torch.tensor([0.0, -INF, NAN]),
    }),
    (TokenSets.whole, {}, {"rows=-1: the number of rows is a whole number of at least 0": -1}),
    (TokenSets.cat, {}, {
        "parts=[]: pass a list of TokenSets": [],
        "parts=['cpu', 'meta']: they are on different devices: move them to one": [FIVE, FIVE.to("meta")],
        "parts[1] has no values, but others have": [sets([[1]]), FIVE],
    }),
    (FIVE.__getitem__, {}, {
        "pass a slice, integers, or a bool of the shape of targets. For one row, ": {"rows": 3},
        "rows is torch.float32 [3]: pass a slice": ONES,
        "there are 5 rows, but index 5 is out of bounds": {"rows": torch.tensor([0, 5])},
        "there are 5 rows|shape of the mask [12]": {"rows": IDS > 3},
    }),
    (FIVE.with_values, {}, {
        "values has shape [5], but ids has [6]": torch.zeros(5),
    }),
    (TokenSets.from_counts, {"ids": torch.tensor([3, 4, 5])}, {
        "counts has shape [3, 4]: pass one number for each row, [rows]; of [B, T], counts.flatten()": IDS,
        "counts give row 1 -1 ids: a row has at least 0.": torch.tensor([2, -1, 2]),
        "counts give the rows 4 ids in all, but there are 3": torch.tensor([2, 2]),
    }),
    (TokenSets.from_padded, {"ids": torch.tensor([[1, 2], [3, -1]])}, {
        "ids is torch.float32: pass int32 or int64 [rows, K]": PER_TOKEN,
        "values has shape [2], but ids has [2, 2]": torch.zeros(2),
        "values[1]=nan, in row 0": torch.tensor([[0, NAN], [0, NAN]]),
        "ids[2]=-100, in row 1": torch.tensor([[1, 2], [-100, 3]]),
    }),
    (TokenSets.from_lists, {}, {
        "lists is a Tensor: pass a list of lists": PER_TOKEN,
        "lists is not one list of numbers for each row|generated=": [1, 2],
        "lists holds torch.float32: pass lists of integer ids": [[1.5]],
        "lists holds ids up to 2147483648: from lists ids become int32": [[2**31]],
        "lists holds ids up to 9223372036854775808: from lists ids become int32": [[-(2**63)]],
        "ids[2]=-1, in row 1": {"lists": [[1], [3, -1]]},
        "ids[1]=3, in row 1": {"lists": [[], [3, 3]]},
        "values has 1 rows, and lists 2": {"lists": [[1], [2]], "values": [[0.5]]},
        "values|of other lengths from row 1 on: pass one number for each id": {"lists": [[1], [2, 3]], "values": [[1.0], [1.0]]},
        "cu_seqlens is given without generated": {"lists": [[1]], "cu_seqlens": torch.tensor([0, 1])},
        "generated is shape [1, 2, 3]: pass a bool tensor": {"lists": [[[1]]], "generated": MASK[None]},
        "lists[0]=1: pass for each sequence a list": {"lists": [1, 2], **RECORDS},
        "lists[0] has 1 records, but generated marks 2 tokens of sequence 0": {"lists": [[[1]], [[2]]], **RECORDS},
        "cu_seqlens=[0, 2]: it must rise": {"lists": [[[1]]], "generated": MASK[0], "cu_seqlens": torch.tensor([0, 2])},
    }),
    (TokenSets.from_logits, {"logits": TWO, "top_k": 1}, {
        "logits is a list: pass a float tensor [..., V]": [[1.0]],
        "logits is torch.int64": IDS,
        "logits|.shape=[2, 0]": TWO[:, :0],
        "all -inf in row 1": {"logits": TWO.index_fill(1, torch.tensor(0), 0.0) / TWO[:, 1:]},
        "top_k=1.5: it is a number of ids; None, 0 or -1 keeps all": 1.5,
        "top_p=0.0: it is a probability above 0, at most 1; None keeps all. A greedy sampler is top_k=1": 0.0,
        "min_p=-0.1: it is a share of the largest probability in [0, 1]": -0.1,
        "order='trl': samplers truncate differently: pass \"vllm\" or \"sglang\"": "trl",
        "temperature[1]=0.0": torch.tensor([1.0, 0.0]),
        "temperature has shape [3]": ONES,
        "temperature is on meta, but the input is on cpu": ONES[:2].to("meta"),
        "targets has shape [3], but the leading part of the logits has [2]": IDS[:, 0],
    }),
]  # fmt: skip


def collected():
    """(what the message must say, the call) of all tables."""
    zero3 = torch.randn(V, H, requires_grad=True)
    zero3.ds_id = 3
    grows = {"weight": torch.randn(V, H, requires_grad=True)}
    gathered = {
        "ZeRO-3 gathers this weight for a moment": {
            "weight": zero3,
            "weight_grad": torch.zeros(V, H),
        }
    }
    tables = [
        (batch, {}, BATCH), (packed, {}, OFFSETS), 
        *((f, {}, OF_LOGITS) for f in (loss, logps)), *((f, grows, OF_HIDDEN | gathered) for f in (linear, linear_logps)),
        *((Objective, {}, {f"{next(iter(fields))}=": fields}) for fields in OBJECTIVES),
        *((Objective.preset, {"name": name}, {f"preset '{name}': {trainer} has no such objective, only ": {"numerics": trainer}})
          for trainer in NUMERICS for name in [x for x in PRESETS if x not in NUMERICS[trainer]][:2]),
        *((loss, {"logits": LOGITS.view(-1, V)}, {says: {"objective": Objective(**o), "of": packed(**fields)}}) for says, o, fields in LACKING),
        *((f, {}, table) for f, table in CALLS), *SETS,
    ]  # fmt: skip
    found = [
        (getattr(f, "__name__", "a call"), says, functools.partial(f, **right | wrong(says, value)))
        for f, right, table in tables for says, value in table.items()
    ]  # fmt: skip
    return [
        pytest.param(says, call, id=f"{i} {what}: {says}")
        for i, (what, says, call) in enumerate(found)
    ]


class NoWork(TorchDispatchMode):
    """Fails at the first operator of a softmax or a product."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.partition(".")[0]
        of_rows = args and isinstance(args[0], Tensor) and args[0].shape[-1:] in ((V,), (H,))
        assert not of_rows or name not in (
            "exp",
            "exp_",
            "logsumexp",
            "_log_softmax",
            "mm",
            "addmm",
        ), "work was done"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("says, call", collected())
def test_refused(says, call):
    unchanged = snapshot(
        ids=IDS,
        ones=ONES,
        per_token=PER_TOKEN,
        logits=LOGITS,
        hidden=HIDDEN,
        weight=WEIGHT,
        bias=BIAS,
        other=OTHER,
    )
    with NoWork(), pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert len(message) > 30
    for word in says.split("|"):
        assert word.strip() in message, f"{word!r} is not in: {message}"
    unchanged()


@pytest.mark.parametrize("call", [loss, linear, logps, linear_logps])
def test_what_is_right_is_computed(call):
    """The calls above differ from these by what is wrong; and the work that they must not do is
    noticed.
    """
    call()
    with NoWork(), pytest.raises(AssertionError, match="work was done"):
        call()


#: Functions from logits, and from hidden states.
MADE = (
    functools.partial(grpo_loss, LOGITS, batch(), PACKED), functools.partial(linear_grpo_loss, HIDDEN, WEIGHT, batch(), PACKED),
    functools.partial(token_logprobs, LOGITS, IDS), functools.partial(linear_logprobs, HIDDEN, WEIGHT, IDS),
    functools.partial(token_divergence, LOGITS, LOGITS), functools.partial(linear_divergence, HIDDEN, WEIGHT, TEACHER),
)  # fmt: skip

#: A call with a keyword that it does not know, and what the message must say of it.
UNKNOWN = [
    (batch, "old_logprobs", "Did you mean old_logps?"),
    (
        functools.partial(TokenBatch.from_rewards, IDS, ONES, group_size=3),
        "masks",
        "Did you mean mask?",
    ),
    (Objective, "agregate", "Did you mean aggregate?"),
    (functools.partial(Objective.preset, "grpo"), "betta", "Did you mean beta? It has surrogate, "),
    (Clip, "epsilon", "Did you mean eps_low?"),
    (Options, "stict", "Did you mean strict?"),
    *(
        (Options, name, "It has backend, strict, skip_inactive, shard, weight_grad")
        for name in ("sparse", "missing", "entropy_over")
    ),
    (functools.partial(Head, WEIGHT), "biass", "Did you mean bias?"),
    (
        functools.partial(ADVANTAGES["group"], Evidence(ONES, group_size=3)),
        "scales",
        "Did you mean scale?",
    ),
    (functools.partial(CORRECTIONS["tis"], batch()), "hihg", "Did you mean high?"),
    *(
        (f, "temperature", "Pass transform=LogitTransform(temperature=...).")
        for f in (loss, logps, linear, linear_logps)
    ),
    *((f, "normaliser", "Did you mean normalizer?") for f in (loss, linear)),
    *((f, "strict", "Pass options=Options(strict=...).") for f in MADE),
    *((f, "bias", "Pass Head(weight, bias) as weight.") for f in MADE[1::2]),
]


@pytest.mark.parametrize(
    "call, keyword, says", UNKNOWN, ids=lambda x: x if isinstance(x, str) else ""
)
def test_unknown_keywords(call, keyword, says):
    with pytest.raises(TypeError) as error:
        call(**{keyword: 0.2})
    assert f"'{keyword}'" in str(error.value) and says in str(error.value)


# ---- the remedies work


def test_what_is_masked_may_be_wrong():
    mask = IDS != IDS[1, 2]
    temperature = torch.where(mask, 1.0, 0.0)
    for value in (-100, V, 2**40):
        targets = with_ids(value)
        assert loss(targets=targets, mask=mask, transform=transform(temperature)).loss.isfinite()
        assert linear(targets=targets, mask=mask).loss.isfinite()
        assert logps(targets=targets, mask=mask)[0].isfinite().all()
    wild = transform(torch.where(mask, 1.0, NAN))
    divergence = token_divergence(
        LOGITS, LOGITS + 1, Exact(temperature_squared=True), mask=mask, transform=wild
    )
    assert divergence.isfinite().all()
    weights = torch.where(mask, 1.0, -1.0)  # beside a logarithm
    assert loss(Objective.preset("vespo"), mask=mask, weights=weights).loss.isfinite()


#: Every function that makes a loss of a batch and an objective.
LOSSES = {
    "grpo_loss": lambda *given, **more: grpo_loss(LOGITS, *given, options=Options(**more)),
    "linear_grpo_loss": lambda *given, **more: linear_grpo_loss(
        HIDDEN, WEIGHT, *given, options=Options(**more)
    ),
    "head": lambda *given, **more: head(*given, options=Options(**more)),
    "objective_loss": lambda *given, backend="": objective_loss(-PER_TOKEN, *given),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "field", ["advantages", "old_logps", "ref_logps", "weights", "nll_weights"]
)
def test_strict_mode_refuses_nan_at_trained_tokens(field, name, backend):
    value, mask = -PER_TOKEN.clone(), PER_TOKEN > 0
    value[1, 2] = value[2, 0] = value[2, 3] = NAN
    mask[2, 0] = False
    given = batch(**{"ref_logps": -PER_TOKEN, "mask": mask, field: value}), Objective(beta=0.1)
    assert LOSSES[name](*given, backend=backend).loss.isnan()
    for strict in ({}, {"strict": True}) if name != "objective_loss" else ({},):
        message = rf"{field} is NaN at 2 of 11 trained tokens, \[1, 2\], \[2, 3\].*strict.*Mask"
        with grpo_kernels.use(strict=not strict), pytest.raises(ValueError, match=message):
            LOSSES[name](*given, backend=backend, **strict)
    value[1, 2] = value[2, 3] = 0.5  # what no loss reads may be anything
    with grpo_kernels.use(strict=True):
        assert LOSSES[name](*given, backend=backend).loss.isfinite()


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_and_an_objective_that_changed_places(name):
    with pytest.raises(
        ValueError,
        match=r"(batch|targets) is an? Objective and objective a TokenBatch: .*batch, objective",
    ):
        LOSSES[name](Objective(), batch())


def test_without_a_look_at_values_the_device_notices_nan(monkeypatch):
    """On a GPU nobody waits for the comparison; the device stops the program."""
    values_unseen(monkeypatch)
    assert loss(old_logps=-PER_TOKEN, strict=True).loss != 0
    with pytest.raises(RuntimeError, match="old_logps is NaN at a trained token"):
        loss(old_logps=-PER_TOKEN / NAN, strict=True)


def test_these_are_all_metrics():
    """Of a loss with a KL, filters, and sets beside the vocabulary."""
    objective = Objective(beta=0.1, kl="k1", filters=(EntropyFloor(0.1),))
    out = grpo_loss(LOGITS, batch(ref_logps=-PER_TOKEN, kept=KEPT), objective)
    assert {*out.metrics} == {*METRICS}
    assert not {*ABSENT_UNLESS} & {*loss().metrics} and {*loss().metrics} | {*ABSENT_UNLESS} == {
        *METRICS
    }


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (
            lambda out: out.metrics["approx_kl"],
            KeyError,
            r"no metric 'approx_kl'. Did you mean kl\? .*tokens, .*entropy",
        ),
        (lambda out: out.metrics["entropi"], KeyError, r"Did you mean entropy\?"),
        (lambda out: out.backward(), AttributeError, r"'backward'.*out\.loss\.backward"),
        (lambda out: out.item(), AttributeError, r"'item'.*out\.loss\.item"),
        (lambda out: out.log_probs, AttributeError, r"'log_probs'. Did you mean logps\?"),
        (lambda out: out.metric, AttributeError, r"'metric'. Did you mean metrics\?"),
        (lambda out: out.kl, AttributeError, r"'kl'. Did you mean out.metrics\[\"kl\"\]\?"),
        (lambda out: out.approx_kl, AttributeError, r"Did you mean out.metrics\[\"kl\"\]\?"),
        (lambda out: out.ess, AttributeError, r"Did you mean out.metrics\[\"ess\"\]\?"),
        (
            lambda out: out.metrics["clip_frac"],
            KeyError,
            r"no metric 'clip_frac'. Did you mean clip_low and clip_high\?",
        ),
        (
            lambda out: out.metrics["pg_clipfrac"],
            KeyError,
            r"Did you mean clip_low and clip_high\?",
        ),
        (
            lambda out: out.metrics["ratio"],
            KeyError,
            r"Did you mean ratio_mean and ratio_min and ratio_max\?",
        ),
        (
            lambda out: out.metrics["kept"],
            KeyError,
            r"no metric 'kept': it needs an objective with filters",
        ),
        (lambda out: [*out], TypeError, r"no tuple.*out\.loss, out\.metrics"),
    ],
)
def test_what_a_loss_is_not_is_said_with_the_remedy(call, kind, message):
    with pytest.raises(kind, match=message):
        call(loss(Objective(beta=0.1), ref_logps=-PER_TOKEN))
