"""Everything that the core refuses: a ValueError before any work, which names the argument, its value and the remedy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels
from grpo_kernels import (
    Denominators,
    Exact,
    Head,
    LogitTransform,
    Objective,
    Options,
    Sparse,
    TokenBatch,
    TokenSets,
    group_advantages,
    grpo_loss,
    linear_divergence,
    linear_grpo_loss,
    linear_logprobs,
    token_divergence,
    token_logprobs,
)
from grpo_kernels.batch import shift_sets, shift_targets
from grpo_kernels.distributed import global_normalizer
from grpo_kernels.formulas.filters import EntropyFloor, OffPolicySequences, TrustRegion
from grpo_kernels.formulas.kl import Kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.formulas.surrogates import A2po, Cispo, Clip, ClipCov, Dro, Gmpo, KlCov, Vespo
from grpo_kernels.losses import objective_loss
from grpo_kernels.model import FusedLMHead
from grpo_kernels.presets import NUMERICS, PRESETS
from grpo_kernels.rewards.corrections import CORRECTIONS
from grpo_kernels.rewards.estimators import ADVANTAGES, Evidence
from grpo_kernels.token_sets import check_sets
from support.cases import snapshot
from support.inside import values_unseen
from support.meta_device import on_meta

Tensor = torch.Tensor
Call = Callable[[], Any]

B, T, V, H = 3, 4, 11, 8
INF, NAN, MEAN = math.inf, math.nan, "seq-mean-token-mean"
IDS = torch.arange(B * T).view(B, T) % V
ONES, PER_TOKEN = torch.ones(B), torch.ones(B, T)
LOGITS, HIDDEN, WEIGHT = (torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in ((B, T, V), (B, T, H), (V, H)))
BIAS, OTHER = torch.ones(V), torch.zeros(V, H)
KEPT = TokenSets.from_lists([[i, 10] for i in range(9)] + [[]] * 3)
LISTED = TokenSets.from_lists([[i % V] for i in range(B * T)]).with_values(-torch.ones(B * T))
EXACT, DISTILL = Objective.preset("dapo", beta=0.3, kl=Exact()), Objective.preset("distillation")
SPARSE, TEACHER = Options(sparse=Sparse(1 / 16)), (HIDDEN, OTHER)
PACKED = Objective(aggregate="token-sum")


def batch(**changes: Any) -> TokenBatch:
    return TokenBatch(**{"targets": IDS, "advantages": ONES, **changes})


def packed(offsets: Any = None, **changes: Any) -> TokenBatch:
    cuts = None if offsets is None else torch.as_tensor(offsets)
    return batch(**{"targets": IDS.view(-1), "advantages": torch.ones(B * T), "cu_seqlens": cuts, **changes})


def loss(objective: Any = PACKED, logits: Any = LOGITS, of: Any = None, **options: Any) -> Any:
    options = {"backend": "eager", **options}
    return grpo_loss(logits, batch() if of is None else of, objective, **options)


def linear(objective: Any = PACKED, of: Any = None, hidden: Any = HIDDEN, weight: Any = WEIGHT, **options: Any) -> Any:
    return linear_grpo_loss(hidden, weight, batch() if of is None else of, objective, **{"backend": "eager", **options})


def logps(logits: Any = LOGITS, targets: Any = IDS, **options: Any) -> Any:
    return token_logprobs(logits, targets, **{"backend": "eager", **options})


def linear_logps(hidden: Any = HIDDEN, weight: Any = WEIGHT, targets: Any = IDS, **options: Any) -> Any:
    return linear_logprobs(hidden, weight, targets, **{"backend": "eager", **options})


def with_ids(value: int) -> Tensor:
    return IDS.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value))


def transform(temperature: Any) -> LogitTransform:
    return LogitTransform(temperature)


def kl_where_old(logp: Any, old_logp: Any, ref_logp: Any) -> Any:
    return ops.where(logp - old_logp > -2.5, logp - ref_logp, 0.0), ops.where(logp - old_logp > -2.5, 1.0, 0.0)


#: What a message must say, its parts between bars -> fields of a batch.
BATCH: dict[str, dict[str, Any]] = {
    "targets|[3, 4, 8]|[B, T]": {"targets": torch.zeros(B, T, 8, dtype=torch.int64)},
    "targets|[]|[B, T]": {"targets": torch.tensor(3)},
    "targets|torch.float32|int64": {"targets": PER_TOKEN},
    "targets|list|int64 tensor": {"targets": [1]},
    "advantages|[4]|[3, 4], [3] or [3, 1]": {"advantages": torch.ones(T)},
    "advantages|[1, 4]|[3, 4]": {"advantages": torch.ones(1, T)},
    "advantages|[4, 3]|[3, 4]": {"advantages": torch.ones(T, B)},
    "advantages|torch.bool|floating-point": {"advantages": ONES > 0},
    "advantages|list|tensor": {"advantages": [1.0]},
    "advantages|None|group_advantages": {"advantages": None},
    "advantages|[3]|[12]|cu_seqlens": {"targets": IDS.view(-1)},
    "weights|[4]|[3, 4], [3] or [3, 1]": {"weights": torch.ones(T)},
    "nll_weights|[4]|[3, 4], [3] or [3, 1]": {"nll_weights": torch.ones(T)},
    "mask|[3, 5]|[3, 4]|the same": {"mask": torch.ones(B, T + 1).bool()},
    "mask|torch.float32|.bool()": {"mask": PER_TOKEN},
    "groups|[3, 4]|one integer id per sequence|[3]": {"groups": IDS},
    "groups|torch.float32|integer": {"groups": ONES},
    "groups|list|tensor": {"groups": [0, 0, 1]},
    "groups|[3]|cu_seqlens": {"targets": IDS.view(-1), "advantages": torch.ones(B * T), "groups": IDS[:, 0]},
    "cu_seqlens|[3, 4]|packed": {"cu_seqlens": torch.tensor([0, 12])},
    "targets has shape [1, 12]. Pass targets[0], and the same of what goes with it.": {
        "targets": IDS.view(1, -1), "advantages": torch.ones(1, B * T), "cu_seqlens": torch.tensor([0, 12])
    },
    "kept is a list: pass": {"kept": [[1], [2]]},
    "has 12 tokens, but kept have 3 rows": {"kept": KEPT[:3]},
    "missing='drop': it must be one of": {"missing": "drop"},
    "context_group|init_process_group": {"context_group": object()},
    **{f"{name}|[3]|[3, 4]|the same": {name: ONES} for name in ("old_logps", "ref_logps", "sampler_logps")},
    **{f"{name}|torch.int64|floating-point": {name: IDS} for name in ("old_logps", "sampler_logps", "nll_weights")},
    **{
        f"{name}|meta|cpu|move": {name: x.to("meta")}
        for name, x in {
            "advantages": ONES, "mask": PER_TOKEN > 0, "groups": IDS[:, 0], "nll_weights": ONES,
            **dict.fromkeys(("old_logps", "ref_logps", "weights", "sampler_logps"), PER_TOKEN),
        }.items()
    },
}  # fmt: skip

OFFSETS: dict[str, Any] = {
    "cu_seqlens|[1, 12]|from 0": [1, 12],
    "cu_seqlens|[0, 5, 11]|12": [0, 5, 11],
    "cu_seqlens|[0, 5, 13]|12": [0, 5, 13],
    "cu_seqlens|[0, 7, 5, 12]|rise": [0, 7, 5, 12],
    "cu_seqlens|torch.float32|int32": [0.0, 12.0],
    "cu_seqlens|[1, 2]|[B + 1]": [[0, 12]],
}

#: Keywords of both functions of logits.
OF_LOGITS: dict[str, dict[str, Any]] = {
    "logits|[3, 3, 11]|[3, 4]|logits[:, :-1]": {"logits": LOGITS[:, :-1]},
    "logits|[12, 11]|[3, 4]|must be": {"logits": LOGITS.view(-1, V)},
    "logits|[3, 4]|vocabulary": {"logits": LOGITS[..., 0]},
    "logits|[3, 4, 0]|vocabulary is empty": {"logits": LOGITS[..., :0]},
    "logits|torch.int64|float32, bfloat16 or float16": {"logits": LOGITS.long()},
    "logits|torch.float64|float32, bfloat16 or float16": {"logits": LOGITS.double()},
    "logits|list|tensor": {"logits": [1.0]},
    "logits|meta|cpu|move": {"logits": LOGITS.to("meta")},
    "temperature|[4]|[3, 4]": {"transform": transform(torch.ones(T))},
    "temperature|meta|cpu|move": {"transform": transform(ONES.to("meta"))},
    "temperature|0.0|above 0": {"transform": transform(torch.tensor([1.0, 0.0, 1.0]))},
    "temperature|-2.0|above 0": {"transform": transform(torch.tensor(-2.0))},
    "temperature|nan|above 0": {"transform": transform(PER_TOKEN * NAN)},
    "transform is 0.7: pass a LogitTransform, for example LogitTransform(temperature=0.7)": {"transform": 0.7},
    "backend|'cuda-fast'|eager, cpu, triton": {"backend": "cuda-fast"},
    "inplace=True|[3, 4, 11]|[0, 11, 1]|inplace=False": {"logits": LOGITS[:1].expand(B, T, V), "inplace": True},
    "inplace=True|[4, 1, 1]|share memory|inplace=False": {"logits": torch.zeros(23).as_strided((B, T, V), (T, 1, 1)), "inplace": True},
    "inplace=True|[88, 22, 2]|inplace=False": {"logits": torch.zeros(B, T, 2 * V)[..., ::2], "inplace": True},
    "no product to": {"options": SPARSE},
}  # fmt: skip

#: Keywords of both functions of hidden states.
OF_HIDDEN: dict[str, dict[str, Any]] = {
    "hidden|[3, 4, 8]|weight|[11, 7]|must agree": {"weight": WEIGHT[:, :-1]},
    "hidden|[3, 4, 8]|weight|[8, 11]|[V, H]": {"weight": WEIGHT.t()},
    "hidden|[3, 4, 11]|[11, 8]|logits|grpo_loss": {"hidden": LOGITS},
    "hidden|[3, 3, 8]|[3, 4]|hidden[:, :-1]": {"hidden": HIDDEN[:, :-1]},
    "hidden|[3, 5, 8]|[3, 4]|ids[:, 1:]": {"hidden": HIDDEN.repeat(1, 2, 1)[:, :5]},
    "hidden|[12, 8]|[3, 4]|must be": {"hidden": HIDDEN.view(-1, H)},
    "hidden has shape [11, 8], but targets has [3, 4]": {"hidden": WEIGHT, "weight": HIDDEN.view(-1, H)},
    "hidden|[3, 4]|hidden size": {"hidden": HIDDEN[..., 0]},
    "bias|[10]|[11, 8]|must be [11]": {"bias": BIAS[:-1]},
    "bias|[1, 11]|must be [11]": {"bias": BIAS[None]},
    "bias|torch.int64|float32, bfloat16 or float16": {"bias": BIAS.long()},
    "it looks sharded|weight|[0]|ZeRO-3|GatheredParameters|full_tensor": {"weight": torch.empty(0)},
    "weight|[88]|sharded|FSDP|full_tensor": {"weight": WEIGHT.view(-1)},
    "weight|[0, 8]|sharded|full_tensor": {"weight": WEIGHT[:0]},
    "weight|torch.int8|float32, bfloat16 or float16": {"weight": WEIGHT.to(torch.int8)},
    "weight is the module Linear: pass its tensor, weight=lm_head.weight": {"weight": torch.nn.Linear(H, V)},
    "hidden|dict|tensor": {"hidden": {"last_hidden_state": HIDDEN}},
    "temperature|0.0|above 0": {"transform": transform(torch.zeros(B))},
    "backend|'blas'|eager, cpu, triton": {"backend": "blas"},
    **{
        f"{name}|torch.float64|float32, bfloat16 or float16": {name: x.double()}
        for name, x in (("hidden", HIDDEN), ("weight", WEIGHT))
    },
    **{f"{name}|meta|cpu|move": {name: x.to("meta")} for name, x in (("hidden", HIDDEN), ("weight", WEIGHT), ("bias", BIAS))},
    "weight_grad is [11, 7] on cpu: pass a tensor like weight, [11, 8]": {"weight_grad": torch.zeros(V, 7)},
    "weight_grad has dtype torch.bfloat16: pass float32": {"weight_grad": torch.zeros(V, H).bfloat16()},
    "must not require grad": {"weight_grad": torch.zeros(V, H, requires_grad=True)},
    "weight_grad is str": {"weight_grad": "main"},
    "does not require grad: leave it out for a frozen head": {"weight": WEIGHT.detach(), "weight_grad": torch.zeros(V, H)},
    "weight_grad |no two rows in one memory": {"weight_grad": torch.zeros(1, H).expand(V, H)},
}

#: Fields of an objective. The message begins with the name of the first.
OBJECTIVES: list[dict[str, Any]] = [
    {"surrogate": "clip"}, {"surrogate": Clip}, {"level": "group"}, {"aggregate": "mean"}, {"aggregate": None},
    {"kl_aggregate": "mean"}, {"entropy_aggregate": "token_mean"}, {"beta": -0.1}, {"beta": NAN}, {"beta": INF}, {"beta": "0.1"},
    {"kl": "k4"}, {"kl": None}, {"entropy_coef": INF}, {"entropy_coef": "0"}, {"max_tokens": 0}, {"max_tokens": 2.5},
    {"filters": [EntropyFloor(1.0)]}, {"filters": (Clip(),)}, {"log_ratio_bounds": 20.0}, {"log_ratio_bounds": (-20.0,)},
    {"log_ratio_bounds": [-20.0, 20.0]}, {"log_ratio_bounds": (0.0, 20.0)}, {"log_ratio_bounds": (-20.0, -1.0)},
    {"log_ratio_bounds": (-20.0, NAN)}, {"log_ratio_bounds": (-20.0, 20.0), "surrogate": Dro()},
    *({"level": level, "surrogate": one} for one, known in (
        (Vespo(), "sequence-sum"), (Gmpo(), "sequence"), (A2po(), "sequence-sum"), (Dro(), "token"), (ClipCov(), "token"), (KlCov(), "token"),
    ) for level in ("token", "sequence", "sequence-token", "sequence-sum") if level != known),
]  # fmt: skip

#: What an objective lacks in a batch of packed rows -> the objective, fields of the batch.
CUT, REF = {"cu_seqlens": torch.tensor([0, 12])}, {"ref_logps": torch.zeros(B * T)}
LACKING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ref_logps is None|beta=0.1|beta=0", {"beta": 0.1}, {}),
    ("sampler_logps is None", {"filters": (TrustRegion(anchor="sampler"),)}, {}),
    ("max_tokens is None|constant|normalizer=", {"aggregate": "constant"}, CUT),
    ("max_tokens is None", {"kl_aggregate": "constant", "beta": 1.0}, {**CUT, **REF}),
    ("groups is None", {"aggregate": "group-mean"}, CUT),
    ("groups is None", {"entropy_aggregate": "group-mean", "entropy_coef": 0.1}, CUT),
    ("cu_seqlens is None|seq-mean-token-mean|pass", {"aggregate": MEAN}, {}),
    ("cu_seqlens is None", {"aggregate": "seq-mean-token-sum"}, {}),
    ("cu_seqlens is None", {"aggregate": "constant", "max_tokens": 5}, {}),
    ("cu_seqlens is None", {"kl_aggregate": MEAN, "beta": 1.0}, REF),
    ("cu_seqlens is None", {"entropy_aggregate": MEAN, "entropy_coef": 1.0}, {}),
    *(("cu_seqlens is None|sequence|pass", {"level": f"sequence{more}"}, {}) for more in ("", "-token", "-sum")),
    ("cu_seqlens is None", {"filters": (OffPolicySequences(),)}, {}),
    ("weights has shape [1]", {"surrogate": Vespo(), "level": "sequence-sum"}, {**CUT, "weights": torch.ones(1)}),
    ("weights holds negative numbers", {"surrogate": Vespo(), "level": "sequence-sum"}, {**CUT, "weights": -torch.ones(B * T)}),
]  # fmt: skip

CALLS: dict[str, Call] = {
    # targets, masks, entropy, normalizers
    "targets[1, 2]|11|[0, 11)|mask": lambda: loss(of=batch(targets=with_ids(V))),
    "targets[1, 2]|-100|[0, 11)": lambda: loss(of=batch(targets=with_ids(-100), mask=IDS > 3)),
    f"targets[1, 2]|{2**40}|[0, 11)|mask": lambda: linear(of=batch(targets=with_ids(2**40))),
    "targets[1, 2]|-1|[0, 11)|mask": lambda: logps(targets=with_ids(-1)),
    "targets[1, 2]|12|[0, 11)|mask": lambda: linear_logps(targets=with_ids(12)),
    "If the logits are hidden states: those go to linear_grpo_loss": lambda: loss(of=batch(targets=IDS + 40)),
    "those go to linear_grpo_loss or linear_logprobs": lambda: logps(targets=IDS + 40),
    "logits|[3, 4, 11]|[12]|must be": lambda: logps(targets=IDS.view(-1)),
    "targets|torch.float32|int64": lambda: logps(targets=IDS.float()),
    "targets |torch.float32|int64": lambda: linear_logps(targets=IDS.float()),
    "mask|[3]|[3, 4]|the same": lambda: logps(mask=ONES > 0),
    "mask |[3]|[3, 4]|the same": lambda: linear_logps(mask=ONES > 0),
    "mask|torch.float32|.bool()": lambda: logps(mask=PER_TOKEN),
    "mask|meta|cpu|move": lambda: logps(mask=(IDS > 1).to("meta")),
    "mask is a list: pass a bool tensor": lambda: logps(mask=[1, 1]),
    "entropy|'yes'|\"detached\"": lambda: logps(entropy="yes"),
    "entropy|'no'|\"detached\"": lambda: linear_logps(entropy="no"),
    "batch|dict|TokenBatch": lambda: loss(of={"targets": IDS}),
    "batch |dict|TokenBatch": lambda: linear(of={"targets": IDS}),
    "objective|str|Objective.preset": lambda: loss("grpo"),
    "objective |str|Objective.preset": lambda: linear("grpo"),
    "normalizer|[2]|0-d": lambda: loss(normalizer=torch.ones(2)),
    "normalizer|0|above 0": lambda: loss(normalizer=0),
    "normalizer |0|above 0": lambda: linear(normalizer=0),
    "normalizer|-1.0|above 0": lambda: loss(normalizer=-1.0),
    "normalizer|nan|finite": lambda: loss(normalizer=NAN),
    "normalizer='3': the denominator": lambda: loss(normalizer="3"),
    "normalizer=0.0: the denominator": lambda: loss(normalizer=torch.tensor(0.0)),
    "normalizer=-1": lambda: loss(of=batch(ref_logps=PER_TOKEN), objective=Objective(beta=0.1), normalizer=Denominators(1.0, -1.0, 1.0)),
    # what is made before a call
    "temperature|requires grad|.detach()": lambda: transform(ONES.clone().requires_grad_()),
    "temperature|torch.int64|float": lambda: transform(IDS[:, 0]),
    "temperature='1': it divides the logits": lambda: transform("1"),
    "temperature|-1|above 0": lambda: transform(-1),
    "temperature|nan|above 0": lambda: transform(NAN),
    "temperature|inf|finite": lambda: transform(INF),
    "softcap|0.0|None": lambda: LogitTransform(softcap=0.0),
    "softcap|-30.0|above 0": lambda: LogitTransform(softcap=-30.0),
    "scale|0.0|not 0": lambda: LogitTransform(scale=0.0),
    "scale=nan: it multiplies the logits|finite": lambda: LogitTransform(scale=NAN),
    "eps_low|1.5|[0, 1]": lambda: Clip(eps_low=1.5),
    "eps_low|-0.1|[0, 1]": lambda: Clip(eps_low=-0.1),
    "eps_high|-0.2|>= 0": lambda: Clip(eps_high=-0.2),
    "delta=1.0: the two-sided bound is above 1": lambda: Clip(delta=1.0),
    "delta=None: the two-sided bound": lambda: Clip(delta=None),
    "delta|nan|above 1": lambda: Clip(delta=NAN),
    "cap|0.0|above 0": lambda: Cispo(cap=0.0),
    "low|3.0|[0, cap]": lambda: Cispo(cap=2.0, low=3.0),
    "preset='grop'|must be one of grpo, dapo": lambda: Objective.preset("grop"),
    "preset='DAPO'|Did you mean dapo?": lambda: Objective.preset("DAPO"),
    "numerics='trl2': it must be one of trl, liger": lambda: Objective.preset("grpo", numerics="trl2"),
    "beta|-1|>= 0": lambda: Objective.preset("dapo", beta=-1),
    "pass surrogate=Clip(eps_low=0.2, eps_high=0.28, delta=inf)": lambda: Objective.preset("grpo", eps_high=0.28),
    "cap is a number of the surrogate, not of the Objective: pass surrogate=Cispo(cap=4.0": lambda: Objective.preset("cispo", cap=4.0),
    "mixture=0.5: \"reverse\" has none": lambda: Exact("reverse", mixture=0.5),
    "mixture=1.0": lambda: Exact("jsd", mixture=1.0),
    "direction='backward'": lambda: Exact("backward"),
    "tail='drop'": lambda: Exact(tail="drop"),
    "temperature_squared=2": lambda: Exact(temperature_squared=2),
    "device=|pass a device": lambda: batch().to(torch.bfloat16),
    "device='nowhere'|pass a device": lambda: batch().to("nowhere"),
    "groups is None": lambda: batch().same_group(),
    # sparse gradients
    "pass a Sparse": lambda: Options(sparse=0.01),
    "step=0.0": lambda: Sparse(0.0),
    "step=2": lambda: Sparse(2),
    "step=nan": lambda: Sparse(NAN),
    "seed=-1": lambda: Sparse(seed=-1),
    "seed=1.5": lambda: Sparse(seed=1.5),
    f"seed={2**63}": lambda: Sparse(seed=2**63),
    "as a tensor it is int64": lambda: Sparse(seed=torch.zeros(())),
    "is on meta, the rows are on cpu": lambda: linear(
        weight=WEIGHT.clone().requires_grad_(), options=Options(sparse=Sparse(seed=on_meta(torch.tensor(0))))
    ),
    "first_row=-1": lambda: Sparse(first_row=-1),
    "no product": lambda: token_divergence(LOGITS, LOGITS, options=SPARSE),
    "do not bound": lambda: linear(EXACT, reference=TEACHER, options=SPARSE),
    "do not": lambda: linear_divergence(HIDDEN, WEIGHT, TEACHER, options=SPARSE),
    "ids of at=": lambda: linear_logps(at=KEPT, options=SPARSE),
    # kept sets
    "kept holds id 12 in row 0: it is outside of the vocabulary [0, 11)": lambda: loss(of=batch(kept=TokenSets.from_lists([[12]] * 12))),
    "targets[0, 1]=1 is not in its kept set": lambda: loss(of=batch(kept=TokenSets.from_lists([[0]] * 12), missing="raise")),
    "targets[2, 0]=8 is not in its kept set": lambda: loss(of=batch(kept=TokenSets.from_lists([[]] * 8 + [[0]] * 4)), strict=True),
    "the batch says missing='full'": lambda: loss(of=batch(kept=KEPT, missing="full"), options=Options(missing="mask")),
    "two gradients": lambda: loss(of=batch(kept=KEPT), inplace=True, options=Options(entropy_over="vocabulary")),
    **{
        f"{i}|weighs the KL by a ratio": functools.partial(
            loss, Objective(beta=0.1, kl=kl), of=batch(kept=KEPT, ref_logps=PER_TOKEN), options=Options(reference_over="vocabulary")
        )
        for i, kl in (("KL", Kl("k3", "ratio")), ("the KL", "distillation"), ("by", kl_where_old))
    },
    # second distributions
    "reference=None|needs the whole distribution": lambda: linear(EXACT),
    "ref_logits is None|needs the whole distribution": lambda: loss(EXACT),
    "reference=None|needs the whole": lambda: linear_divergence(HIDDEN, WEIGHT, None),
    "ref_logits is None|needs the whole": lambda: token_divergence(LOGITS, None),
    "ref_logits holds id 11 in row 0": lambda: loss(EXACT, ref_logits=TokenSets.from_lists([[V]] * 12).with_values(-torch.ones(12))),
    "reference holds id 11 in row 0": lambda: linear(EXACT, reference=TokenSets.from_lists([[V]] * 12).with_values(-torch.ones(12))),
    "reference: bias has shape [10]": lambda: linear(EXACT, reference=(*TEACHER, BIAS[:-1])),
    "ref_logits is a whole distribution|kl='k3' is an estimate": lambda: loss(Objective(beta=0.1), ref_logits=LOGITS),
    "reference is a whole distribution": lambda: linear(Objective(beta=0.1), reference=LISTED),
    "ref_logps are log-probs of the sampled tokens": lambda: linear(EXACT, of=batch(ref_logps=PER_TOKEN), reference=TEACHER),
    "ref_logits='Tensor': with beta=0": lambda: loss(ref_logits=LOGITS),
    "with beta=0 nothing looks at it": lambda: linear(reference=TEACHER),
    "batch.ref_logps are both given": lambda: linear(Objective(beta=0.1), of=batch(ref_logps=PER_TOKEN), reference=TEACHER),
    "reference is list: pass (hidden, weight)": lambda: linear(Objective(beta=0.1), reference=[*TEACHER]),
    "reference is tuple: pass (hidden, weight)": lambda: linear(Objective(beta=0.1), reference=TEACHER[:1]),
    "reference has a vocabulary of 9, but the policy has 11": lambda: linear(EXACT, reference=(HIDDEN, OTHER[:-2])),
    "ref_logits has a vocabulary of 10, but the policy has 11": lambda: loss(EXACT, ref_logits=LOGITS[..., :-1] + 1, inplace=True),
    "reference: hidden has shape [3, 4, 7] and weight [11, 8]": lambda: linear(EXACT, reference=(HIDDEN[..., 1:], WEIGHT)),
    "ref_logits: logits has shape": lambda: loss(EXACT, ref_logits=LOGITS[:, 1:]),
    "grad is given in the Head of a reference": lambda: linear(EXACT, reference=(HIDDEN, Head(OTHER, grad=torch.zeros(V, H)))),
    "reference is TokenSets without values": lambda: linear(EXACT, reference=KEPT),
    "the values of row 0 are log-probs of 2 in all": lambda: linear(
        EXACT, reference=TokenSets.from_lists([[0, 1]] * 12).with_values(torch.zeros(24))
    ),
    "reference_over='kept'|reference_over=\"vocabulary\"": lambda: loss(EXACT, of=batch(kept=KEPT), ref_logits=LISTED),
    "divergence is None, but kl=Exact": lambda: objective_loss(PER_TOKEN, batch(), EXACT),
    "divergence is given, but kl='k3'": lambda: objective_loss(PER_TOKEN, batch(), Objective(), divergence=PER_TOKEN),
    "divergence='k3'": lambda: token_divergence(LOGITS, LOGITS, "k3"),
    # lists of teachers
    "reference=[]: a list of teachers holds at least one pair": lambda: linear(DISTILL, reference=[]),
    "reference[0] is Tensor: a list of teachers holds pairs (teacher, weight)": lambda: linear(DISTILL, reference=[HIDDEN]),
    "reference[0] is tuple: a list of teachers holds pairs": lambda: linear(DISTILL, reference=[([(TEACHER, 1.0)], 1.0)]),
    "reference[1][1]=-0.5: the weight of a teacher is a finite number >= 0": lambda: linear(
        DISTILL, reference=[(TEACHER, 1.0), (TEACHER, -0.5)]
    ),
    "reference[0][1]='half'": lambda: linear(DISTILL, reference=[(TEACHER, "half")]),
    "reference[0][1]=nan: weights of teachers are finite": lambda: linear(DISTILL, reference=[(TEACHER, ONES * NAN)]),
    "reference[0][1] has shape [3, 5]": lambda: linear(DISTILL, reference=[(TEACHER, torch.ones(B, T + 1))]),
    "reference has a vocabulary of 10, but the policy has 11": lambda: linear(
        DISTILL, reference=[(TEACHER, 1.0), ((HIDDEN, OTHER[1:]), 1.0)]
    ),
    "inplace=True, but each teacher that is known at some ids": lambda: token_divergence(LOGITS, [(LISTED, 1.0)], inplace=True),
    "reference is list: pass (hidden, weight) ": lambda: linear(Objective(beta=0.1), reference=[(TEACHER, 1.0)]),
    # the loss of given log-probs, the head as a layer, denominators, shifts
    "logps is torch.float32 [3, 3]: pass floats of targets' shape, [3, 4]": lambda: objective_loss(PER_TOKEN[:, 1:], batch(), PACKED),
    "logps is torch.int64": lambda: objective_loss(IDS, batch(), PACKED),
    "entropy is torch.float32 [3]": lambda: objective_loss(PER_TOKEN, batch(), PACKED, entropy=ONES),
    "entropy is None, but the objective has an entropy bonus": lambda: objective_loss(PER_TOKEN, batch(), Objective(entropy_coef=0.1)),
    "entropy is None": lambda: objective_loss(PER_TOKEN, batch(), Objective(filters=(EntropyFloor(1.0),))),
    "token_weights has shape [4]": lambda: objective_loss(PER_TOKEN, batch(), PACKED, token_weights=torch.ones(T)),
    "objective is a str": lambda: objective_loss(PER_TOKEN, batch(), "dapo"),
    "batch is a NoneType": lambda: objective_loss(PER_TOKEN, None, PACKED),
    "targets is None": lambda: head(objective=PACKED),
    "targets is None ": lambda: head(normalizer=3.0),
    "pass a TokenBatch with an Objective": lambda: head(batch()),
    "targets is a Tensor": lambda: head(IDS, PACKED),
    "metrics=True": lambda: head(IDS, metrics=True),
    "hidden has shape": lambda: head(IDS[:, 1:]),
    "temperature|0.0": lambda: head(IDS, temperature=0.0),
    "transform is an option of this call": lambda: head(IDS, transform=LogitTransform(scale=2.0)),
    "bias is an option": lambda: head(batch(), PACKED, bias=BIAS),
    "weight is an": lambda: head(IDS, weight=None),
    "batches=[]": lambda: global_normalizer(PACKED, []),
    "objective='str'": lambda: global_normalizer("grpo", batch()),
    "reduce=True, but torch.distributed is not initialised": lambda: global_normalizer(PACKED, batch(), reduce=True),
    "cu_seqlens is None |": lambda: global_normalizer(Objective(entropy_aggregate=MEAN, entropy_coef=0.1), packed()),
    "ids is torch.float32": lambda: shift_targets(PER_TOKEN),
    "both given": lambda: shift_targets(IDS.view(-1), cu_seqlens=torch.tensor([0, 12]), segment_ids=IDS.view(-1)),
    "segment_ids has dtype torch.int64 and shape [3]": lambda: shift_targets(IDS.view(-1), segment_ids=IDS[:, 0]),
    "cu_seqlens|[0, 5]": lambda: shift_targets(IDS.view(-1), cu_seqlens=torch.tensor([0, 5])),
    # rewards
    "group_size|4|10": lambda: group_advantages(torch.zeros(10), group_size=4),
    "group_size|0": lambda: group_advantages(torch.zeros(10), group_size=0),
    "group_size=2.0: it must be a whole number": lambda: group_advantages(ONES, group_size=2.0),
    "group_size=True: it must be a whole number": lambda: group_advantages(ONES, group_size=True),
    "group_size=3|groups|exactly one": lambda: group_advantages(ONES, group_size=3, groups=IDS[:, 0]),
    "group_size|groups|exactly one": lambda: group_advantages(ONES),
    "groups|[2]|[3]": lambda: group_advantages(ONES, groups=IDS[0, :2]),
    "groups|torch.float32|integer": lambda: group_advantages(ONES, groups=ONES),
    "groups is a list: pass an integer tensor": lambda: group_advantages(ONES, groups=[0, 0]),
    "rewards|[3, 4]|[B]": lambda: group_advantages(PER_TOKEN, group_size=1),
    "rewards is str: pass numbers, a tensor or a list": lambda: group_advantages("ab", group_size=2),
    "rewards[1]|nan|finite": lambda: group_advantages(torch.tensor([0.0, NAN]), group_size=2),
    "rewards[0]|-inf|finite": lambda: group_advantages(torch.tensor([-INF, 0.0]), group_size=2),
    "scale|'std'|group, batch, none": lambda: group_advantages(ONES, group_size=3, scale="std"),
    "eps|-1.0|>= 0": lambda: group_advantages(ONES, group_size=3, eps=-1.0),
    "group_size|2|3": lambda: TokenBatch.from_rewards(IDS, ONES, group_size=2),
    # sets beside a batch
    "targets of shape [2, 3] has 6 tokens, but kept have 5 rows": lambda: check_sets("kept", FIVE, IDS[:2, :3], 10),
    "targets is torch.float32: pass a tensor of integers": lambda: check_sets("kept", FIVE, torch.zeros(5), 10),
    "kept are on cpu, but targets is on meta: pass sets.to('meta')": lambda: check_sets("kept", FIVE, on_meta(IDS.view(-1)[:5]), 10),
    "kept holds id 9 in row 2: it is outside|[0, 9)": lambda: check_sets("kept", FIVE[1:], IDS[0], 9),
    "ids holds id 9 in row 3": lambda: FIVE.mask(9),
    "vocab=0: the size of the vocabulary is a whole number": lambda: FIVE.mask(0),
    "targets of shape [4] has 4 tokens, but these sets have 5 rows": lambda: FIVE.contains(IDS[0]),
    "targets of shape [3, 4] has 12 tokens, but sets have 5 rows": lambda: shift_sets(FIVE, IDS),
    # contexts
    "backend='cuda'": lambda: grpo_kernels.use(backend="cuda").__enter__(),
    "strict=1": lambda: grpo_kernels.use(strict=1).__enter__(),
}  # fmt: skip

FIVE, TWO = TokenSets.from_lists([[3, 1], [], [7], [2, 9, 4], []]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
MASK = torch.tensor([[0, 1, 1], [1, 0, 0]])
RECORDS = {"generated": MASK}
#: How sets of ids are made -> what is right of it, and what a message must say -> what is changed.
SETS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, dict[str, Any]]]] = [
    (TokenSets, {"ids": torch.tensor([4, 6, 1]), "offsets": torch.tensor([0, 2, 3]), "values": torch.zeros(3)}, {
        "ids is list: pass int32 or int64 [nnz]": {"ids": [1, 2, 3]},
        "ids is torch.float32: pass int32 or int64": {"ids": ONES},
        "ids has shape [3, 1]|TokenSets.from_padded": {"ids": IDS[:, :1]},
        "ids has shape []": {"ids": torch.tensor(1)},
        "offsets is torch.bool: pass int32 or int64 [rows + 1]": {"offsets": torch.tensor([False, True])},
        "offsets has shape [0]: pass [rows + 1], a single 0 for no row": {"offsets": IDS[0, :0]},
        "offsets has shape [1, 4]": {"offsets": IDS[:1]},
        "offsets is on meta, but ids is on cpu: move one of them": {"offsets": torch.tensor([0, 3]).to("meta")},
        "offsets[0]=1: the ids of row 0 start at 0": {"offsets": torch.tensor([1, 3])},
        "offsets[1]=2, offsets[2]=1: row 1 ends before it starts|the number of ids, 3": {"offsets": torch.tensor([0, 2, 1, 3])},
        "offsets[1]=9, offsets[2]=3: row 1 ends before it starts": {"offsets": torch.tensor([0, 9, 3])},
        "offsets[2]=2, but there are 3 ids": {"offsets": torch.tensor([0, 1, 2])},
        "offsets[2]=5, but there are 3 ids": {"offsets": torch.tensor([0, 1, 5])},
        "ids is -1 in row 1 (ids[2]): ids are at least 0|from_padded": {"ids": torch.tensor([4, 6, -1])},
        "ids is 4 twice in row 0 (offsets 0 to 2)": {"ids": torch.tensor([4, 4, 1])},
        "values is list: pass a float tensor, one number for each id, or None": {"values": [0.0, 1.0, 2.0]},
        "values is torch.int64: pass a float tensor": {"values": IDS[0, 1:]},
        "values has shape [4], but ids has [3]: they must be the same": {"values": torch.zeros(4)},
        "values is on meta, but ids is on cpu": {"values": torch.zeros(3, device="meta")},
        "values is NaN in row 1 (values[2], id 1)": {"values": torch.tensor([0.0, -INF, NAN])},
    }),
    (TokenSets.whole, {}, {
        f"rows={rows}: the number of rows is a whole number of at least 0": {"rows": rows} for rows in (-1, 2.5, True)
    }),
    (TokenSets.cat, {}, {
        "parts is an empty list: pass a list of TokenSets": {"parts": []},
        "parts is a list with a Tensor: pass a list of TokenSets": {"parts": [FIVE, IDS]},
        "parts=['cpu', 'meta']: they are on different devices: move them to one": {"parts": [FIVE, FIVE.to("meta")]},
        "parts[1] has no values, but others have": {"parts": [LISTED, FIVE]},
    }),
    (FIVE.with_values, {}, {
        "values has shape [5], but ids has [6]": {"values": torch.zeros(5)},
        "values is NaN in row 3 (values[3], id 2)": {"values": torch.tensor([0, 0, 0, NAN, 0, 0])},
    }),
    (TokenSets.from_counts, {"ids": torch.tensor([3, 4, 5])}, {
        "counts is list: pass int32 or int64 [rows]": {"counts": [1, 2]},
        "counts is torch.float32: pass int32 or int64 [rows]": {"counts": ONES},
        "counts has shape [3, 4]: pass one number for each row, [rows]; of [B, T], counts.flatten()": {"counts": IDS},
        "counts is -1 in row 1: a number of ids is at least 0": {"counts": torch.tensor([2, -1, 2])},
        "counts adds up to 2, but there are 3 ids": {"counts": torch.tensor([1, 1])},
        "counts adds up to 4, but there are 3 ids": {"counts": torch.tensor([1, 3])},
        "counts is on meta, but ids is on cpu": {"counts": torch.tensor([1, 2]).to("meta")},
    }),
    (TokenSets.from_padded, {"ids": torch.tensor([[1, 2], [3, -1]])}, {
        "ids has shape [4]: pass padded sets, [rows, K] or [B, T, K]": {"ids": IDS[0]},
        "ids is torch.float32: pass int32 or int64 [rows, K]": {"ids": PER_TOKEN},
        "values has shape [2], but ids has [2, 2]": {"values": torch.zeros(2)},
        "values has shape list, but ids has [2, 2]": {"values": [0.0, 1.0]},
        "values is NaN in row 0 (values[1], id 2)": {"values": torch.tensor([[0, NAN], [0, NAN]])},
        "ids is -100 in row 1 (ids[2])": {"ids": torch.tensor([[1, 2], [-100, 3]])},
    }),
    (TokenSets.from_lists, {}, {
        "lists is a Tensor: pass a list of lists": {"lists": PER_TOKEN},
        "lists is a str: pass a list of lists": {"lists": "12"},
        "lists is not one list of numbers for each row|generated=": {"lists": [1, 2]},
        "lists is not one list of numbers for each row|generated= ": {"lists": [[[1], [2]], [[3]]]},
        "lists holds torch.float32: pass lists of integer ids": {"lists": [[1.5]]},
        "lists holds torch.bool: pass lists of integer ids": {"lists": [[True]]},
        "lists holds ids up to 2147483648: from lists ids become int32": {"lists": [[2**31]]},
        "ids is -1 in row 1": {"lists": [[1], [3, -1]]},
        "ids is 3 twice in row 1": {"lists": [[], [3, 3]]},
        "values has 1 rows, but lists has 2": {"lists": [[1], [2]], "values": [[0.5]]},
        "values has 1 numbers in row 1, but lists has 2 ids there": {"lists": [[1], [2, 3]], "values": [[1.0], [1.0]]},
        "values is NaN in row 1 (values[1], id 2)": {"lists": [[1], [2]], "values": [[1.0], [NAN]]},
        "cu_seqlens is given without generated": {"lists": [[1]], "cu_seqlens": torch.tensor([0, 1])},
        "generated is list: pass a bool tensor": {"lists": [[[1]]], "generated": [[True]]},
        "generated has dtype torch.float32": {"lists": [[[1]]], "generated": PER_TOKEN},
        "generated is shape [1, 2, 3]: pass a bool tensor": {"lists": [[[1]]], "generated": MASK[None]},
        "lists has 1 sequences, but generated has 2": {"lists": [[[1], [2]]], **RECORDS},
        "lists[0] has 1 records, but generated marks 2 tokens of sequence 0": {"lists": [[[1]], [[2]]], **RECORDS},
        "lists[1] has 2 records, but generated marks 1 ": {"lists": [[[1], [2]], [[2], [3]]], **RECORDS},
        "lists[0] has 1 records, but generated marks 2": {"lists": [[1]], "generated": MASK[0]},
        "cu_seqlens=[0, 2]: it must rise": {"lists": [[[1]]], "generated": MASK[0], "cu_seqlens": torch.tensor([0, 2])},
    }),
    (TokenSets.from_logits, {"logits": TWO, "top_k": 1}, {
        "logits is list: pass a float tensor [..., V]": {"logits": [[1.0]]},
        "logits is torch.int64 [3, 4]": {"logits": IDS},
        "logits is torch.float32 [2, 0]": {"logits": TWO[:, :0]},
        "logits is torch.float32 []": {"logits": torch.tensor(1.0)},
        "all -inf in row 1": {"logits": TWO.index_fill(1, torch.tensor(0), 0.0) / TWO[:, 1:]},
        "all -inf in row 0": {"logits": torch.tensor([[-INF, -INF], [1.0, 0.0]])},
        "top_k=1.5: it is a number of ids; None, 0 or -1 keeps all": {"top_k": 1.5},
        "top_k=-2": {"top_k": -2},
        "top_p=0.0: it is a probability above 0, at most 1; None keeps all. A greedy sampler is top_k=1": {"top_p": 0.0},
        "top_p=1.01": {"top_p": 1.01},
        "min_p=-0.1: it is a share of the largest probability in [0, 1]": {"min_p": -0.1},
        "min_p=1.1": {"min_p": 1.1},
        "order='trl': samplers truncate differently: pass \"vllm\" or \"sglang\"": {"order": "trl"},
        "temperature=0.0": {"temperature": 0.0},
        "temperature is 0.0 at row 1": {"temperature": torch.tensor([1.0, 0.0])},
        "temperature has shape [3]": {"temperature": ONES},
        "temperature is on meta, but the logits are on cpu": {"temperature": ONES[:2].to("meta")},
        "targets is torch.int64 [3]: pass integers of the logits' leading shape, [2]": {"targets": IDS[:, 0]},
        "targets is torch.float32 [2]": {"targets": ONES[:2]},
    }),
]  # fmt: skip

#: Rows that are asked for -> what the message must say.
ROWS: dict[str, Any] = {
    "pass a slice, integers, or a bool of the shape of targets. For one row, ": 3,
    "rows is torch.int64 []: pass a slice": torch.tensor(0),
    "rows is torch.float32 [3]: pass a slice": ONES,
    "row 5 is asked for, but there are 5": torch.tensor([0, 5]),
    "row -6 is asked for, but there are 5": torch.tensor([-6]),
    "the mask has 12 elements, but there are 5 rows": IDS > 3,
}


def head(*given: Any, **options: Any) -> Any:
    return FusedLMHead(torch.nn.Linear(H, V))(HIDDEN, *given, **options)


def collected() -> list[Any]:
    """(what the message must say, the call) of all tables."""
    part = functools.partial
    zero3: Any = torch.randn(V, H, requires_grad=True)
    zero3.ds_id = 3
    grows = {"weight": torch.randn(V, H, requires_grad=True)}
    found: list[tuple[str, str, Call]] = [
        *(("a batch", says, part(batch, **fields)) for says, fields in BATCH.items()),
        *(("a batch", says, part(packed, offsets)) for says, offsets in OFFSETS.items()),
        ("a batch", "advantages|[3]|[12]|[2]", part(packed, [0, 5, 12], advantages=ONES)),
        ("a batch", "groups|[3]|[2]", part(packed, [0, 5, 12], groups=IDS[:, 0])),
        *((f.__name__, says, part(f, **given)) for f in (loss, logps) for says, given in OF_LOGITS.items()),
        *((f.__name__, says, part(f, **{**grows, **given})) for f in (linear, linear_logps) for says, given in OF_HIDDEN.items()),
        *(
            (f.__name__, "ZeRO-3 gathers this weight for a moment", part(f, weight=zero3, weight_grad=torch.zeros(V, H)))
            for f in (linear, linear_logps)
        ),
        *(("an objective", f"{next(iter(fields))}=", part(Objective, **fields)) for fields in OBJECTIVES),
        *(
            ("a preset", f"preset '{name}': {trainer} has no such objective, only ", part(Objective.preset, name, numerics=trainer))
            for trainer in NUMERICS for name in [x for x in PRESETS if x not in NUMERICS[trainer]][:2]
        ),
        *(
            (f"what {next(iter(o))} lacks", says, part(loss, Objective(**o), LOGITS.view(-1, V), of=packed(**fields)))
            for says, o, fields in LACKING
        ),
        *(("a call", says, call) for says, call in CALLS.items()),
        *(
            (f.__name__, says, part(f, **{**right, **wrong}))
            for f, right, table in SETS for says, wrong in table.items()
        ),
        *(("rows of sets", says, part(FIVE.__getitem__, rows)) for says, rows in ROWS.items()),
    ]  # fmt: skip
    return [pytest.param(says, call, id=f"{i} {what}: {says}") for i, (what, says, call) in enumerate(found)]


class NoWork(TorchDispatchMode):
    """Fails at the first operator of a softmax or a product."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        of_rows = args and isinstance(args[0], Tensor) and args[0].shape[-1:] in ((V,), (H,))
        assert not of_rows or name not in ("exp", "exp_", "logsumexp", "_log_softmax", "mm", "addmm"), "work was done"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("says, call", collected())
def test_refused(says: str, call: Call) -> None:
    unchanged = snapshot(
        ids=IDS, ones=ONES, per_token=PER_TOKEN, logits=LOGITS, hidden=HIDDEN, weight=WEIGHT, bias=BIAS, other=OTHER
    )
    with NoWork(), pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert len(message) > 30
    for word in says.split("|"):
        assert word.strip() in message, f"{word!r} is not in: {message}"
    unchanged()


@pytest.mark.parametrize("call", [loss, linear, logps, linear_logps])
def test_what_is_right_is_computed(call: Call) -> None:
    """The calls above differ from these by what is wrong; and the work that they must not do is noticed."""
    call()
    with NoWork(), pytest.raises(AssertionError, match="work was done"):
        call()


#: A call with a keyword that it does not know, and what the message must say of it.
UNKNOWN: list[tuple[Callable[..., Any], str, str]] = [
    (batch, "old_logprobs", "Did you mean old_logps?"),
    (batch, "completion_mask", ""),
    (functools.partial(TokenBatch.from_rewards, IDS, ONES, group_size=3), "masks", "Did you mean mask?"),
    (functools.partial(TokenBatch.from_rewards, IDS, ONES, group_size=3), "unbiassed", "Did you mean unbiased?"),
    (Objective, "agregate", "Did you mean aggregate?"),
    (Objective, "epsilon", ""),
    (functools.partial(Objective.preset, "grpo"), "betta", "Did you mean beta? It has surrogate, "),
    (functools.partial(Objective.preset, "grpo"), "epsilon", "surrogate=Clip(eps_low=0.2, "),
    *((kind, "epsilon", "Did you mean eps_low?") for kind in (Clip, Gmpo, ClipCov)),
    (LogitTransform, "temprature", "Did you mean temperature?"),
    (LogitTransform, "bias", ""),
    (Exact, "directon", "Did you mean direction?"),
    (Options, "stict", "Did you mean strict?"),
    (Options, "sparce", "Did you mean sparse?"),
    (Sparse, "seeds", "Did you mean seed?"),
    (Kl, "estimater", "Did you mean estimator?"),
    (TrustRegion, "hihg", "Did you mean high?"),
    (functools.partial(Head, WEIGHT), "biass", "Did you mean bias?"),
    (functools.partial(ADVANTAGES["group"], Evidence(ONES, group_size=3)), "scales", "Did you mean scale?"),
    (functools.partial(CORRECTIONS["tis"], batch()), "hihg", "Did you mean high?"),
    *((f, "temperature", "") for f in (loss, logps, linear, linear_logps)),
    (functools.partial(head, batch(), PACKED), "normaliser", ""),
    (functools.partial(group_advantages, ONES, group_size=3), "normalize", ""),
]


@pytest.mark.parametrize("call, keyword, says", UNKNOWN, ids=lambda x: x if isinstance(x, str) else "")
def test_unknown_keywords(call: Callable[..., Any], keyword: str, says: str) -> None:
    with pytest.raises(TypeError) as error:
        call(**{keyword: 0.2})
    assert f"'{keyword}'" in str(error.value) and says in str(error.value)


@pytest.mark.parametrize("call, given", [
    (batch, [IDS, ONES, IDS > 3]), (grpo_loss, [LOGITS, batch(), PACKED, LogitTransform()]), (token_logprobs, [LOGITS, IDS, IDS > 3]),
    (linear_logprobs, [HIDDEN, WEIGHT, IDS, BIAS]), (linear_grpo_loss, [HIDDEN, WEIGHT, batch(), PACKED, BIAS]), (group_advantages, [ONES, 3]),
])  # fmt: skip
def test_options_are_keywords(call: Callable[..., Any], given: list[Any]) -> None:
    with pytest.raises(TypeError, match="positional"):
        call(*given)


# ---- the remedies work


def test_what_is_masked_may_be_wrong() -> None:
    mask = IDS != IDS[1, 2]
    temperature = torch.where(mask, 1.0, 0.0)
    for value in (-100, V, 2**40):
        targets = with_ids(value)
        assert loss(of=batch(targets=targets, mask=mask), transform=transform(temperature)).loss.isfinite()
        assert linear(of=batch(targets=targets, mask=mask)).loss.isfinite()
        assert logps(targets=targets, mask=mask)[0].isfinite().all()
    weights = torch.where(mask, 1.0, -1.0)  # beside a logarithm
    assert loss(Objective.preset("vespo"), of=batch(mask=mask, weights=weights)).loss.isfinite()


def test_what_is_switched_off_is_not_asked_for() -> None:
    """Without a KL or a bonus their aggregates and the reference do not matter."""
    plain = loss(of=packed(), logits=LOGITS.view(-1, V)).loss
    for off in ({"kl_aggregate": "constant"}, {"entropy_aggregate": "group-mean"}, {"kl": Kl("k1", "ratio")}):
        objective = Objective(aggregate="token-sum", **off)
        assert torch.equal(loss(objective, LOGITS.view(-1, V), of=packed(**REF)).loss, plain)
        assert float(global_normalizer(objective, [packed(), packed()])) == 1.0


#: Every function that makes a loss of a batch and an objective.
LOSSES: dict[str, Callable[..., Any]] = {
    "grpo_loss": lambda *given, **more: grpo_loss(LOGITS, *given, **more),
    "linear_grpo_loss": lambda *given, **more: linear_grpo_loss(HIDDEN, WEIGHT, *given, **more),
    "head": lambda *given, **more: head(*given, **more),
    "objective_loss": lambda *given, backend="": objective_loss(-PER_TOKEN, *given),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("field", ["advantages", "old_logps", "ref_logps", "weights", "nll_weights"])
def test_strict_mode_refuses_nan_at_trained_tokens(field: str, name: str, backend: str) -> None:
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
def test_a_batch_and_an_objective_that_changed_places(name: str) -> None:
    with pytest.raises(ValueError, match=r"(batch|targets) is an? Objective and objective a TokenBatch: .*batch, objective"):
        LOSSES[name](Objective(), batch())


def test_without_a_look_at_values_the_device_notices_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody waits for the comparison; the device stops the program."""
    values_unseen(monkeypatch)
    assert loss(of=batch(old_logps=-PER_TOKEN), strict=True).loss != 0
    with pytest.raises(RuntimeError, match="old_logps is NaN at a trained token"):
        loss(of=batch(old_logps=-PER_TOKEN / NAN), strict=True)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda out: out.metrics["approx_kl"], KeyError, r"no metric 'approx_kl'. Did you mean kl\? .*tokens, .*entropy"),
        (lambda out: out.metrics["entropi"], KeyError, r"Did you mean entropy\?"),
        (lambda out: out.backward(), AttributeError, r"'backward'.*out\.loss\.backward"),
        (lambda out: out.item(), AttributeError, r"'item'.*out\.loss\.item"),
        (lambda out: out.log_probs, AttributeError, r"'log_probs'. Did you mean logps\?"),
        (lambda out: out.metric, AttributeError, r"'metric'. Did you mean metrics\?"),
        (lambda out: [*out], TypeError, r"no tuple.*out\.loss, out\.metrics"),
    ],
)
def test_what_a_loss_is_not_is_said_with_the_remedy(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(loss(Objective(beta=0.1), of=batch(ref_logps=-PER_TOKEN)))
