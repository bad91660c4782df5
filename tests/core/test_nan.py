"""A NaN that reaches a trained token of nonzero weight: the loss is NaN, and so is the gradient of
its row.

Every preset, surrogate, level, filter and KL, every number of a token, from logits, hidden states
and log-probs. At a sequence level a NaN that reaches the ratio reaches all trained tokens of the
sequence, as in plain PyTorch. Masked tokens hold NaN in every call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import (
    Custom,
    Exact,
    Objective,
    Options,
    TokenBatch,
    TokenSets,
    grpo_loss,
    linear_grpo_loss,
)
from grpo_kernels.formulas.centering import ScoreCentering
from grpo_kernels.formulas.filters import (
    EntropyFloor,
    EntropyQuantile,
    Filter,
    OffPolicySequences,
    SamplerMismatch,
    TrustRegion,
)
from grpo_kernels.formulas.kl import ESTIMATORS, WEIGHTINGS, Kl
from grpo_kernels.formulas.ops import ops
from grpo_kernels.formulas.surrogates import Cispo, Clip
from grpo_kernels.losses import objective_loss
from grpo_kernels.objective import PRESETS
from support import oracle
from support.inside import in_chunks, values_unseen
from support.objectives import PAPERS
from support.processes import interpreted

B, T, V, H = 3, 4, 11, 5
MASK = torch.ones(B, T, dtype=torch.bool)
MASK[0, 3] = False
MASK[1, 0] = False
#: The token with the NaN, and the trained tokens of its sequence.
AT = (1, 2)
TOKEN = torch.zeros(B, T, dtype=torch.bool)
TOKEN[AT] = True
SEQUENCE = MASK & (torch.arange(B) == AT[0])[:, None]
INPUTS = ("logits", "hidden", "frozen head", "logps")


def ignoring(logp, old_logp, advantage, params):
    """A surrogate whose comparison hides a NaN."""
    far = logp - old_logp > 0.5
    return ops.where(far, -advantage * logp, 0.0), ops.where(far, -advantage, 0.0)


def ignoring_kl(logp, old_logp, ref_logp):
    """A KL estimator whose comparison hides a NaN."""
    d = ref_logp - logp
    return ops.where(d > 0.5, -d, 0.0), ops.where(d > 0.5, 1.0, 0.0)


@dataclass(frozen=True)
class NearOld(Filter):
    """A filter of a user, which keeps a NaN."""

    def keep(self, logps, entropy, rows, batch):
        return ~((logps - rows.old_logps).abs() > 9.0)


def levels_of(objective: Objective) -> tuple[str, ...]:
    single = objective.filter(TrustRegion) is not None or objective.future_kl is not None
    return ("token",) if single else objective.surrogate.levels


def objectives(name: str) -> Iterator[Objective]:
    """A preset at each of its levels."""
    preset = PRESETS[name]
    for level in levels_of(preset):
        yield replace(preset, level=level, max_tokens=T)


REGIONS = [TrustRegion(kind, 9.0, 9.0) for kind in ("tv", "symmetric-tv", "kl", "ratio")]
#: Options beside the presets: filters that keep every token without a NaN, KL estimators, bounds,
#: surrogates of a user.
OPTIONS: dict[str, Objective] = {
    **{f"{f}": Objective(filters=(f,)) for f in [*REGIONS, EntropyFloor(0.0), EntropyQuantile(1.0), NearOld()]},
    "a region without a ratio": replace(PRESETS["reinforce"], filters=(REGIONS[0],)),
    "off-policy sequences": Objective(level="sequence", filters=(OffPolicySequences(9.0),)),
    "far from the sampler": Objective(filters=(SamplerMismatch(9.0),)),
    "far from the sampler, a sequence level": Objective(level="sequence", filters=(SamplerMismatch(9.0, normalize=False),)),
    "a floor and a bonus": Objective(entropy_coef=0.1, filters=(EntropyFloor(0.0),)),
    "a quantile and a bonus": Objective(entropy_coef=0.1, filters=(EntropyQuantile(1.0),), entropy_aggregate="token-mean"),
    **{f"{e}, {w}": Objective(beta=0.1, kl=Kl(e, w)) for e in ESTIMATORS for w in WEIGHTINGS if e != "distillation"},
    **{f"{e}, {w}, clamps": Objective(beta=0.1, kl=Kl(e, w, clamp_log=9.0, clamp=9.0)) for e in ("k3", "abs") for w in WEIGHTINGS},
    "a KL at a sequence level": Objective(level="sequence", beta=0.1, kl=Kl("k3", "ratio")),
    "a straight-through KL": Objective(beta=0.1, kl="k3+"),
    "distillation alone": Objective(PRESETS["distillation"].surrogate, beta=1.0, kl="distillation"),
    "a KL of a user": Objective(beta=0.1, kl=ignoring_kl),
    "bounds": Objective(log_ratio_bounds=(-9.0, 9.0)),
    "bounds of a detached ratio": replace(PRESETS["cispo"], log_ratio_bounds=(-9.0, 9.0)),
    "bounds at a sequence level": replace(PRESETS["gspo"], log_ratio_bounds=(-9.0, 9.0)),
    "a surrogate of a user": Objective(Custom(ignoring)),
    "a surrogate of a user at a sequence level": Objective(Custom(ignoring), level="sequence"),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    fields: dict[str, Tensor]

    @classmethod
    def drawn(cls, objective: Objective, sign: float) -> Problem:
        """Numbers that no filter drops. `sign`: of the advantage at AT."""
        g = torch.Generator().manual_seed(3)
        hidden, weight = torch.randn(B, T, H, generator=g), torch.randn(V, H, generator=g)
        targets = torch.randint(V, (B, T), generator=g)
        logps = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        advantages = torch.rand(B, T, generator=g) + 0.5
        advantages[1] *= -1.0
        advantages[AT] = sign
        fields = {
            "old_logps": logps - 1e-4 * torch.randn(B, T, generator=g), "advantages": advantages,
            "weights": torch.rand(B, T, generator=g) + 0.5, "nll_weights": 0.1 * torch.rand(B, T, generator=g),
        }  # fmt: skip
        if objective.filter(SamplerMismatch) is not None:
            fields["sampler_logps"] = logps.clone()
        if objective.beta and objective.exact is None:
            fields["ref_logps"] = logps + 0.1 * torch.randn(B, T, generator=g)
        return cls(hidden, weight, targets, fields)

    def run(
        self,
        objective: Objective,
        inputs: str,
        backend: str,
        broken: str = "",
        value: float = math.nan,
    ) -> Found:
        """The loss and its gradients, with `value` in `broken` at AT: a field of the batch, "row"
        (of hidden states or logits, or a log-prob) or "logit".
        """
        poisoned = torch.where(MASK, 0.0, math.nan)
        fields = {name: x + poisoned for name, x in self.fields.items()}
        if broken in fields:
            fields[broken][AT] = value
        batch = TokenBatch(self.targets, mask=MASK, **fields)
        hidden = self.hidden + poisoned[..., None]
        options, weight = Options(backend=backend), None
        if inputs in ("hidden", "frozen head"):
            if broken == "row":
                hidden[AT] = value
            leaf, weight = (
                hidden.requires_grad_(),
                self.weight.clone().requires_grad_(inputs == "hidden"),
            )
            reference = (self.hidden + 0.1, self.weight) if objective.exact else None
            out = linear_grpo_loss(
                leaf, weight, batch, objective, reference=reference, options=options
            )
        elif inputs == "logits":
            logits = hidden @ self.weight.T
            if broken == "row":
                logits[AT] = value
            elif broken == "logit":
                logits[AT][(self.targets[AT] + 1) % V] = value
            leaf = logits.requires_grad_()
            ref = self.hidden @ self.weight.T + 0.1 if objective.exact else None
            out = grpo_loss(leaf, batch, objective, ref_logits=ref, options=options)
        else:
            logits = hidden @ self.weight.T
            log_p = logits.log_softmax(-1)
            leaf = log_p.gather(-1, self.targets[..., None])[..., 0]
            if broken == "row":
                leaf[AT] = value
            entropy = -(log_p.exp() * log_p).sum(-1)
            if broken == "entropy":
                entropy[AT] = value
            divergence = leaf.abs() if objective.exact else None
            leaf.requires_grad_()
            out = objective_loss(leaf, batch, objective, entropy=entropy, divergence=divergence)
        out.loss.backward()
        assert leaf.grad is not None
        of_weight = weight.grad if weight is not None else None
        return Found(out.loss.detach(), leaf.grad.view(B, T, -1), of_weight)


@dataclass(frozen=True)
class Found:
    loss: Tensor
    rows: Tensor  # [B, T, ..], the gradient of each token's row
    weight: Tensor | None


def sources_of(objective: Objective, inputs: str) -> list[str]:
    names = ["old_logps", "advantages", "weights", "nll_weights", "row"]
    if objective.beta and objective.exact is None:
        names.append("ref_logps")
    reads_entropy = objective.needs_entropy or any(f.filters_entropy for f in objective.filters)
    more = {"logits": ["logit"], "logps": ["entropy"] if reads_entropy else []}
    return names + more.get(inputs, [])


def reached(objective: Objective, source: str) -> Tensor:
    """bool [B, T]: the tokens whose rows a NaN of AT reaches."""
    of_ratio = source in ("old_logps", "row", "logit")
    through = objective.through_sequence and source in ("advantages", "weights", "entropy")
    of_weights = source == "weights" and objective.surrogate.absorbs_weights
    of_kl = (
        source == "ref_logps"
        and objective.level == "sequence"
        and objective.kl_spec.weighting == "ratio"
    )
    whole = objective.level != "token" and (of_ratio or through or of_weights or of_kl)
    if objective.future_kl is not None and of_ratio:
        return SEQUENCE & (torch.arange(T) <= AT[1])
    return SEQUENCE if whole else TOKEN


def check(
    objective: Objective, inputs: str, backend: str, signs: tuple[float, ...] = (1.0, -1.0)
) -> int:
    """Raise unless each source of NaN makes the loss and the gradients of the rows that it reaches
    NaN, and no others. Returns the number of calls.
    """
    calls = 0
    for sign in signs:
        problem = Problem.drawn(objective, sign)
        clean = problem.run(objective, inputs, backend)
        assert clean.loss.isfinite()
        assert clean.rows.isfinite().all()
        for source in sources_of(objective, inputs):
            found = problem.run(objective, inputs, backend, source)
            what = (objective, inputs, source, sign)
            rows = reached(objective, source)
            assert found.loss.isnan(), what
            assert found.rows[rows].isnan().all(), what
            assert found.rows[~rows].isfinite().all(), what
            if not objective.surrogate.selects:
                torch.testing.assert_close(
                    found.rows[~rows], clean.rows[~rows], rtol=1e-5, atol=1e-7
                )
            assert found.weight is None or found.weight.isnan().any(), what
            calls += 1
    return calls


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name, backend):
    for objective in objectives(name):
        signs = {
            inputs: (1.0, -1.0) if inputs in ("logits", "logps") else (1.0,) for inputs in INPUTS
        }
        assert sum(check(objective, inputs, backend, signs[inputs]) for inputs in INPUTS) >= 30


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, backend):
    assert (
        sum(
            check(OPTIONS[name], inputs, backend, (1.0,))
            for inputs in ("logits", "hidden", "logps")
        )
        >= 15
    )


def test_presets_on_policy(backend):
    """Without old_logps."""
    for name in PRESETS:
        for objective in objectives(name):
            problem = Problem.drawn(objective, -1.0)
            del problem.fields["old_logps"]
            for inputs in INPUTS:
                for source in ("row", "advantages"):
                    found = problem.run(objective, inputs, backend, source)
                    what = (objective, inputs, source)
                    assert found.loss.isnan(), what
                    assert found.rows[reached(objective, source)].isnan().all(), what


# ---- what plain PyTorch does


@pytest.mark.parametrize("source", ["old_logps", "advantages", "ref_logps", "row"])
@pytest.mark.parametrize("name", PAPERS)
def test_nan_wherever_autograd_has_it(name, source):
    """Of the papers' formulas in float64:

    the loss and each gradient that is NaN there is NaN here.
    """
    spec = replace(PAPERS[name], max_tokens=T)
    objective = replace(PRESETS[name], max_tokens=T)
    if source == "ref_logps" and not objective.beta:
        spec, objective = replace(spec, beta=0.1), replace(objective, beta=0.1)
    for sign in (1.0, -1.0):
        problem = Problem.drawn(objective, sign)
        fields = {key: x.clone() for key, x in problem.fields.items()}
        leaf = (
            (problem.hidden @ problem.weight.T)
            .log_softmax(-1)
            .double()
            .gather(-1, problem.targets[..., None])
            .flatten()
        )
        index = AT[0] * T + AT[1]
        if source == "row":
            leaf[index] = math.nan
        else:
            fields[source][AT] = math.nan
        fields = {key: x.flatten() for key, x in fields.items()}
        leaf.requires_grad_()
        sequences = oracle.sequences_of(problem.targets, None)
        chosen = (
            {"selected": torch.zeros(B * T, dtype=torch.bool)}
            if objective.surrogate.selects
            else {}
        )
        plain = oracle.objective(
            spec, leaf, torch.zeros(B * T).double(), sequences, mask=MASK, **fields, **chosen
        )
        (gradient,) = torch.autograd.grad(plain.loss, leaf)
        found = problem.run(objective, "logps", "eager", source)
        assert found.loss.isnan() or not plain.loss.isnan()
        assert found.rows.flatten()[gradient.isnan()].isnan().all()


# ---- what a NaN does not reach


@pytest.mark.parametrize("inputs", INPUTS)
def test_a_token_of_weight_0_is_left_out(inputs, backend):
    """At the token level. At the others its log-ratio is a part of that of its sequence."""
    for name in PRESETS:
        objective = (
            replace(PRESETS[name], level="token", max_tokens=T)
            if "token" in PRESETS[name].surrogate.levels
            else None
        )
        if objective is None or objective.beta or objective.future_kl is not None:
            continue  # the weights of the tokens before it depend on its ratio
        problem = Problem.drawn(objective, 1.0)
        problem.fields["weights"][AT] = 0.0
        problem.fields["nll_weights"][AT] = 0.0
        for source in ("old_logps", "advantages"):
            found = problem.run(objective, inputs, backend, source)
            assert found.loss.isfinite(), (name, source)
            assert found.rows.isfinite().all(), (name, source)
            assert not found.rows[AT].any(), (name, source)


@pytest.mark.parametrize("kind", ["tv", "symmetric-tv", "kl", "ratio"])
def test_a_token_without_a_sampler_is_dropped(kind, backend):
    """NaN in sampler_logps says that the sampler did not score the token.

    A NaN of its own is not hidden by this.
    """
    objective = Objective(filters=(TrustRegion(kind, 9.0, 9.0, "sampler"),))
    for sign in (1.0, -1.0, 0.0):
        problem = Problem.drawn(objective, sign)
        del problem.fields["nll_weights"]
        problem.fields["sampler_logps"] = problem.fields["old_logps"].clone()
        for inputs in INPUTS:
            found = problem.run(objective, inputs, backend, "sampler_logps")
            assert found.loss.isfinite()
            assert found.rows.isfinite().all()
            assert not found.rows[AT].any()
    problem.fields["sampler_logps"][AT] = math.nan
    found = problem.run(objective, "logits", backend, "old_logps")
    assert found.loss.isnan()
    assert found.rows[AT].isnan().all()


def test_an_advantage_of_0(backend):
    """The loss is NaN. The gradient of the row is NaN from logits and log-probs; from hidden states
    no gradient is computed for a row without an advantage.
    """
    for name in ("dapo", "gmpo"):
        objective = PRESETS[name]
        problem = Problem.drawn(objective, 0.0)
        del problem.fields["nll_weights"]
        for inputs in INPUTS:
            for source in ("old_logps", "row"):
                found = problem.run(objective, inputs, backend, source)
                assert found.loss.isnan(), (name, inputs, source)
                rows = found.rows[reached(objective, source)]
                assert rows.isnan().all() or (
                    name == "dapo" and inputs in ("hidden", "frozen head") and not rows.any()
                ), (
                    name,
                    inputs,
                    source,
                )


@pytest.mark.parametrize("chunk", [0, 2], ids=["a block", "two blocks"])
@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "luspo"])
def test_a_sequence_of_advantage_0(name, chunk, backend, monkeypatch):
    """Only the loss is NaN from hidden states, with a trained and with a frozen head, also for a
    sequence that is longer than a block.
    """
    if chunk:
        in_chunks(monkeypatch, chunk)
    objective = PRESETS[name]
    problem = Problem.drawn(objective, 0.0)
    del problem.fields["nll_weights"]
    problem.fields["advantages"][AT[0]] = 0.0
    for inputs in ("hidden", "frozen head"):
        clean = problem.run(objective, inputs, backend)
        for source in ("old_logps", "row"):
            found = problem.run(objective, inputs, backend, source)
            assert found.loss.isnan(), (inputs, source)
            assert torch.equal(found.rows, clean.rows), (inputs, source)
            assert found.rows.any()
            if found.weight is not None:
                assert torch.equal(found.weight, clean.weight), source


@pytest.mark.parametrize("f", [EntropyFloor(1e3), EntropyQuantile(1e-3)], ids=str)
def test_a_token_of_low_entropy_is_dropped(f, backend):
    """With a NaN of its own: the filter does not look at it."""
    objective = Objective(filters=(f,))
    problem = Problem.drawn(objective, 1.0)
    problem.hidden[AT] *= 20.0  # which makes its entropy the lowest
    del problem.fields["nll_weights"]
    for inputs in INPUTS:
        for source in ("old_logps", "advantages"):
            found = problem.run(objective, inputs, backend, source)
            assert found.loss.isfinite()
            assert not found.rows[AT].any()


def test_sequences_that_moved_away_do_not_hide_a_nan(backend):
    """Of negative advantage: a NaN advantage, log-prob or old log-prob among them is a NaN loss."""
    objective = Objective(filters=(OffPolicySequences(0.5),))
    problem = Problem.drawn(objective, -1.0)
    problem.fields["old_logps"][1] += 9.0
    clean = problem.run(objective, "logits", backend)
    del problem.fields["nll_weights"]
    assert not problem.run(objective, "logits", backend).rows[1].any()
    assert clean.loss.isfinite()
    for source in ("old_logps", "advantages", "row"):
        found = problem.run(objective, "logits", backend, source)
        assert found.loss.isnan(), source
        assert found.rows[AT].isnan().all(), source


def one(logp, values, advantage, sums):
    """Terms of an advantage-free log-prob; NaN where the value is 0."""
    c = values / values
    return c * logp, c


def test_terms_at_listed_ids(backend):
    objective = Objective(listed=one)
    problem = Problem.drawn(objective, 1.0)
    ids = (problem.targets.flatten()[:, None] + torch.arange(1, 3)) % V
    for value in (0.3, 0.0):
        values = torch.full(ids.shape, 0.2)
        values[AT[0] * T + AT[1], 0] = value
        sets = TokenSets.from_padded(ids, values=values)
        batch = TokenBatch(problem.targets, mask=MASK, logp_terms=sets, **problem.fields)
        for inputs in ("logits", "hidden"):
            leaf: Any = (
                (problem.hidden if inputs == "hidden" else problem.hidden @ problem.weight.T)
                .clone()
                .requires_grad_()
            )
            options = Options(backend=backend)
            if inputs == "hidden":
                out = linear_grpo_loss(
                    leaf, problem.weight.clone().requires_grad_(), batch, objective, options=options
                )
            else:
                out = grpo_loss(leaf, batch, objective, options=options)
            out.loss.backward()
            assert out.loss.isnan() == (value == 0.0)
            assert leaf.grad.isnan().all(-1).equal(TOKEN & (value == 0.0))


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd", "tv"])
def test_an_exact_divergence(direction, backend):
    """A NaN in the policy's row, or in the reference's."""
    objective = Objective(Clip(), beta=0.1, kl=Exact(direction))
    assert sum(check(objective, inputs, backend, (1.0,)) for inputs in INPUTS) >= 10
    problem = Problem.drawn(objective, 1.0)
    leaf = (problem.hidden @ problem.weight.T).requires_grad_()
    for at in (0, slice(None)):
        reference = leaf.detach() + 0.1
        reference[AT][at] = math.nan
        batch = TokenBatch(problem.targets, mask=MASK, **problem.fields)
        out = grpo_loss(
            leaf, batch, objective, ref_logits=reference, options=Options(backend=backend)
        )
        (gradient,) = torch.autograd.grad(out.loss, leaf)
        assert out.loss.isnan()
        assert gradient.isnan().all(-1).equal(TOKEN)


# ---- infinite values


@pytest.mark.parametrize("source", ["row", "ref_logps"])
@pytest.mark.parametrize("inputs", ["logits", "logps"])
def test_strict_mode_refuses_minus_infinity_beside_a_kl(inputs, source, backend):
    """Else the log-prob counts as -1e4, and the exponent of k3 is bounded at 60."""
    objective = Objective(beta=0.1)
    problem = Problem.drawn(objective, 1.0)
    leaf = problem.hidden @ problem.weight.T
    at = AT[0] * T + AT[1]
    fields = {
        name: x.clone()
        for name, x in problem.fields.items()
        if name in ("advantages", "old_logps", "ref_logps")
    }
    if source == "row":
        leaf.view(-1, V)[at, problem.targets[AT]] = -math.inf
    else:
        fields["ref_logps"][AT] = -math.inf
    batch = TokenBatch(problem.targets, mask=MASK, **fields)

    def run(batch: TokenBatch, objective: Objective, strict: bool) -> Tensor:
        with grpo_kernels.use(strict=strict):
            if inputs == "logits":
                return grpo_loss(leaf, batch, objective, options=Options(backend=backend)).loss
            logps = leaf.log_softmax(-1).gather(-1, problem.targets[..., None])[..., 0]
            return objective_loss(logps, batch, objective).loss

    # k3 of a token is at most e^60 of a reference that is near, and 1e4 of a policy that is.
    assert run(batch, objective, False) > (1e20 if source == "row" else 90)
    with pytest.raises(
        ValueError,
        match=rf"is -inf at 1 of 10 trained tokens, \[{AT[0]}, {AT[1]}\].*strict.*beta=0",
    ):
        run(batch, objective, True)
    masked = replace(batch, mask=MASK & ~TOKEN)
    assert run(masked, objective, True).isfinite()
    assert run(batch, replace(objective, beta=0.0), True).isfinite()


def test_without_a_look_at_values_the_device_notices_minus_infinity(monkeypatch):
    values_unseen(monkeypatch)
    problem = Problem.drawn(Objective(beta=0.1), 1.0)
    logits = problem.hidden @ problem.weight.T
    batch = TokenBatch(problem.targets, **problem.fields)
    assert grpo_loss(
        logits, batch, Objective(beta=0.1), options=Options(strict=True)
    ).loss.isfinite()
    logits[AT][problem.targets[AT]] = -math.inf
    with pytest.raises(RuntimeError, match="log-prob of the target is -inf at a trained token"):
        grpo_loss(logits, batch, Objective(beta=0.1), options=Options(strict=True))


def listing(
    values: Tensor, sets: str, kept: TokenSets | None = None, mask: Tensor = MASK
) -> tuple[Tensor, TokenBatch]:
    """(logits, a batch that lists the id after the target and the next one) with these values, [B *
    T, 2].
    """
    problem = Problem.drawn(Objective(), 1.0)
    ids = (problem.targets.flatten()[:, None] + torch.arange(1, 3)) % V
    fields = {name: problem.fields[name] for name in ("advantages", "old_logps")}
    given = {sets: TokenSets.from_padded(ids, values=values)}
    return problem.hidden @ problem.weight.T, TokenBatch(
        problem.targets, mask=mask, kept=kept, **fields, **given
    )


@pytest.mark.parametrize("sets", ["logp_terms", "prob_terms"])
def test_strict_mode_refuses_infinite_values(sets, backend):
    values = torch.full((B * T, 2), 0.2)
    values[AT[0] * T + AT[1], 1] = math.inf
    logits, batch = listing(values, sets)
    assert not grpo_loss(logits, batch, Objective(), options=Options(backend)).loss.isfinite()
    with pytest.raises(
        ValueError,
        match=rf"{sets} has an infinite value at 1 of 10 trained tokens.*strict.*finite values",
    ):
        grpo_loss(logits, batch, Objective(), options=Options(backend, strict=True))
    masked = listing(values, sets, mask=MASK & ~TOKEN)[1]
    assert grpo_loss(
        logits, masked, Objective(), options=Options(backend, strict=True)
    ).loss.isfinite()
    if sets == "logp_terms":  # the log-prob of an id that the sampler never draws
        centered = Objective(Cispo(), listed=ScoreCentering(Cispo(), tail=False))
        unseen = listing(values.neg(), sets)[1]
        assert grpo_loss(
            logits, unseen, centered, options=Options(backend, strict=True)
        ).loss.isfinite()


def test_strict_mode_refuses_listed_ids_outside_of_the_set(backend):
    """Their log-prob is -inf:

    the loss is infinite. A value of 0, a row without a set, and `prob_terms` have no such term.
    """
    values = torch.full((B * T, 2), 0.2)
    targets = Problem.drawn(Objective(), 1.0).targets.flatten().tolist()
    sets = [[y, (y + 1) % V, (y + 2) % V] for y in targets]
    sets[0], sets[AT[0] * T + AT[1]] = [], [y := targets[AT[0] * T + AT[1]], (y + 1) % V]
    kept = TokenSets.from_lists([sorted(x) for x in sets])
    logits, batch = listing(values, "logp_terms", kept)
    assert grpo_loss(logits, batch, Objective(), options=Options(backend)).loss.isinf()
    with pytest.raises(
        ValueError,
        match=rf"kept set lacks at 1 of 10 trained tokens, \[{AT[0]}, {AT[1]}\].*-inf.*value 0",
    ):
        grpo_loss(logits, batch, Objective(), options=Options(backend, strict=True))
    strict = Options(backend, strict=True)
    assert grpo_loss(
        logits, listing(values, "prob_terms", kept)[1], Objective(), options=strict
    ).loss.isfinite()
    values[AT[0] * T + AT[1], 1] = 0.0
    assert grpo_loss(
        logits, listing(values, "logp_terms", kept)[1], Objective(), options=strict
    ).loss.isfinite()


def test_in_tritons_interpreter():
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    interpreted(Path(__file__).with_name("triton_nan_cases.py"))
