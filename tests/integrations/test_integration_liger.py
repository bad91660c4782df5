"""`integrations.liger` against Liger 0.8.5 itself: the same call with the import changed gives the same loss, metrics and
gradients. Its chunked loss runs here; its Triton functions in Triton's interpreter, in a process of their own.

Where Liger has a defect, `reference`, float64 and written from the papers' formulas, takes its place, and the test says so."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import finish, start, start_ranks

pytest.importorskip("liger_kernel")

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Theirs

from grpo_kernels.integrations import liger
from grpo_kernels.integrations._liger_specs import TESTED
from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss as Ours
from grpo_kernels.integrations.liger import fused_selective_log_softmax, triton_grpo_loss

Tensor = torch.Tensor
Options = dict[str, Any]

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
B, T, H, V = 5, 6, 8, 13

INSTALLED = metadata.version("liger-kernel")
OPTIONS, ARGUMENTS = (set(inspect.signature(of).parameters) for of in (Theirs.__init__, Theirs.forward))


def make_data() -> dict[str, Tensor]:
    """Sequences of unequal length, one of advantage 0, ratios beyond the clip bounds."""
    g = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(B, T, H, generator=g), 0.6 * torch.randn(V, H, generator=g)
    bias, ids = 0.5 * torch.randn(V, generator=g), torch.randint(V, (B, T), generator=g)
    logits = torch.cat([hidden @ weight.T + bias, torch.randn(B, 1, V, generator=g)], 1)
    logps = torch.log_softmax(logits[:, :-1] / 0.9, -1).gather(2, ids[..., None])[..., 0]
    shift = torch.tensor([0.4, -0.35, -0.3, 0.1, 0.5])[:, None]
    return {
        "hidden": hidden, "weight": weight, "bias": bias, "ids": ids, "logits": logits,
        "mask": torch.arange(T) < torch.tensor([6, 3, 5, 1, 4])[:, None],
        "old": logps - shift - 0.15 * torch.randn(B, T, generator=g),
        "ref": logps + 0.2 + 0.5 * torch.randn(B, T, generator=g),
        "advantages": torch.tensor([1.2, 0.8, -0.7, 0.0, -1.1]),
        "weights": torch.exp(0.3 * torch.randn(B, T, generator=g)),
        "ref_hidden": hidden + 0.3 * torch.randn(B, T, H, generator=g), "ref_weight": weight + 0.1 * torch.randn(V, H, generator=g),
        "upstream": torch.randn(B, T, generator=g),
    }  # fmt: skip


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    return make_data()


# ---- the reference


def token_losses(options: Options, data: dict[str, Tensor], logps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """([B, T] loss, KL, clipped) from fp64 log-probs, 0 where masked; options have the names of triton_grpo_loss."""
    o = {"eps_low": 0.2, "eps_high": 0.4, "beta": 0.04, "loss_type": "dapo", "importance_sampling_level": "token"} | options
    losses, kls, clips = [], [], []
    for b in range(B):
        m = data["mask"][b].double()
        n, A, logp = m.sum().clamp(min=1), float(data["advantages"][b]), torch.where(m > 0, logps[b], 0.0)
        x = m * (logp - (logp.detach() if o.get("old") is None else o["old"][b].double()))
        own = x
        if o["importance_sampling_level"] == "sequence":
            x = (x.sum() / n).expand(T)
        r = x.exp()
        w = (
            torch.ones(T, dtype=torch.float64)
            if o.get("vllm_is_ratio") is None
            else o["vllm_is_ratio"].double().reshape(B, -1)[b]
        )
        low, high = 1 - o["eps_low"], 1 + o["eps_high"]
        if o["loss_type"] == "cispo":
            low, high = 0.0, o["eps_high"]
            loss = -r.clamp(max=high).detach() * A * logp * w
        elif o["loss_type"] == "sapo":
            tau = o.get("sapo_temperature_pos", 1.0) if A > 0 else o.get("sapo_temperature_neg", 1.05)
            low, high = 0.0, math.inf
            loss = -4 / tau * torch.sigmoid(tau * (r - 1)) * A * w
        elif o["loss_type"] == "vespo":
            k, rate = (o.get("vespo_k_pos", 2.0), o.get("vespo_lambda_pos", 3.0)) if A >= 0 else (
                o.get("vespo_k_neg", 3.0), o.get("vespo_lambda_neg", 2.0))  # fmt: skip
            low, high = 0.0, math.inf
            if w.numel() == 1:  # counts once
                log_w, kept = w.clamp(min=1e-8).log().sum(), torch.ones(T)
            else:
                log_w, kept = (m * torch.where(w > 0, w, 1.0).log()).sum(), (w > 0).double()
            z = (own.clamp(-20, 20).sum() + log_w).clamp(math.log(1e-8), 20).detach()
            loss = -torch.exp(rate + k * z - rate * z.exp()) * A * logp * kept
        else:
            capped = r if o.get("delta") is None else r.clamp(max=o["delta"])
            loss = -torch.minimum(capped * A, r.clamp(low, high) * A) * w
        d = torch.where(m > 0, data["ref"][b].double() - logp, 0.0)
        kl = d.exp() - d - 1
        if o.get("use_bias_correction_kl"):
            kl = kl * x.exp()
        losses.append(m * (loss + o["beta"] * kl))
        kls.append(m * kl)
        clips.append(m * ((r < low) & (A < 0) | (r > high) & (A > 0)))
    return torch.stack(losses), torch.stack(kls), torch.stack(clips)


def reduced(options: Options, data: dict[str, Tensor], losses: Tensor) -> Tensor:
    kind, m = options.get("loss_type", "dapo"), data["mask"].double()
    if kind in ("grpo", "sapo"):
        return (losses.sum(1) / m.sum(1).clamp(min=1)).sum() / B
    if kind == "luspo":
        return losses.sum() / B
    if kind == "dr_grpo":
        return losses.sum() / (B * (options.get("max_completion_length") or T))
    count = m.sum().clamp(min=1)
    if options.get("num_items_in_batch") is not None and kind in ("dapo", "cispo", "vespo"):
        count = torch.as_tensor(options["num_items_in_batch"]).double()
    return losses.sum() / count


def exact_logps(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits / temperature, -1).gather(2, ids[..., None])[..., 0]


def close(a: Any, b: Any, what: object, tolerance: float = 2e-5) -> None:
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    assert a.shape == b.shape, what
    error, size = float((a - b).abs().max()), float(b.abs().max())
    assert error <= tolerance * size + 1e-7, f"{what}: off by {error} of {size}"


# ---- signatures


def test_signatures() -> None:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    def of(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    own = [(name, inspect.Parameter.KEYWORD_ONLY, False) for name in ("as_liger", "any_version")]
    assert of(Ours.__init__) == [*of(Theirs.__init__), *own]
    assert of(Ours.forward) == of(Theirs.forward)
    assert of(triton_grpo_loss) == of(theirs) and of(fused_selective_log_softmax) == of(selective)
    mine, yours = Ours(beta=0.1, chunk_size=3), Theirs(beta=0.1, chunk_size=3)
    assert {n: v for n, v in vars(yours).items() if n[0] != "_"} == {
        n: v for n, v in vars(mine).items() if n[0] != "_" and n != "as_liger"
    }


# ---- the chunked loss


def run(kind: type, options: Options, data: dict[str, Tensor], call: Options, upstream: float = 1.0) -> tuple[Any, ...]:
    """(loss, metrics, gradients) of one class."""
    names = [
        n for n in ("hidden", "weight", "bias") if n not in call.get("frozen", ()) and (n != "bias" or call.get("bias", True))
    ]
    x = {n: data[n].clone().requires_grad_(n in names) for n in ("hidden", "weight", "bias")}
    arguments = {k: v for k, v in call.items() if k not in ("frozen", "bias", "mask", "upstream")}
    if call.get("bias", True):
        arguments["bias"] = x["bias"]
    module = kind(**{"temperature": 0.9, **options}, compiled=False)
    mask = call.get("mask", data["mask"].float())
    loss, metrics = module(x["hidden"], x["weight"], data["ids"], mask, data["advantages"], **arguments)
    gradients = torch.autograd.grad(upstream * loss, [x[n] for n in names])
    assert type(metrics) is tuple and loss.shape == () and loss.dtype == torch.float32
    return loss.detach(), metrics, gradients


def assert_same_as_liger(
    options: Options, data: dict[str, Tensor], call: Options, upstream: float = 1.0, own: Options | None = None
) -> None:
    """`own`: options that only ours has."""
    what = {k: v if isinstance(v, (str, int, float, tuple)) else type(v).__name__ for k, v in (options | call).items()}
    mine, theirs = run(Ours, options | (own or {}), data, call, upstream), run(Theirs, options, data, call, upstream)
    assert float(theirs[2][0].abs().max()) > 1e-4, what
    close(mine[0], theirs[0], (what, "loss"))
    assert len(mine[1]) == len(theirs[1]), what
    for a, b in zip(mine[1], theirs[1], strict=True):
        assert a.dtype == b.dtype == torch.float32 and not a.requires_grad
        close(a, b, (what, "metric"))
    for a, b in zip(mine[2], theirs[2], strict=True):
        assert a.dtype == b.dtype
        close(a, b, (what, "gradient"))


def expressible(options: Options, call: Options) -> bool:
    """Whether this Liger has these options and arguments: the version of the package has all."""
    whole = set(options) <= OPTIONS and set(call) - {"frozen", "mask", "upstream"} <= ARGUMENTS
    assert whole or INSTALLED != liger.LIGER_VERSION
    return whole


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_chunked_loss_itself(data: dict[str, Tensor], loss_type: str) -> None:
    """Every option of the constructor and the call. LUSPO without padding and VESPO without weights at masked positions:
    see the defects below. Under an older Liger, what it has of them (tests/repository/trainer_versions.py)."""
    if INSTALLED != liger.LIGER_VERSION:
        try:
            run(Theirs, {"loss_type": loss_type, "beta": 0.0, "use_ref_model": False, "max_completion_length": 9}, data, {})
        except ValueError as error:
            assert "Unknown loss type" in str(error)
            pytest.skip(f"Liger-Kernel {INSTALLED} has no {loss_type}")
    if loss_type == "luspo":
        data = data | {"mask": torch.ones_like(data["mask"])}
    full = torch.where(data["mask"], data["weights"], 1.0)
    common: Options = {"loss_type": loss_type, "max_completion_length": 9}
    if loss_type == "cispo":
        common["epsilon_high"] = 1.3
    base: Options = {"old_per_token_logps": data["old"]}
    ref = base | {"ref_per_token_logps": data["ref"]}
    hidden_ref = base | {"ref_input": data["ref_hidden"], "ref_weight": data["ref_weight"], "ref_bias": data["bias"]}
    no_kl: Options = {"beta": 0.0, "use_ref_model": False}
    cases: list[tuple[Options, Options]] = [
        ({}, ref), ({"beta": 0.3}, {"ref_per_token_logps": data["ref"]}), (no_kl, base), (no_kl, {}),
        ({"beta": 0.3, "use_bias_correction_kl": True}, ref), ({"beta": 0.3}, hidden_ref),
        ({"beta": 0.2}, {k: v for k, v in hidden_ref.items() if k != "ref_bias"}),
        ({"chunk_size": 3, "temperature": 1.3, "epsilon_low": 0.1}, ref),
        (no_kl, base | {"vllm_is_ratio": full[:, :1]}), (no_kl, base | {"vllm_is_ratio": full[:, 0]}),
        ({"beta": 0.1}, ref | {"num_items_in_batch": 37}), ({}, ref | {"num_items_in_batch": torch.tensor(41)}),
        (no_kl, base | {"bias": False}), (no_kl, base | {"frozen": ("weight",)}), (no_kl, base | {"frozen": ("weight", "bias")}),
        ({}, ref | {"mask": data["mask"]}), ({}, ref | {"mask": data["mask"].long()}),
    ]  # fmt: skip
    if loss_type != "luspo":  # its padding again: the weights of unpadded sequences are right
        cases.append(({"beta": 0.1}, ref | {"vllm_is_ratio": full}))
    if loss_type in CLIPPED:
        cases += [
            ({"delta": 1.3}, ref), ({"importance_sampling_level": "sequence"}, ref),
            ({"importance_sampling_level": "sequence", "delta": 1.25, "beta": 0.3, "use_bias_correction_kl": True}, ref),
            ({"importance_sampling_level": "sequence", "beta": 0.0}, ref | {"vllm_is_ratio": full[:, :1]}),
        ]  # fmt: skip
    else:
        cases.append(({"delta": 1.3}, ref))  # which they ignore
    if loss_type == "sapo":
        cases.append(({"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.6}, ref))
    if loss_type == "vespo":
        cases.append(({"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1e-6}, ref))
        zero = full[:, 0].clone()
        zero[0] = 0.0
        cases.append((no_kl, base | {"vllm_is_ratio": zero}))
    for options, call in cases:
        if expressible(common | options, call):
            assert_same_as_liger(common | options, data, call)
    assert_same_as_liger(common, data, ref, upstream=-2.5)


def test_strides_and_types(data: dict[str, Tensor]) -> None:
    """A slice of hidden states as TRL passes it, in bf16 with an fp32 head; fp32 under autocast."""
    wide = torch.zeros(B, T + 2, H)
    wide[:, 1:-1] = data["hidden"]
    leaf = wide.bfloat16().requires_grad_()
    weight = data["weight"].clone().requires_grad_()
    for hidden, autocast in ((leaf, False), (wide.requires_grad_(), True)):
        results = []
        for kind in (Ours, Theirs):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss, metrics = kind(beta=0.0, use_ref_model=False, compiled=False)(
                    hidden[:, 1:-1], weight, data["ids"], data["mask"], data["advantages"], old_per_token_logps=data["old"]
                )
            results.append((loss.detach(), metrics[0], *torch.autograd.grad(loss, (hidden, weight))))
        for a, b in zip(*results, strict=True):
            assert a.dtype == b.dtype
            close(a, b, ("bf16", autocast), 0.02)


def test_masked_rows_and_empty_batches(data: dict[str, Tensor]) -> None:
    """Masked positions may hold anything, which Liger does not allow. No rows, or no trained token, give a differentiable 0."""
    dirty = {k: v.clone() for k, v in data.items()}
    for name in ("hidden", "old", "ref"):
        dirty[name][~data["mask"]] = math.nan
    dirty["ids"][~data["mask"]] = -100
    call = {"old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"]}
    want = run(Theirs, {}, data, call)
    got = run(Ours, {}, dirty, {"old_per_token_logps": dirty["old"], "ref_per_token_logps": dirty["ref"]})
    close(got[0], want[0], "loss")
    close(got[2][0], torch.where(data["mask"][..., None], want[2][0], 0.0), "hidden")
    close(got[2][1], want[2][1], "weight")
    nothing = run(Ours, {}, data, call | {"mask": torch.zeros(B, T)})
    assert nothing[0] == 0 and all(float(g.abs().max()) == 0 for g in nothing[2]) and all(m == 0 for m in nothing[1])
    for b, t in ((0, T), (B, 0)):
        hidden, weight = torch.zeros(b, t, H, requires_grad=True), data["weight"].clone().requires_grad_()
        loss, metrics = Ours(beta=0.0)(hidden, weight, torch.zeros(b, t, dtype=torch.int64), torch.ones(b, t), torch.zeros(b))
        loss.backward()
        assert loss == 0 and metrics[0] == 0 and weight.grad is not None and float(weight.grad.abs().max()) == 0


def test_options_are_read_on_every_call(data: dict[str, Tensor]) -> None:
    module = Ours(beta=0.0, temperature=0.9)
    found = []
    for width in (0.2, 0.01):
        module.epsilon_low = module.epsilon_high = width
        inputs = (data[n] for n in ("hidden", "weight", "ids", "mask", "advantages", "bias"))
        found.append(module(*inputs, old_per_token_logps=data["old"])[0])
        options = {"beta": 0.0, "use_ref_model": False, "epsilon_low": width, "epsilon_high": width}
        close(found[-1], run(Theirs, options, data, {"old_per_token_logps": data["old"]})[0], width)
    assert abs(float(found[0] - found[1])) > 1e-2


def test_no_reference_model(data: dict[str, Tensor]) -> None:
    """use_ref_model=False with the default beta: Liger's KL is silently 0; ours is 0 with a warning."""
    call = {"old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"]}
    with pytest.warns(UserWarning, match="use_ref_model=False"):
        mine = run(Ours, {"use_ref_model": False}, data, call)
    theirs = run(Theirs, {"use_ref_model": False}, data, call)
    close(mine[0], theirs[0], "loss")
    assert [float(m) for m in mine[1]] == pytest.approx([float(m) for m in theirs[1]]) and mine[1][0] == 0
    close(mine[2][1], theirs[2][1], "weight")


def test_cispo_with_the_default_cap(data: dict[str, Tensor]) -> None:
    """0.2 is an absolute ratio: as Liger has it, but with a warning."""
    call = {"old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"]}
    with pytest.warns(UserWarning, match="epsilon_high=0.2 is CISPO's cap"):
        assert_same_as_liger({"loss_type": "cispo"}, data, call)


def test_both_references(data: dict[str, Tensor]) -> None:
    call = {"ref_per_token_logps": data["ref"], "ref_input": data["ref_hidden"], "ref_weight": data["ref_weight"]}
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        assert_same_as_liger({}, data, call)


# ---- Liger's defects


def luspo_and_vespo(data: dict[str, Tensor]) -> Iterator[Options]:
    for level in ("token", "sequence"):
        yield {"loss_type": "luspo", "importance_sampling_level": level, "beta": 0.3}
        yield {"loss_type": "luspo", "importance_sampling_level": level, "beta": 0.0, "vllm_is_ratio": data["weights"]}
    rejected = torch.where(data["mask"], data["weights"], 7.0)
    yield {"loss_type": "vespo", "beta": 0.0, "vllm_is_ratio": rejected.clone()}
    rejected[0, 1] = rejected[2, 3] = 0.0
    yield {"loss_type": "vespo", "beta": 0.3, "vllm_is_ratio": rejected}


def test_defects_of_the_chunked_loss(data: dict[str, Tensor]) -> None:
    """LUSPO weighs padding and divides by the padded length; VESPO counts the weights of masked positions, and a weight of 0
    silences its sequence."""
    for options in luspo_and_vespo(data):
        weights = options.pop("vllm_is_ratio", None)
        call = {"old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"], "vllm_is_ratio": weights}
        mine, theirs = (run(kind, options, data, call) for kind in (Ours, Theirs))
        x = [data[n].double().requires_grad_() for n in ("hidden", "weight", "bias")]
        logps = exact_logps(x[0] @ x[1].T + x[2], data["ids"], 0.9)
        words = options | {"eps_high": 0.2, "old": data["old"], "vllm_is_ratio": weights}
        losses, kl, clipped = token_losses(words, data, logps)
        want = reduced(words, data, losses)
        close(mine[0], want.detach(), options)
        tokens = data["mask"].sum()
        for a, b in zip(mine[1], ([kl] if options["beta"] else []) + [clipped], strict=True):
            close(a, b.detach().sum() / tokens, options)
        exact = torch.autograd.grad(want, x)
        for a, b in zip(mine[2], exact, strict=True):
            close(a, b, options)
        assert float((theirs[2][0] - exact[0]).abs().max()) > 0.02 * float(exact[0].abs().max()), options


def test_a_swap_is_proven_as_liger_first(data: dict[str, Tensor]) -> None:
    """With as_liger=True a run is Liger's number by number under masks too, in the two losses where ours is not; with a
    warning. The others have no difference to warn of."""
    ref = {"old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"]}
    cases: list[tuple[Options, Options]] = []
    for options in luspo_and_vespo(data):
        weights = options.pop("vllm_is_ratio", None)
        cases.append((options, ref | {"vllm_is_ratio": weights}))
    for level in ("token", "sequence"):
        luspo = {"loss_type": "luspo", "importance_sampling_level": level}
        cases += [
            (luspo | {"beta": 0.3, "use_bias_correction_kl": True, "delta": 1.25}, ref),
            (luspo | {"beta": 0.2, "use_ref_model": True}, {"ref_input": data["ref_hidden"], "ref_weight": data["ref_weight"]}),
            (luspo | {"beta": 0.0, "use_ref_model": False}, ref), (luspo | {"beta": 0.1}, ref | {"vllm_is_ratio": data["weights"][:, :1]}),
            (luspo | {"beta": 0.1, "chunk_size": 2}, ref | {"vllm_is_ratio": data["weights"][:, 0], "frozen": ("weight", "bias")}),
        ]  # fmt: skip
    different = 0
    for options, call in cases:
        with pytest.warns(UserWarning, match="as_liger=True: loss_type='(luspo|vespo)' counts masked positions"):
            assert_same_as_liger(options, data, call, own={"as_liger": True})
        mine, theirs = (run(kind, options, data, call)[2][0] for kind in (Ours, Theirs))
        different += bool((mine - theirs).abs().max() > 0.02 * theirs.abs().max())
    assert different > len(cases) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss_type in ("grpo", "dapo", "sapo"):
            assert_same_as_liger({"loss_type": loss_type}, data, ref, own={"as_liger": True})


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_the_texts_that_ligers_callers_match_on(data: dict[str, Tensor], loss_type: str) -> None:
    """A sequence level that a loss does not support, and a reference given twice."""
    options = {"loss_type": loss_type, "importance_sampling_level": "sequence", "beta": 0.0, "use_ref_model": False}
    texts = []
    for kind in (Theirs, Ours):
        with pytest.raises(ValueError, match="Sequence-level") as error:
            run(kind, options, data, {})
        texts.append(str(error.value))
    assert texts[0] in texts[1] and "importance_sampling_level='sequence'" in texts[1]
    with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported"):
        call_triton(triton_grpo_loss, {k: v for k, v in options.items() if k != "use_ref_model"}, data, data["logits"])
    call = {"ref_per_token_logps": data["ref"], "ref_input": data["ref_hidden"], "ref_weight": data["ref_weight"]}
    for kind in (Theirs, Ours):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(kind, {"loss_type": loss_type, "epsilon_high": 1.3}, data, call)
        texts.append([str(w.message) for w in caught if "ref_input" in str(w.message)])
    assert len(texts[2]) == 1 and texts[2] == texts[3]


# ---- the loss from logits, on the CPU against the reference


def logits_cases(data: dict[str, Tensor]) -> list[Options]:
    """In the words of triton_grpo_loss; `old` is its second argument."""
    old, full = data["old"], torch.where(data["mask"], data["weights"], 1.0)
    cases: list[Options] = [
        {"old": old}, {}, {"old": old, "beta": 0.0}, {"old": old, "temperature": 1.2, "eps_low": 0.1, "eps_high": 0.15},
        {"old": old, "beta": 0.3, "use_bias_correction_kl": True, "delta": 1.5, "vllm_is_ratio": full},
        {"old": old, "importance_sampling_level": "sequence", "vllm_is_ratio": full[:, :1]},
        {"old": old, "importance_sampling_level": "sequence", "beta": 0.3, "use_bias_correction_kl": True, "delta": 1.5,
         "vllm_is_ratio": full, "loss_type": "grpo"},
        {"old": old, "loss_type": "grpo", "vllm_is_ratio": full[:, 0]}, {"old": old, "loss_type": "bnpo", "num_items_in_batch": 50},
        {"old": old, "loss_type": "dr_grpo"}, {"old": old, "loss_type": "dr_grpo", "max_completion_length": 11},
        {"old": old, "num_items_in_batch": torch.tensor(51)}, {"old": old, "loss_type": "cispo", "eps_high": 1.25, "vllm_is_ratio": full},
        {"old": old, "loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.4},
        {"old": old, "loss_type": "vespo", "vllm_is_ratio": full}, {"old": old, "loss_type": "vespo", "vllm_is_ratio": full[:, 0]},
        {"old": old, "loss_type": "vespo", "beta": 0.0, "vespo_k_pos": 1.5, "vespo_lambda_neg": 1.5},
    ]  # fmt: skip
    return cases


def odd_cases(data: dict[str, Tensor]) -> list[Options]:
    """That Liger's Triton function gets wrong: LUSPO reduced, where it multiplies by the length twice at sequence level and, at
    token level, its backward reads beyond the end of a tensor; and a delta below 1 + eps_high, where it drops the gradient of
    tokens with A < 0 and a ratio between the two."""
    old = data["old"]
    luspo = [{"old": old, "loss_type": "luspo", "importance_sampling_level": level} for level in ("token", "sequence")]
    return [
        *luspo,
        *({"old": old, "delta": 1.2, "eps_high": 0.9, "importance_sampling_level": level} for level in ("token", "sequence")),
    ]


def call_triton(function: Callable[..., Any], case: Options, data: dict[str, Tensor], logits: Tensor, **more: Any) -> Any:
    options = {k: v for k, v in case.items() if k != "old"}
    ref = data["ref"] if options.get("beta", 0.04) else None
    mask = data["mask"].long()
    return function(logits, case.get("old"), ref, data["ids"], data["advantages"], mask, **options, **more)


def exact_triton(case: Options, data: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(leaf, per-token losses, KL, clipped)"""
    leaf = data["logits"].double().requires_grad_()
    return leaf, *token_losses(case, data, exact_logps(leaf[:, :-1], data["ids"], case.get("temperature", 0.9)))


def test_per_token_losses(data: dict[str, Tensor]) -> None:
    """With an upstream gradient of their own, NaN where masked; the logits stay until the backward overwrites them."""
    cases = [*logits_cases(data), *odd_cases(data), *luspo_and_vespo(data)]
    upstream = torch.where(data["mask"], data["upstream"], math.nan)
    for case in cases:
        exact, want, kl, clipped = exact_triton(case, data)
        (expected,) = torch.autograd.grad((want * torch.where(data["mask"], upstream, 0.0)).sum(), exact)
        for inplace in (True, False):
            leaf = data["logits"].clone().requires_grad_()
            logits = leaf * 1.0
            losses, its_kl, its_clipped = call_triton(triton_grpo_loss, case, data, logits, inplace=inplace)
            assert torch.equal(logits, leaf) and not its_clipped.requires_grad
            losses.backward(upstream)
            assert torch.equal(logits, leaf) != inplace
            close(losses.detach(), want.detach(), case)
            close(its_clipped, clipped, case)
            if case.get("beta", 0.04):
                close(its_kl, kl.detach(), case)
            else:
                assert its_kl is None
            assert leaf.grad is not None and float(leaf.grad[:, -1].abs().max()) == 0
            close(leaf.grad, expected, case)


def test_reduced_losses(data: dict[str, Tensor]) -> None:
    for case in [*logits_cases(data), *odd_cases(data), *luspo_and_vespo(data)]:
        exact, losses, kl, clipped = exact_triton(case, data)
        want = reduced(case, data, losses)
        (expected,) = torch.autograd.grad(-1.5 * want, exact)
        for inplace in (True, False, "forward"):
            leaf = data["logits"].clone().requires_grad_()
            logits = leaf * 1.0
            loss, metrics = call_triton(triton_grpo_loss, case, data, logits, reduce=True, inplace=inplace)
            one_visit = case.get("importance_sampling_level", "token") == "token" and case.get("loss_type") != "vespo"
            assert torch.equal(logits, leaf) == (inplace != "forward" or not one_visit) and type(metrics) is list
            (-1.5 * loss).backward()
            assert torch.equal(logits, leaf) == (inplace is False)
            assert loss.shape == () and loss.dtype == torch.float32
            close(loss.detach(), want.detach(), case)
            expected_metrics = ([kl] if case.get("beta", 0.04) else []) + [clipped]
            for a, b in zip(metrics, expected_metrics, strict=True):
                close(a, b.detach().sum() / data["mask"].sum(), case)
            close(leaf.grad, expected, (case, inplace))


def test_other_logits(data: dict[str, Tensor]) -> None:
    """No mask, 16 bits, a leaf in place, strides, no gradient wanted, none left over."""
    everything = data | {"mask": torch.ones_like(data["mask"])}
    case = {"old": data["old"]}
    exact, losses, _, _ = exact_triton(case, everything)
    (expected,) = torch.autograd.grad(losses.sum(), exact)
    leaf = data["logits"].clone().requires_grad_()
    call_triton(triton_grpo_loss, case, everything, leaf)[0].sum().backward()
    close(leaf.grad, expected, "leaf")
    plain = triton_grpo_loss(data["logits"].clone(), data["old"], data["ref"], data["ids"], data["advantages"])
    close(plain[0], losses.detach(), "no mask")
    for dtype in (torch.bfloat16, torch.float16):
        leaf = data["logits"].to(dtype).requires_grad_()
        call_triton(triton_grpo_loss, case, everything, leaf, inplace=False)[0].sum().backward()
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        close(leaf.grad, expected, dtype, 0.03)
    wide = torch.zeros(B, T + 3, V)
    wide[:, 1:-1] = data["logits"]
    close(call_triton(triton_grpo_loss, case, everything, wide[:, 1:-1])[0], losses.detach(), "strides")
    with torch.no_grad():
        logits = data["logits"].clone()
        loss, _ = call_triton(triton_grpo_loss, case, everything, logits, reduce=True, inplace="forward")
        assert torch.equal(logits, data["logits"]) and not loss.requires_grad


def test_overwritten_logits_are_noticed(data: dict[str, Tensor]) -> None:
    """Liger's version counter stays: autograd then uses a gradient for logits."""
    leaf = data["logits"].clone().requires_grad_()
    logits = leaf * 1.0
    other = logits.exp().sum() + (logits * logits).sum()  # needs the logits in its backward
    call_triton(triton_grpo_loss, {"old": data["old"]}, data, logits)[0].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_a_second_backward(data: dict[str, Tensor]) -> None:
    """Per-token losses allow any number of backwards. A reduced loss allows one, and says so."""
    leaf = data["logits"].clone().requires_grad_()
    losses = call_triton(triton_grpo_loss, {"old": data["old"]}, data, leaf, inplace=False)[0]
    first, second = (torch.autograd.grad(losses.sum(), leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    loss = call_triton(triton_grpo_loss, {"old": data["old"]}, data, leaf, inplace=False, reduce=True)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already handed over"):
        loss.backward()


def test_selective_log_softmax(data: dict[str, Tensor]) -> None:
    """The last L of longer ids and masks, as in Liger's example."""
    longer = torch.cat([data["ids"][:, :3], data["ids"]], 1)
    mask = torch.cat([data["mask"][:, :3], data["mask"]], 1).float()
    leaf = data["logits"].clone().requires_grad_()
    found = fused_selective_log_softmax(leaf, longer, 0.7, mask)
    assert found.dtype == torch.float32 and not found.requires_grad
    exact = exact_logps(data["logits"].double()[:, :-1], data["ids"], 0.7)
    close(found, torch.where(data["mask"], exact, 0.0), "masked")
    close(fused_selective_log_softmax(leaf, data["ids"]), exact_logps(data["logits"].double()[:, :-1], data["ids"], 0.9), "0.9")


def test_refusals(data: dict[str, Tensor]) -> None:
    """Liger asserts or goes on; ours names the error."""
    chunked: list[tuple[Options, Options, str]] = [
        ({"loss_type": "ppo"}, {}, "loss_type='ppo'"), ({"importance_sampling_level": "batch"}, {}, "importance_sampling_level"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, {}, "importance_sampling_level"),
        ({"loss_type": "dr_grpo"}, {}, "max_completion_length"), ({}, {}, "ref_per_token_logps and ref_input are None"),
        ({"delta": -1.0}, {}, "delta"), ({"sapo_temperature_neg": 0.0}, {}, "sapo_temperature_neg"),
        ({"beta": 0.0}, {"old_per_token_logps": data["old"][:, 1:]}, "old_per_token_logps"),
        ({"beta": 0.0}, {"mask": data["mask"][:, 1:]}, "attention_mask"), ({"beta": 0.0}, {"mask": 0.5 * data["mask"]}, "attention_mask"),
        ({"beta": 0.0}, {"vllm_is_ratio": data["weights"][:, :2]}, "vllm_is_ratio"),
    ]  # fmt: skip
    for options, call, message in chunked:
        with pytest.raises(ValueError, match=message):
            run(Ours, options, data, call)
    from_logits: list[tuple[Options, str]] = [
        ({"loss_type": "sapo", "delta": 2.0}, "delta"), ({"inplace": "backward"}, "inplace"), ({"delta": 0.9}, "delta"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
    ]  # fmt: skip
    for options, message in from_logits:
        with pytest.raises(ValueError, match=message):
            call_triton(triton_grpo_loss, options, data, data["logits"])
    with pytest.raises(ValueError, match="ref_logp is None"):
        triton_grpo_loss(data["logits"], None, None, data["ids"], data["advantages"])
    with pytest.raises(ValueError, match=r"must be \[5, 7, V\]"):
        triton_grpo_loss(data["logits"][:, 1:], None, data["ref"], data["ids"], data["advantages"])


# ---- Liger's Triton functions, interpreted


def interpreted(target: str) -> None:
    """In a process of its own: Liger's results for the cases of this file."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax as selective
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as theirs

    data = make_data()
    made: list[Any] = []
    for case in [*logits_cases(data), *odd_cases(data)]:
        for reduce in (False, True):
            logits = data["logits"].clone().requires_grad_()
            out = call_triton(theirs, case, data, logits, reduce=reduce, inplace=False)
            if reduce:
                (gradient,) = torch.autograd.grad(out[0], logits) if case.get("loss_type") != "luspo" else (None,)
            else:
                (gradient,) = torch.autograd.grad(out[0], logits, data["upstream"])
            parts = (out[0], *out[1]) if reduce else out
            made.append((*(None if x is None else x.detach() for x in parts), gradient))
    logps = selective(data["logits"], data["ids"], 0.7, data["mask"].long())
    torch.save((made, logps), target)


def test_the_same_results_as_interpreted_triton(data: dict[str, Tensor], tmp_path: Path) -> None:
    """Per token and reduced, in value, metrics and gradient, but for the defects that `odd_cases` names."""
    pytest.importorskip("triton")
    target = tmp_path / "made.pt"
    code = "import sys; from test_integration_liger import interpreted; interpreted(sys.argv[1])"
    finish(start(code, str(target), TRITON_INTERPRET="1"))
    made, logps = torch.load(target)
    close(fused_selective_log_softmax(data["logits"], data["ids"], 0.7, data["mask"]), logps, "log-probs")
    results = iter(made)
    for case in [*logits_cases(data), *odd_cases(data)]:
        for reduce in (False, True):
            *want, gradient = next(results)
            what = (case, reduce)
            if reduce and case.get("loss_type") == "luspo":
                continue
            logits = data["logits"].clone().requires_grad_()
            out = call_triton(triton_grpo_loss, case, data, logits, reduce=reduce, inplace=False)
            for a, b in zip([out[0], *out[1]] if reduce else out, want, strict=True):
                assert (a is None) == (b is None), what
                if a is not None:
                    assert a.dtype == b.dtype, what
                    close(a.detach(), b, what)
            (mine,) = torch.autograd.grad(out[0], logits, None if reduce else data["upstream"])
            if case.get("delta", 2.0) < 1.4:
                assert float((mine - gradient).abs().max()) > 0.05 * float(mine.abs().max()), what
            else:
                close(mine, gradient, (*what, "gradient"))


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """examples/liger_swap.py, smaller: it asserts what it claims."""
    swap = pytest.importorskip("examples.liger_swap")
    monkeypatch.setattr(swap, "VOCAB", 300)
    monkeypatch.setattr(swap, "WIDTH", 16)
    monkeypatch.setattr(swap, "peak_memory", lambda run, device: (run(), 0)[1])
    swap.main()
    assert "gradient differs from autograd's by" in capsys.readouterr().out


# ---- two ranks


def two_ranks(rank: int, store: str) -> None:
    """Without num_items_in_batch both average their token counts over the ranks, of which one has none."""
    import torch.distributed as dist
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Theirs

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data = make_data()
    for count in (None, 33):
        for mask in (data["mask"] if rank else ~data["mask"], data["mask"] * rank):
            call = {"old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"], "num_items_in_batch": count}
            found = []
            for kind, options in ((Ours, {}), (Theirs, {"chunk_size": B})):  # whose ranks call once a chunk
                module = kind(compiled=False, **options)
                loss, _ = module(data["hidden"], data["weight"], data["ids"], mask.float(), data["advantages"], **call)
                found.append(loss)
            close(*found, (rank, count))
    dist.barrier()


def test_two_ranks(tmp_path: Path) -> None:
    finish(start_ranks(2, two_ranks, str(tmp_path / "store")))


def test_importing_the_adapter_imports_neither_liger_nor_triton() -> None:
    finish(start("import sys, grpo_kernels.integrations.liger; assert not {'triton', 'liger_kernel'} & set(sys.modules)"))


def test_the_version_is_the_installed_one() -> None:
    assert liger.LIGER_VERSION == INSTALLED and INSTALLED in TESTED, "a new Liger: run these tests, then name it"
