"""Random cases for test_fuzz.py: drawn as a few plain values, which print and shrink well, made into tensors from a seed.

Beside the float64 results a case knows how far fp32 arithmetic may be from them: each row's logits are rounded once or
twice, which moves their exponentials by as much as they are large, and everything after that by so much more."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from grpo_kernels import Denominators, Objective, TokenBatch
from grpo_kernels.formulas.filters import OffPolicySequences, TrustRegion
from grpo_kernels.formulas.surrogates import Cispo, Clip, ClipCov, ImportanceSampling, PolicyGradient, Sapo
from support import oracle
from support.cases import Case
from support.options import AGGREGATES, BONUSES, BOUNDS, FILTERS, KLS, SURROGATES, Option
from support.oracle import Spec

Tensor = torch.Tensor

EPS = 2.0**-23
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = {str(d).removeprefix("torch."): d for d in ROUNDING}
#: Those whose every use of the log-ratio is a ratio, bounded at e^60. Beyond that the oracle, which has no bound, is shown
#: a log-ratio of 60: value and slope are then the same. So is k3 beyond 60 of its own, to all digits.
RATIO_ONLY = (Clip, Cispo, ClipCov, ImportanceSampling, PolicyGradient, Sapo)
BOUND = 60.0


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
    rewritten: str = "no"  # how mask and advantages came to be what they are, after the batch was made

    @property
    def denominators(self) -> Any:
        """The argument of a loss."""
        return Denominators(*self.normalizer) if isinstance(self.normalizer, tuple) else self.normalizer


VIEWS = ("whole", "without the last token", "padded vocabulary", "transposed", "every other logit")


@st.composite
def recipes(draw: st.DrawFn, linear: bool = False) -> Recipe:
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
        inplace=draw(st.booleans()),
        skip_inactive=draw(st.booleans()),
        width=one_of(4, 1, 16, 33),
        bias=one_of("none", "plain", "a column"),
        rewritten=one_of("no", "no", "no", "by NumPy", "as .data", "in inference mode"),
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
    temperature: float | Tensor
    if isinstance(r.temperature, str):
        temperature = 0.2 + 2.0 * torch.rand(shape if r.temperature == "per token" or len(shape) == 1 else (B, 1), generator=g)
    else:
        temperature = r.temperature
    transform = {"temperature": temperature, "softcap": r.softcap, "scale": r.scale}
    _, logps, _ = oracle.log_probs(logits.double(), targets, oracle.Transform(**transform))
    logps = logps.view(shape)

    def normal(*size: int) -> Tensor:
        return torch.randn(size or shape, generator=g, dtype=torch.float64)

    old = logps - r.log_ratio * normal()
    if objective.filters:
        old = old.clamp(-80.0, -0.01)  # a probability, in fp32
    ref = logps + min(r.log_ratio, 100.0) * normal()
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
        seen["ref_logps"] = torch.minimum(fields["ref_logps"].double(), logps + BOUND)
    if mask is not None:  # what lies outside the mask is rubbish, which the oracle does not look at
        rubbish = torch.tensor([math.nan, math.inf, -math.inf, 1e30])[torch.arange(max(trained.numel(), 1)) % 4]
        rubbish = rubbish[: trained.numel()].view(shape)
        fields = {k: torch.where(trained, v, rubbish) if v.shape == torch.Size(shape) else v for k, v in fields.items()}
        if memory.numel():
            logits[~trained] = rubbish[~trained][:, None].to(logits.dtype)
        targets = torch.where(trained, targets, r.vocab + 7 - 2000 * (torch.arange(trained.numel()).view(shape) % 2))
        if isinstance(temperature, Tensor) and temperature.shape == torch.Size(shape):
            transform["temperature"] = torch.where(trained, temperature, rubbish)
    own = {"mask": mask, "cu_seqlens": offsets}
    if objective.aggregate == "group-mean" or "group-mean" in objective.aggregates:
        own["groups"] = torch.arange(sequences) // 2
    case = Case(logits, {"targets": targets, **fields, **own}, transform)
    return Built(r, memory, case, objective, spec, {**seen, **own})


@dataclass
class Exact:
    """Results of all rows (0 where not trained) and how far fp32 may be from them."""

    loss: Tensor
    logps: Tensor  # [N]
    entropy: Tensor
    gradient: Tensor  # [N, V], of the logits
    room: dict[str, Tensor]  # of each of these
    clear: bool  # nothing is so near a bound, or so ill-conditioned, that rounding decides


class Rows:
    """The trained rows in float64, from logits [.., V]; `more`: what those are off already, [N]."""

    def __init__(self, built: Built, logits: Tensor, more: Tensor | None = None) -> None:
        targets, mask, t = built.case.targets, built.case.mask, built.case.transform
        self.n = targets.numel()
        self.at = torch.arange(self.n) if mask is None else mask.reshape(-1).nonzero()[:, 0]
        self.sequences = oracle.sequences_of(targets, built.case.fields["cu_seqlens"])
        self.x = logits.detach().double().reshape(self.n, built.recipe.vocab)[self.at].requires_grad_()
        inverse = 1 / oracle.to_rows(t["temperature"], self.sequences, torch.float64)[self.at, None]
        z, self.steep = self.x * t["scale"], (t["scale"] * inverse).abs() * torch.ones_like(self.x.detach())
        self.cancelled: Tensor | float = 0.0
        if t["softcap"] is not None:
            self.cancelled = 4 * EPS * self.steep  # 1 - tanh^2 in fp32, which is torch's own derivative
            self.steep = self.steep * torch.cosh((z.detach() / t["softcap"]).clamp(-300, 300)) ** -2
            z = t["softcap"] * torch.tanh(z / t["softcap"])
        log_p = torch.log_softmax(z * inverse, -1)
        self.ids = targets.reshape(-1)[self.at, None]
        self.chosen = log_p.gather(1, self.ids)[:, 0]
        self.log_p = torch.where(log_p == -math.inf, 0.0, log_p)
        self.p = log_p.exp()
        self.entropy = -(self.p * self.log_p).sum(1)
        # What rounding does to a row's transformed logits, and so to its log-probs.
        size = torch.where(z.isfinite(), z.detach().abs(), 0.0).amax(1) * inverse[:, 0]
        self.off = EPS * (2.0 + 2.0 * size + math.log(built.recipe.vocab))
        if more is not None:
            self.off = self.off + more.reshape(-1)[self.at] * self.steep.amax(1)

    def everywhere(self, x: Tensor) -> Tensor:
        """Rows that are not trained are 0."""
        out = x.new_zeros(self.n, *x.shape[1:])
        out[self.at] = x.detach()
        return out

    def room(self, a: Tensor, off_a: Tensor, b: Tensor, gradient: Tensor) -> Tensor:
        """Of dz/dx (a (onehot - p) - b p (log p + H)), whose a is off by off_a."""
        onehot = torch.zeros_like(self.p.detach()).scatter_(1, self.ids, 1.0)
        p, H, off = self.p.detach(), self.entropy.detach()[:, None], self.off[:, None]
        a, b = a.abs()[:, None], b.abs()[:, None]
        swing = p * (self.log_p.detach().abs() + H)
        moved = a * (p + onehot * (off + EPS)) + b * (swing + p * (2 + 2 * H))
        room = off_a[:, None] * (onehot - p).abs() + 2 * off * moved + EPS * a * onehot
        room = (room + (a + b) * 1.3e-36) * self.steep  # exp(-87) counts as 0
        return room + self.cancelled * (a * (onehot - p).abs() + b * swing) + 4 * EPS * gradient.abs()

    def exact(self, loss: Tensor, gradient: Tensor, of_loss: Tensor, of_gradient: Tensor, clear: bool) -> Exact:
        room = {
            "loss": of_loss,
            "logps": self.everywhere(self.off),
            "entropy": self.everywhere(self.off * (2 + 2 * self.entropy.detach())),
            "gradient": self.everywhere(of_gradient),
        }
        clear = clear and float(self.off.max() if len(self.at) else 0.0) < 1e-2
        return Exact(
            loss.detach(), self.everywhere(self.chosen), self.everywhere(self.entropy), self.everywhere(gradient), room, clear
        )


def exact_logprobs(
    built: Built, logits: Tensor, d_logps: Tensor, d_entropy: Tensor | None, more: Tensor | None = None
) -> Exact:
    rows = Rows(built, logits, more)
    a = d_logps.double().reshape(-1)[rows.at]
    b = torch.zeros_like(a) if d_entropy is None else d_entropy.double().reshape(-1)[rows.at]
    loss = (a * rows.chosen).sum() + (b * rows.entropy).sum()
    (gradient,) = torch.autograd.grad(loss, rows.x, materialize_grads=True)
    return rows.exact(loss, gradient, EPS * loss.detach(), rows.room(a, EPS * a.abs(), b, gradient), True)


def exact_loss(built: Built, logits: Tensor, more: Tensor | None = None) -> Exact:
    r, rows = built.recipe, Rows(built, logits, more)
    flat = [torch.zeros(rows.n, dtype=torch.float64).index_put((rows.at,), v) for v in (rows.chosen, rows.entropy)]

    def run(spec: Spec, **changes: Any) -> oracle.Result:
        fields = {k: v for k, v in built.seen.items() if k != "cu_seqlens"} | changes
        return oracle.objective(spec, *flat, rows.sequences, normalizer=r.normalizer, **fields)

    result = run(built.spec)
    gradient, a, b = torch.autograd.grad(
        result.loss, [rows.x, rows.chosen, rows.entropy], materialize_grads=True, retain_graph=True
    )
    size = a.abs()  # with that of its parts, which may cancel
    for spec, changes in (
        (replace(built.spec, beta=0.0, entropy_coef=0.0), {"nll_weights": None}),
        (replace(built.spec, entropy_coef=0.0), {"advantages": torch.zeros_like(built.seen["advantages"])}),
    ):
        loss = run(spec, **changes).loss
        size = size + torch.autograd.grad(loss, rows.chosen, materialize_grads=True, retain_graph=True)[0].abs()

    # What every token could at least count, so that a slope which happens to be 0 has room.
    weights = built.objective.token_rows(built.case.batch(), r.denominators)
    unit = weights.policy_weight.double().abs() * (1 + weights.advantages.double().abs())
    for weight in (weights.kl_weight, weights.entropy_weight, weights.nll_weight):
        unit = unit if weight is None else unit + 4 * weight.double().abs()
    together = not built.objective.one_pass
    size = size + (unit.sum() if together else unit[rows.at])
    moved = rows.off.sum().expand(len(rows.at)) if together else rows.off
    values = [x.detach().float() for x in flat]
    losses = built.objective.token_stage(*values, weights, built.case.batch())[0]
    # A ratio that is a constant to the gradient moves the loss all the same, by as much as log-probs are large.
    heavy = 1 + rows.chosen.detach().abs() if built.objective.surrogate.detached_ratio else 1.0
    of_loss = (2 * moved * size * heavy).sum() + 16 * EPS * (losses.double().abs().sum() + unit.sum())
    # Ratios and covariances move by more than log-probs do; log(1 - p) by more where p is near 1.
    reach = 64 * float(rows.off.sum()) * (1 + float(built.seen["advantages"].abs().sum())) + 1e-5
    if r.goal.filter == "kl to old" and len(rows.at):
        reach /= 1e-8 + float((1 - rows.chosen.detach().exp()).min())
    of_gradient = rows.room(a, (2 * moved + 8 * EPS) * size, b, gradient)
    # A log-prob below -10,000 counts as that in a KL, which the oracle does not do.
    deep = built.spec.beta != 0 and bool((rows.chosen < -9000).any())
    return rows.exact(result.loss, gradient, of_loss, of_gradient, result.margin > reach and not deep)
