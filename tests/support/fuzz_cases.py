"""Random cases for test_fuzz.py: drawn as a few plain values, which print and shrink well, made into tensors from a seed.

A case holds the float64 results and a bound on the error of fp32 arithmetic. Each row's logits are rounded once or twice, by an
amount proportional to their size. This moves their exponentials by the same relative amount, and later results accordingly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from grpo_kernels import Denominators, Objective, TokenBatch, TokenSets
from grpo_kernels.formulas.filters import OffPolicySequences, TrustRegion
from grpo_kernels.formulas.surrogates import Cispo, Clip, ClipCov, ImportanceSampling, PolicyGradient, Sapo
from support import oracle
from support.cases import Case
from support.fuzz_sets import EPS, Kept, Softmax, drawn, kept_sets
from support.options import AGGREGATES, BONUSES, BOUNDS, FILTERS, KLS, SURROGATES, Option
from support.oracle import Spec

Tensor = torch.Tensor

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = {str(d).removeprefix("torch."): d for d in ROUNDING}
#: Surrogates that use the log-ratio only in a ratio, which is bounded at e^60. The oracle has no bound, so beyond 60 it gets a
#: log-ratio of 60: value and slope are then the same. The same holds to all digits for k3 beyond a log-ratio of 60.
RATIO_ONLY = (Clip, Cispo, ClipCov, ImportanceSampling, PolicyGradient, Sapo)
BOUND = 60.0
#: The fields of `Spec` that a KL alone depends on.
OF_KL = ("aggregate", "beta", "kl", "max_tokens", "clamp_log", "clamp", "straight_through", "kl_aggregate", "count_empty")


def named(options: list[Option]) -> dict[str, Option]:
    return {o.name: o for o in options}


CHOICES = {
    "filter": named(FILTERS),
    "kl": named(KLS),
    "aggregate": named(AGGREGATES),
    "bonus": named(BONUSES),
    "bounds": named(BOUNDS),
}


@dataclass(frozen=True)
class Goal:
    """An objective in words; `level` may not be defined for the surrogate, and is then its first."""

    surrogate: int = 0
    level: str = "token"
    aggregate: str = "token-mean"
    kl: str = "no KL"
    filter: str = "no filter"
    bonus: str = "no bonus"
    bounds: str = "no bounds"

    def both(self, sequences_known: bool) -> tuple[Objective, Spec]:
        surrogate, theirs = SURROGATES[self.surrogate]
        chosen = {kind: CHOICES[kind][getattr(self, kind)] for kind in CHOICES}
        filters = chosen["filter"].ours.get("filters", ())
        trusts, whole = (any(isinstance(f, kind) for f in filters) for kind in (TrustRegion, OffPolicySequences))
        level = self.level if self.level in surrogate.levels else surrogate.levels[0]
        if trusts and level != "token":
            chosen["filter"] = FILTERS[0]
        if not sequences_known:
            level = "token" if "token" in surrogate.levels else level
            kept = {"token-mean": AGGREGATES[0], "token-sum": next(a for a in AGGREGATES if a.name == "token-sum")}
            chosen["aggregate"] = kept.get(self.aggregate, AGGREGATES[0])
            chosen["bonus"] = chosen["bonus"] if self.bonus in ("bonus", "bonus of its own") else BONUSES[0]
            if whole:
                chosen["filter"] = FILTERS[0]
        if surrogate.__class__.__name__ == "Dro":
            chosen["bounds"] = BOUNDS[0]
        ours: dict[str, Any] = {"level": level}
        spec: dict[str, Any] = {"level": level, **theirs}
        for option in chosen.values():
            ours.update(option.ours)
            spec.update(option.theirs)
        return Objective(surrogate, **ours), Spec(**spec)


@dataclass(frozen=True)
class Recipe:
    lengths: tuple[int, ...] = (3,)
    layout: str = "padded"  # padded, packed, without offsets
    vocab: int = 5
    dtype: str = "float32"
    view: str = "whole"
    masked: str = "none"  # none, some, all of the tokens
    seed: int = 0
    spread: float = 3.0  # of the logits
    absent: bool = False  # logits of -inf
    extreme: str = "none"  # far: a target, and the first id, up to 2000 below the rest; confident: an id 20 above
    log_ratio: float = 0.3
    temperature: float | str = 1.0  # a number, "per sequence" or "per token"
    softcap: float | None = None
    scale: float = 1.0
    goal: Goal = Goal()
    without: tuple[str, ...] = ()
    advantages: str = "sequence"  # sequence, token, zero
    normalizer: float | tuple[float | None, float | None, float | None] | None = None
    upstream: float = 1.0
    inplace: bool = False
    skip_inactive: bool = False
    width: int = 4  # of hidden states
    bias: str = "none"  # none, plain, a column of a matrix
    narrow_head: bool = False  # weight and bias in bf16, beside hidden states of fp32
    rewritten: str = "no"  # how mask and advantages came to be what they are, after the batch was made
    kept: Kept = field(default_factory=Kept)
    weight_grad: str = "none"  # what the gradient of the weight is added into: none, float32, of the weight's dtype
    strides: str = "in one piece"  # of the memory of hidden states and weight

    @property
    def denominators(self) -> Any:
        """The argument of a loss."""
        return Denominators(*self.normalizer) if isinstance(self.normalizer, tuple) else self.normalizer


VIEWS = ("whole", "without the last token", "padded vocabulary", "transposed", "every other logit")


#: Rows in memory: what views of a larger tensor, or of a transposed one, look like.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "in one piece": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "columns apart": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
    "rows apart": lambda x: torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]],
}


@st.composite
def recipes(draw: st.DrawFn, linear: bool = False, sets: bool = False) -> Recipe:
    # Mostly something to train on.
    some, any_ = st.lists(st.integers(1, 5), min_size=1, max_size=4), st.lists(st.integers(0, 5), max_size=4)
    lengths = st.one_of(some, some, some, any_, st.sampled_from([[], [0], [0, 0]]))

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    goal = Goal(
        draw(st.integers(0, len(SURROGATES) - 1)),
        one_of("token", "sequence", "sequence-token", "sequence-sum"),
        *(one_of(*CHOICES[kind]) for kind in ("aggregate", "kl", "filter", "bonus", "bounds")),
    )
    kl = CHOICES["kl"][goal.kl].theirs
    product = kl.get("kl") == "k3" and "kl_weighting" in kl  # of two exponentials: bounded at 1e30, by the product
    ratios = goal.level == "token" and isinstance(SURROGATES[goal.surrogate][0], RATIO_ONLY)
    far = ratios and goal.filter in ("no filter", "floor", "quantile") and not product
    kept = draw(kept_sets()) if sets else Kept()
    if goal.kl == "distillation {}" or "kl_weighting" in kl:  # of a ratio over sets: refused
        kept = replace(kept, over=tuple(x for x in kept.over if x != "reference"))
    narrowed = kept.missing in ("mask", "raise")  # from the mask that the batch was made with
    return Recipe(
        lengths=tuple(draw(lengths)),
        layout=one_of("padded", "packed", "without offsets"),
        vocab=one_of(5, 3, 17, 64, 67, 131, 2, 1, *(() if linear else (1031, 2500))),
        dtype=one_of(*DTYPES),
        view=one_of(*VIEWS),
        masked=one_of("none", "some", "none", "some", "some", "all"),
        seed=draw(st.integers(0, 10**6)),
        spread=one_of(3.0, 0.01, 1.0, 30.0) if linear else one_of(3.0, 0.01, 1.0, 30.0, 1e3, 1e4),
        absent=False if linear else draw(st.booleans()),
        log_ratio=one_of(0.3, 1.0, 30.0, 1000.0) if far else one_of(0.3, 1.0),
        temperature=one_of(1.0, "per sequence", "per token", 0.7, 100.0, 1e-3),
        softcap=one_of(None, None, 20.0, 1.0),
        scale=one_of(1.0, 1.0, 0.3, -2.0),
        goal=goal,
        without=tuple(draw(st.sets(st.sampled_from(["old_logps", "weights", "nll_weights"])))),
        advantages=one_of("sequence", "token", "sequence", "token", "zero"),
        normalizer=one_of(None, 7.0, None, 7.0, (7.0, None, 5.0), (7.0, 3.0, None), (6.0, 3.0, 5.0), (None, 3.0, 5.0)),
        upstream=one_of(1.0, 0.5, 1024.0),
        inplace=draw(st.booleans()) and not kept.over,
        skip_inactive=draw(st.booleans()),
        width=one_of(4, 1, 16, 33),
        bias=one_of("none", "plain", "a column"),
        rewritten="no" if narrowed else one_of("no", "no", "no", "by NumPy", "as .data", "in inference mode"),
        kept=kept,
        weight_grad=one_of("none", "float32", "of the weight") if sets else "none",
        strides=one_of(*STRIDES) if linear else "in one piece",
    )


@dataclass
class Built:
    """The tensors of a recipe, and what float64 makes of them."""

    recipe: Recipe
    leaf: Tensor  # the memory that `view` of it is the logits
    case: Case
    objective: Objective
    spec: Spec
    seen: dict[str, Any]  # the batch's fields as the oracle sees them
    trained: Tensor | None  # bool, the shape of targets: the mask without what `missing` takes out
    poisoned: Tensor | None = None  # bool [N, V]: logits that nobody may read

    def view(self, memory: Tensor) -> Tensor:
        return seen_through(self.recipe, memory)

    def batch(self) -> TokenBatch:
        """Of the case. With another mask and other advantages at first, of which everything was asked, if they are `rewritten`."""
        how = self.recipe.rewritten
        fields = {name: self.case.fields.get(name) for name in ("mask", "advantages")}
        if how == "no":
            return self.case.batch()
        first = {"mask": lambda x: ~x, "advantages": torch.zeros_like}
        buffers = {name: first[name](x).clone() for name, x in fields.items() if x is not None}
        batch = self.case.batch(**buffers)
        for kind in ("trained", "contributing", *(["sequences"] if batch.sequences is not None else [])):
            batch.count(kind)
        assert batch.sequences is None or batch.lengths.numel() == batch.sequences
        for name, buffer in buffers.items():
            if how == "by NumPy":
                buffer.numpy()[...] = fields[name].numpy()
            elif how == "as .data":
                buffer.data.copy_(fields[name])
            else:
                with torch.inference_mode():
                    buffer.copy_(fields[name])
        return batch


def seen_through(recipe: Recipe, memory: Tensor) -> Tensor:
    V, view = recipe.vocab, recipe.view
    if view == "whole":
        return memory
    if view == "padded vocabulary":
        return memory[..., 1 : V + 1]
    if view == "every other logit":
        return memory[..., ::2]
    if view == "without the last token":
        return memory[..., :-1, :]
    return memory.transpose(0, 1) if memory.dim() == 3 else memory[::2]


def memory_shape(recipe: Recipe, shape: tuple[int, ...]) -> tuple[int, ...]:
    V = recipe.vocab
    transposed = shape[::-1] if len(shape) == 2 else (2 * shape[0],)
    rows = {"without the last token": (*shape[:-1], shape[-1] + 1), "transposed": transposed}.get(recipe.view, shape)
    return (*rows, {"padded vocabulary": V + 3, "every other logit": 2 * V}.get(recipe.view, V))


def build(recipe: Recipe, logits: Tensor | None = None) -> Built:
    """`logits`: in float64, of hidden states; None: drawn."""
    g = torch.Generator().manual_seed(recipe.seed)
    r, lengths = recipe, torch.tensor(recipe.lengths, dtype=torch.int64)
    B, N = len(r.lengths), sum(r.lengths)
    shape = (B, max(r.lengths, default=0)) if r.layout == "padded" else (N,)
    offsets = (
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32) if r.layout == "packed" else None
    )
    known = r.layout != "without offsets"
    objective, spec = r.goal.both(known)
    if not known and objective.level != "token":  # a surrogate of whole sequences
        offsets = torch.tensor([0, N], dtype=torch.int32)
    sequences = B if r.layout == "padded" else 1 if offsets is None else len(offsets) - 1

    inside = (torch.arange(shape[1]) < lengths[:, None]) if len(shape) == 2 else torch.ones(shape, dtype=torch.bool)
    keep = {"none": inside, "some": inside & (torch.rand(shape, generator=g) < 0.7), "all": torch.zeros_like(inside)}[r.masked]
    mask = None if r.masked == "none" and bool(inside.all()) else keep
    trained = torch.ones(shape, dtype=torch.bool) if mask is None else mask

    targets = torch.randint(r.vocab, shape, generator=g)
    memory = torch.zeros(0)
    if logits is None:
        memory = (r.spread * torch.randn(memory_shape(r, shape), generator=g)).clamp(-6e4, 6e4).to(DTYPES[r.dtype])
        logits = seen_through(r, memory)
        if r.absent:
            gone = torch.rand(logits.shape, generator=g) < 0.4
            gone.scatter_(-1, targets[..., None], False)
            logits.masked_fill_(gone, math.copysign(math.inf, -r.scale))
        if r.extreme == "far":
            below = torch.tensor([0.0, 60.0, 88.0, 100.0, 300.0, 715.0, 2000.0])[torch.randint(7, shape, generator=g)]
            ids = torch.zeros_like(targets) if r.seed % 2 else targets
            logits.scatter_add_(-1, ids[..., None], (-math.copysign(1.0, r.scale) * below)[..., None].to(logits.dtype))
        elif r.extreme == "confident":
            ids = torch.randint(r.vocab, (*shape, 1), generator=g)
            logits.scatter_add_(-1, ids, torch.full(ids.shape, math.copysign(20.0, r.scale), dtype=logits.dtype))
    temperature: float | Tensor
    if isinstance(r.temperature, str):
        temperature = 0.2 + 2.0 * torch.rand(shape if r.temperature == "per token" or len(shape) == 1 else (B, 1), generator=g)
    else:
        temperature = r.temperature
    transform = {"temperature": temperature, "softcap": r.softcap, "scale": r.scale}
    kept_fields, keep, outside, poisoned = {}, None, None, None
    if r.kept.rows != "none":
        sets, keep, outside = drawn(r.kept, targets.reshape(-1), r.vocab, g)
        kept_fields = {"kept": sets, "missing": r.kept.missing}
        if r.kept.missing == "mask":
            trained = trained & ~outside.view(shape)
        if not r.kept.over:
            poisoned = ~keep | (keep.sum(1, keepdim=True) == 1) & (sets.counts > 0)[:, None]
    over_sets, over_all = (
        oracle.log_probs(logits.double(), targets, oracle.Transform(**transform), keep=x)[1].view(shape) for x in (keep, None)
    )
    logps, ref_of = over_sets, over_all if "reference" in r.kept.over else over_sets

    def normal(*size: int) -> Tensor:
        return torch.randn(size or shape, generator=g, dtype=torch.float64)

    old = logps - r.log_ratio * normal()
    if objective.filters:
        old = old.clamp(-80.0, -0.01)  # a probability, in fp32
    ref = ref_of + min(r.log_ratio, 100.0) * normal()
    advantages = {
        "sequence": normal(sequences, 1) if sequences != N else normal(),
        "token": normal(),
        "zero": torch.zeros(shape),
    }[r.advantages]
    if offsets is None and len(shape) == 1 and r.advantages == "sequence":
        advantages = normal()
    fields: dict[str, Any] = {
        "advantages": advantages,
        "old_logps": old,
        "ref_logps": ref,
        "weights": torch.where(torch.rand(shape, generator=g) < 0.1, 0.0, torch.rand(shape, generator=g) + 0.3),
        "sampler_logps": (old + 0.3 * normal()).clamp(-80.0, -0.01),
        "nll_weights": 0.1 * torch.rand(shape, generator=g),
    }
    fields = {k: v.float() for k, v in fields.items() if k not in r.without}
    seen = dict(fields)
    if isinstance(objective.surrogate, RATIO_ONLY) and objective.level == "token" and "old_logps" in seen:
        seen["old_logps"] = torch.maximum(fields["old_logps"].double(), logps - BOUND)
    if spec.kl == "k3":
        seen["ref_logps"] = torch.minimum(fields["ref_logps"].double(), ref_of + BOUND)
    rubbish = torch.tensor([math.nan, math.inf, -math.inf, 1e30])[torch.arange(max(trained.numel(), 1)) % 4]
    rubbish = rubbish[: trained.numel()].view(shape)
    if poisoned is not None and memory.numel():
        logits.copy_(torch.where(poisoned.view(logits.shape), rubbish[..., None].to(logits.dtype), logits))
    if mask is not None or not bool(trained.all()):  # values outside the mask are arbitrary; the oracle does not use them
        fields = {k: torch.where(trained, v, rubbish) if v.shape == torch.Size(shape) else v for k, v in fields.items()}
        if memory.numel():
            logits[~trained] = rubbish[~trained][:, None].to(logits.dtype)
        if mask is not None:  # whether a set has its target is asked of all that the mask leaves
            targets = torch.where(mask, targets, r.vocab + 7 - 2000 * (torch.arange(mask.numel()).view(shape) % 2))
        if isinstance(temperature, Tensor) and temperature.shape == torch.Size(shape):
            transform["temperature"] = torch.where(trained, temperature, rubbish)
    own = {"mask": mask, "cu_seqlens": offsets}
    if objective.aggregate == "group-mean" or "group-mean" in objective.aggregates:
        own["groups"] = torch.arange(sequences) // 2
    case = Case(logits, {"targets": targets, **fields, **own, **kept_fields}, transform, keep)
    whole = None if mask is None and bool(trained.all()) else trained
    return Built(r, memory, case, objective, spec, {**seen, **own, "mask": whole}, whole, poisoned)


@dataclass
class Exact:
    """Results of all rows (0 where not trained), and bounds on the error of fp32."""

    loss: Tensor
    logps: Tensor  # [N]
    entropy: Tensor
    parts: list[Tensor]  # [N, V]: the gradients of the logits that are stored, whose sum is all of it
    room: dict[str, Tensor]  # of each of these
    clear: bool  # nothing is so near a bound, or so ill-conditioned, that rounding decides
    at: Tensor | None = None  # log-probs of further ids

    @property
    def gradient(self) -> Tensor:
        return torch.stack(self.parts).sum(0)


class Rows:
    """The trained rows in float64, from logits [.., V]; `more`: what those are off already, [N].

    sets, whole   their softmaxes over the sets, and over the vocabulary where something is taken over it (else the same)."""

    def __init__(self, built: Built, logits: Tensor, more: Tensor | None = None) -> None:
        recipe, targets, t = built.recipe, built.case.targets, built.case.transform
        self.n = targets.numel()
        self.at = torch.arange(self.n) if built.trained is None else built.trained.reshape(-1).nonzero()[:, 0]
        self.sequences = oracle.sequences_of(targets, built.case.fields["cu_seqlens"])
        x = logits.detach().double().reshape(self.n, recipe.vocab)
        if built.poisoned is not None:
            x = torch.where(built.poisoned, 0.0, x)
        inverse = 1 / oracle.to_rows(t["temperature"], self.sequences, torch.float64)[self.at, None]
        ids, everything = targets.reshape(-1)[self.at, None], torch.ones_like(x, dtype=torch.bool)
        keep = everything if built.case.keep is None else built.case.keep
        more = torch.zeros(self.n, dtype=torch.float64) if more is None else more.reshape(-1)
        self.sets, self.whole = (
            Softmax(x[self.at], chosen[self.at], ids, t["scale"], t["softcap"], inverse, more[self.at])
            for chosen in (keep, everything)
        )
        if not recipe.kept.over:
            self.whole = self.sets
        over = self.whole if "entropy" in recipe.kept.over else self.sets
        self.entropy, self.entropy_off, self.entropy_of = over.entropy, over.off, over

    @property
    def softmaxes(self) -> list[Softmax]:
        return [self.sets] if self.whole is self.sets else [self.sets, self.whole]

    def everywhere(self, x: Tensor) -> Tensor:
        """Rows that are not trained are 0."""
        out = x.new_zeros(self.n, *x.shape[1:])
        out[self.at] = x.detach()
        return out

    def exact(self, loss: Tensor, parts: list[Tensor], of_loss: Tensor, of_gradient: Tensor, clear: bool) -> Exact:
        room = {
            "loss": of_loss,
            "logps": self.everywhere(self.sets.off),
            "entropy": self.everywhere(self.entropy_off * (2 + 2 * self.entropy.detach())),
            "gradient": self.everywhere(of_gradient),
        }
        off = torch.cat([softmax.off for softmax in self.softmaxes])
        clear = clear and float(off.max() if len(off) else 0.0) < 1e-2
        parts = [self.everywhere(part) for part in parts]
        return Exact(loss.detach(), self.everywhere(self.sets.chosen), self.everywhere(self.entropy), parts, room, clear)


def exact_logprobs(
    built: Built, logits: Tensor, d_logps: Tensor, d_entropy: Tensor | None, more: Tensor | None = None,
    at: TokenSets | None = None, d_at: Tensor | None = None,
) -> Exact:  # fmt: skip
    """`at`, `d_at`: further ids, and what arrives at their log-probs."""
    rows = Rows(built, logits, more)
    a = d_logps.double().reshape(-1)[rows.at]
    b = torch.zeros_like(a) if d_entropy is None else d_entropy.double().reshape(-1)[rows.at]
    loss = (a * rows.sets.chosen).sum() + (b * rows.entropy).sum()
    room = rows.sets.room(a, EPS * a.abs(), b, torch.zeros_like(rows.sets.x))
    outputs, upstream, logps_at, of_logps_at = [loss], [torch.ones_like(loss)], None, None
    if at is not None and d_at is not None:
        place = torch.full((rows.n,), -1).index_put((rows.at,), torch.arange(len(rows.at)))[at.row_of]
        here, ids = place >= 0, at.ids.long()
        found = rows.sets.all[place[here], ids[here]]
        slopes = torch.where(rows.sets.keep[place[here], ids[here]], d_at.double()[here], 0.0)
        outputs, upstream = [loss, found], [upstream[0], slopes]
        logps_at, of_logps_at = (torch.zeros(len(ids), dtype=torch.float64) for _ in range(2))
        logps_at[here], of_logps_at[here] = found.detach(), rows.sets.off[place[here]]
        for k in range(at.longest):  # the k-th id of every row that has one
            own = (torch.arange(len(ids)) - at.offsets[at.row_of] == k)[here]
            slope, of = torch.zeros_like(a), torch.zeros(len(a), 1, dtype=torch.int64)
            slope[place[here][own]], of[place[here][own], 0] = slopes[own], ids[here][own]
            room = room + rows.sets.room(slope, 2 * EPS * slope.abs(), torch.zeros_like(a), torch.zeros_like(room), of)
    leaves = [softmax.x for softmax in rows.softmaxes]
    parts = torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True)
    if rows.whole is not rows.sets:
        room = room + rows.whole.room(torch.zeros_like(a), torch.zeros_like(a), b, torch.zeros_like(rows.whole.x))
    room = room + sum(4 * EPS * part.abs() for part in parts)
    exact = rows.exact(loss, list(parts), EPS * loss.detach(), room, True)
    exact.at = logps_at
    if of_logps_at is not None:
        exact.room["at"] = of_logps_at
    return exact


def exact_loss(built: Built, logits: Tensor, more: Tensor | None = None) -> Exact:
    r, rows = built.recipe, Rows(built, logits, more)

    def flat(x: Tensor) -> Tensor:
        return torch.zeros(rows.n, dtype=torch.float64).index_put((rows.at,), x)

    values, whole = [flat(rows.sets.chosen), flat(rows.entropy)], flat(rows.whole.chosen)
    apart = "reference" in r.kept.over and built.spec.beta != 0
    nothing = torch.zeros_like(built.seen["advantages"])

    def run(spec: Spec, **changes: Any) -> tuple[Tensor, float]:
        fields = {k: v for k, v in built.seen.items() if k != "cu_seqlens"} | changes
        if not apart or spec.beta == 0:
            result = oracle.objective(spec, *values, rows.sequences, normalizer=r.normalizer, **fields)
            return result.loss, result.margin
        own, margin = run(replace(spec, beta=0.0), **changes)
        alone = Spec("policy-gradient", **{name: getattr(spec, name) for name in OF_KL})
        fields |= {"advantages": nothing, "nll_weights": None}
        result = oracle.objective(alone, whole, torch.zeros_like(whole), rows.sequences, normalizer=r.normalizer, **fields)
        return own + result.loss, min(margin, result.margin)

    loss, margin = run(built.spec)
    # With the size of its parts, which may cancel.
    kinds = [
        loss,
        run(replace(built.spec, beta=0.0, entropy_coef=0.0), nll_weights=None)[0],
        run(replace(built.spec, entropy_coef=0.0), advantages=nothing)[0],
    ]
    # What every token could at least count, so that a slope which happens to be 0 has room.
    weights = built.objective.token_rows(built.case.batch(), r.denominators)
    unit = weights.policy_weight.double().abs() * (1 + weights.advantages.double().abs())
    for weight in (weights.kl_weight, weights.entropy_weight, weights.nll_weight):
        unit = unit if weight is None else unit + 4 * weight.double().abs()
    together = not built.objective.one_pass
    losses = built.objective.token_stage(
        *(x.detach().float() for x in values), replace(weights, kl_weight=None) if apart else weights, built.case.batch()
    )[0]
    parts, of_gradient = [], torch.zeros_like(rows.sets.x.detach())
    of_loss = 16 * EPS * (losses.double().abs().sum() + unit.sum() + loss.detach().abs())
    for softmax in rows.softmaxes:
        inputs = [softmax.x, softmax.chosen, softmax.entropy]
        gradient, a, b = torch.autograd.grad(loss, inputs, materialize_grads=True, retain_graph=True)
        size = sum(torch.autograd.grad(x, inputs[1], materialize_grads=True, retain_graph=True)[0].abs() for x in kinds)
        size = size + (unit.sum() if together else unit[rows.at])
        moved = softmax.off.sum().expand(len(rows.at)) if together else softmax.off
        # A ratio that is a constant to the gradient moves the loss all the same, by as much as log-probs are large.
        heavy = 1 + softmax.chosen.detach().abs() if built.objective.surrogate.detached_ratio else 1.0
        of_loss = of_loss + (2 * moved * size * heavy).sum()
        of_gradient = of_gradient + softmax.room(a, (2 * moved + 8 * EPS) * size, b, gradient)
        parts.append(gradient)
    # Ratios and covariances move by more than log-probs do; log(1 - p) by more where p is near 1.
    off, chosen = (torch.cat([getattr(x, name).detach() for x in rows.softmaxes]) for name in ("off", "chosen"))
    reach = 64 * float(off.sum()) * (1 + float(built.seen["advantages"].abs().sum())) + 1e-5
    if r.goal.filter == "kl to old" and len(rows.at):
        reach /= 1e-8 + float((1 - rows.sets.chosen.detach().exp()).min())
    # A log-prob below -10,000 counts as that in a KL, which the oracle does not do.
    deep = built.spec.beta != 0 and bool((chosen < -9000).any())
    return rows.exact(loss, parts, of_loss, of_gradient, margin > reach and not deep)
