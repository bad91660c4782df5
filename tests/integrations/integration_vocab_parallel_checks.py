"""Trainers whose vocabulary is cut over tensor-parallel ranks: run by test_integration_vocab_parallel.py.

Each adapter on two ranks is compared with itself on one rank, which other tests compare with the trainers, and with the
trainer's own function on two ranks if its package is on the path."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_integration_slime import slime_args

from grpo_kernels import Objective, Options, TokenSets
from grpo_kernels.integrations import areal, nemo_rl, skyrl, slime, verl
from support.trainers import stand_in, their_file

Tensor = torch.Tensor
N, H, WIDTH = 11, 6, 13
V = 2 * WIDTH  # the last ids are padding of the head: no target, but in the softmax, as they are for the trainers

#: Checks that need a trainer's package.
OWN = {"check_areal_itself": "areal", "check_skyrl_itself": "skyrl"}
SKYRL = "skyrl.backends.skyrl_train"
MEGATRON_HEAD = f"{SKYRL}.distributed.megatron.model_utils"


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def modules() -> Iterator[None]:
    """Removes the modules that a check has put into sys.modules."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("areal", "slime", "skyrl", "nemo_rl", "verl", "megatron"):
            del sys.modules[name]


def not_reached() -> Callable[..., Any]:
    """A new function each time: names are bound by what they hold."""

    def theirs(*_: Any, **__: Any) -> Any:
        raise AssertionError("the trainer's own function was called")

    return theirs


def drawn(seed: int = 7) -> SimpleNamespace:
    g = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        logits=2 * torch.randn(N, V, generator=g), hidden=torch.randn(N, H, generator=g), weight=torch.randn(V, H, generator=g),
        tokens=torch.tensor([0, WIDTH - 1, WIDTH, V - 4, 5, 20, 3, 14, 9, 16, 2]), keep=torch.rand(N, V, generator=g) < 0.3,
    )  # fmt: skip


def own(x: Tensor, rank: int, dim: int = -1) -> Tensor:
    return x.split(WIDTH, dim)[rank].clone()


def graded(f: Callable[..., Any], *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The result of f, and the gradient of a weighted sum of it with respect to the inputs. One weight is 0."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    made = f(*leaves)
    outputs = [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
    upstream = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outputs]
    loss = sum((x * u).sum() for x, u in zip(outputs, upstream, strict=True) if x.requires_grad)
    return [x.detach() for x in outputs], list(torch.autograd.grad(loss, leaves))


def assert_close(got: Tensor, want: Tensor) -> None:
    assert want.any()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


def assert_logits(rank: int, parts: Callable[[Tensor], Any], whole: Callable[[Tensor], Any], logits: Tensor) -> None:
    """Values on this rank, and its columns of the gradient."""
    (values, (gradient,)), (expected, (whole_gradient,)) = graded(parts, own(logits, rank)), graded(whole, logits)
    assert len(values) == len(expected)
    for got, want in zip(values, expected, strict=True):
        assert got.dtype == want.dtype == torch.float32 and got.shape == want.shape
        assert_close(got, want)
    assert_close(gradient, own(whole_gradient, rank))


def assert_head(rank: int, parts: Callable[..., Any], whole: Callable[..., Any], hidden: Tensor, weight: Tensor) -> None:
    """The gradient of hidden is this rank's share: the shares of all add up to it."""
    values, (d_hidden, d_weight) = graded(parts, hidden, own(weight, rank, 0))
    expected, (whole_d_hidden, whole_d_weight) = graded(whole, hidden, weight)
    for got, want in zip(values, expected, strict=True):
        assert_close(got, want)
    assert_close(d_weight, own(whole_d_weight, rank, 0))
    assert (d_hidden - whole_d_hidden).abs().max() > 0.1
    dist.all_reduce(d_hidden)
    assert_close(d_hidden, whole_d_hidden)


# ---- AReaL


def check_areal(rank: int, ranks: int) -> None:
    data, group = drawn(), dist.group.WORLD
    with modules():
        names = {"gather_logprobs": not_reached(), "gather_logprobs_entropy": not_reached()}
        home = stand_in("areal.utils.functional.vocab_parallel", **names)
        for t in (1.0, 0.7):
            with areal.bind(strict=True, any_version=True) as slots:
                for name in names:
                    assert_logits(
                        rank,
                        lambda x, t=t, name=name: getattr(home, name)(x, data.tokens, t, tp_group=group),
                        lambda x, t=t, name=name: getattr(areal, name)(x, data.tokens, t),
                        data.logits,
                    )
                assert slots.counts == {"fused": 2}
        with areal.bind(any_version=True) as slots, pytest.raises(AssertionError, match="own function was called"):
            home.gather_logprobs(own(data.logits, rank).double(), data.tokens, tp_group=group)
        assert slots.counts == {"areal: dtype torch.float64": 1}


def check_areal_itself(rank: int, ranks: int) -> None:
    if not is_installed("areal"):
        return
    data, group = drawn(), dist.group.WORLD
    with modules(), pytest.MonkeyPatch.context() as monkeypatch:
        home = their_file(
            "areal.utils.functional.vocab_parallel", monkeypatch, areal__infra__platforms={"is_npu_available": False}
        )
        for name in ("gather_logprobs", "gather_logprobs_entropy"):
            for t in (1.0, 0.7):

                def call(x: Tensor, name: str = name, t: float = t) -> Any:
                    return getattr(home, name)(x, data.tokens, t, tp_group=group, chunk_size=4)

                theirs = graded(call, own(data.logits, rank))
                with areal.bind(strict=True, any_version=True) as slots:
                    ours = graded(call, own(data.logits, rank))
                assert slots.counts == {"fused": 1}
                for got, want in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
                    assert_close(got, want)


# ---- slime


@functools.cache
def alone() -> Any:
    """A process group with this rank only."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def check_slime(rank: int, ranks: int) -> None:
    """With the tokens that top-p sampling kept: none on this rank in some rows, the target not among them in others. No group
    is all ranks, as torch.distributed and slime have it."""
    data = drawn()
    keep = data.keep.clone()
    keep[2, :WIDTH], keep[3, WIDTH:] = False, False
    assert not keep[torch.arange(N), data.tokens].all() and keep[torch.arange(N), data.tokens].any()
    with modules():
        home = stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=not_reached())
        for entropy, group in (
            ({}, None),
            ({"with_entropy": True}, dist.group.WORLD),
            ({"with_entropy": True, "with_entropy_grad": False}, None),
        ):
            for mask in (None, keep):
                with slime.bind(strict=True, any_version=True) as slots:
                    assert_logits(
                        rank,
                        lambda x, e=entropy, m=mask, group=group: home.calculate_log_probs_and_entropy(
                            x, data.tokens, group, log_prob_keep_mask=None if m is None else own(m, rank), **e
                        ),
                        lambda x, e=entropy, m=mask: slime.calculate_log_probs_and_entropy(
                            x, data.tokens, alone(), log_prob_keep_mask=m, **e
                        ),
                        data.logits,
                    )
                    assert slots.counts == {"fused": 1}
    exact = torch.where(keep | torch.nn.functional.one_hot(data.tokens, V).bool(), data.logits.double(), -math.inf)
    logps, _ = slime.calculate_log_probs_and_entropy(
        own(data.logits, rank), data.tokens, None, log_prob_keep_mask=own(keep, rank)
    )
    assert_close(logps.double(), exact.log_softmax(-1).gather(1, data.tokens[:, None]))


def check_slime_policy_loss(rank: int, ranks: int) -> None:
    """The custom loss over slime's own scores of two samples: the loss of each rank, the gradient of its columns."""
    data, lengths = drawn(), [6, 5]
    g = torch.Generator().manual_seed(8)
    fields = {name: list((-3 + torch.randn(N, generator=g)).split(lengths)) for name in ("rollout_log_probs", "ref_log_probs")}
    batch = {
        **fields, "log_probs": list(drawn(9).logits.log_softmax(-1)[:, 0].split(lengths)), "response_lengths": lengths,
        "advantages": list(torch.randn(N, generator=g).split(lengths)), "loss_masks": [torch.ones(n) for n in lengths],
        "total_lengths": lengths, "unconcat_tokens": [],
    }  # fmt: skip
    args = slime_args(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.05)
    with modules():
        home = stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=not_reached())

        def loss(logits: Tensor, group: Any) -> Tensor:
            def scores(logits: Tensor, **_: Any) -> tuple[None, dict[str, list[Tensor]]]:
                logps, entropy = home.calculate_log_probs_and_entropy(logits[0], data.tokens, group, with_entropy=True)
                return None, {"log_probs": list(logps[:, 0].split(lengths)), "entropy": list(entropy.split(lengths))}

            stand_in(
                "slime.backends.megatron_utils.loss",
                get_log_probs_and_entropy=scores,
                get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
            )
            return slime.policy_loss()(args, batch, logits[None], lambda x: x.sum() / N)[0].view(1)

        def gradient(f: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
            leaf = logits.clone().requires_grad_()
            value = f(leaf)
            return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

        with slime.bind(strict=True, any_version=True) as slots:
            value, part = gradient(lambda x: loss(x, dist.group.WORLD), own(data.logits, rank))
            expected, whole = gradient(lambda x: loss(x, alone()), data.logits)
            assert slots.counts == {"fused": 2}
        assert_close(value, expected)
        assert_close(part, own(whole, rank))


def check_slime_replay(rank: int, ranks: int) -> None:
    """slime's record as sets of the whole vocabulary: in one rank's part alone, in both, without the target, empty."""
    data = drawn()
    lists = [[0, 2], [WIDTH + 1], [1, WIDTH], [], [int(data.tokens[4])], *[[3, WIDTH + 2, 7]] * (N - 5)]
    scored = torch.tensor([bool(row) for row in lists])
    replay = slime.Replay(TokenSets.from_lists(lists), scored)
    for options in ({}, {"with_entropy": True}, {"with_entropy": True, "options": Options(entropy_over="kept")}):

        def score(x: Tensor, group: Any, options: Any = options) -> Any:
            return slime.calculate_log_probs_and_entropy(x, data.tokens, group, log_prob_keep_mask=replay, **options)

        assert_logits(rank, lambda x: score(x, dist.group.WORLD), lambda x: score(x, alone()), data.logits)
    keep = replay.kept.mask(V) | torch.nn.functional.one_hot(data.tokens, V).bool()
    exact = data.logits.double().masked_fill(~keep, -math.inf).log_softmax(-1).gather(1, data.tokens[:, None])[:, 0]
    logps, _ = slime.calculate_log_probs_and_entropy(own(data.logits, rank), data.tokens, None, log_prob_keep_mask=replay)
    assert_close(logps[:, 0].double(), torch.where(scored, exact, 0.0))


# ---- SkyRL


def check_skyrl_support(rank: int, ranks: int) -> None:
    """From hidden states and this rank's part of the weight, over sets of the whole vocabulary."""
    data, g = drawn(), torch.Generator().manual_seed(3)
    sets = torch.stack([torch.randperm(V, generator=g)[:4] for _ in range(N)]).to(torch.int32)
    sets[1], sets[2, 1:], sets[:, 0] = -1, -1, torch.where(torch.arange(N) == 1, -1, data.tokens)
    sets = torch.where((sets == data.tokens[:, None].int()) & (torch.arange(4) > 0), -1, sets)

    def score(h: Tensor, w: Tensor, group: Any, start: int) -> Tensor:
        return skyrl.sample_support_logprobs(
            h, data.tokens, sets, vocab_start_index=start, vocab_end_index=start + len(w), tp_group=group, lm_head_weight=w
        )[0]

    assert_head(
        rank,
        lambda h, w: score(h, w, dist.group.WORLD, rank * WIDTH),
        lambda h, w: score(h, w, alone(), 0),
        data.hidden,
        data.weight,
    )


def bounds(rank: int) -> tuple[int, int]:
    return rank * WIDTH, (rank + 1) * WIDTH


def stand_in_for_functions_of_logits() -> None:
    names = ("logprobs_from_logits", "chunked_entropy_from_logits")
    stand_in(f"{SKYRL}.utils.torch_utils", **{name: not_reached() for name in names})


def check_skyrl(rank: int, ranks: int) -> None:
    data = drawn()
    with modules():
        stand_in_for_functions_of_logits()
        home = stand_in(MEGATRON_HEAD, _fused_lm_head_logprob_apply=not_reached())
        hidden, target = data.hidden[None], data.tokens[None]

        def parts(h: Tensor, w: Tensor, inference_only: bool = False, group: Any = None) -> Tensor:
            return home._fused_lm_head_logprob_apply("torch", h, w, target, *bounds(rank), 4, group, inference_only)

        def whole(h: Tensor, w: Tensor) -> Tensor:
            return skyrl.fused_lm_head_logprobs("torch", h, w, target, 0, V, 4, alone(), False)

        with skyrl.bind(megatron=True, strict=True, any_version=True) as slots:
            assert_head(rank, parts, whole, hidden, data.weight)
            leaf = own(data.weight, rank, 0).requires_grad_()
            assert not parts(hidden, leaf, True, dist.group.WORLD).requires_grad
            assert slots.counts == {"fused": 2}
            with pytest.raises(ValueError, match=r"is \[0, \d+\): pass the group"):
                parts(hidden, leaf, True, alone()) if rank else parts(hidden, leaf[:5], True, alone())


def check_skyrl_itself(rank: int, ranks: int) -> None:
    """Its way in plain PyTorch, with the share of the gradient of hidden that it leaves on each rank."""
    if not is_installed("skyrl"):
        return
    data = drawn()
    with modules(), pytest.MonkeyPatch.context() as monkeypatch:
        home: ModuleType = their_file(MEGATRON_HEAD, monkeypatch, megatron__core__parallel_state={})
        stand_in_for_functions_of_logits()

        def call(h: Tensor, w: Tensor) -> Tensor:
            return home._fused_lm_head_logprob_apply(
                "torch", h, w, data.tokens[None], *bounds(rank), 4, dist.group.WORLD, False
            )

        inputs = data.hidden[None], own(data.weight, rank, 0)
        theirs = graded(call, *inputs)
        with skyrl.bind(megatron=True, strict=True, any_version=True) as slots:
            ours = graded(call, *inputs)
        assert slots.counts == {"fused": 1}
        for got, want in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
            assert_close(got, want)


# ---- verl


def check_verl(rank: int, ranks: int) -> None:
    data, labels = drawn(), drawn().tokens[None]
    with modules():
        home = stand_in("verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=not_reached())
        for t in (1.0, 0.7):
            with verl.bind(logits=False, strict=True, any_version=True) as slots:
                assert_head(
                    rank,
                    # Megatron's layout, [S, 1, H].
                    lambda h, w, t=t: home.linear_cross_entropy(h, w, labels, t, "none", dist.group.WORLD),
                    lambda h, w, t=t: verl.linear_cross_entropy(h, w, labels, t, "none", None),
                    data.hidden[:, None],
                    data.weight,
                )
                assert slots.counts == {"fused": 1}


# ---- NeMo-RL


def nemo_case(vocab: int) -> tuple[Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(11)
    rows, length = 3, 6
    ids = torch.randint(vocab - 3, (rows, length), generator=g)
    ids[0, 1:3] = torch.tensor([vocab - 4, 0])
    logits = 2 * torch.randn(rows, length, vocab, generator=g)
    logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    near = {
        name: torch.nn.functional.pad(logps + 0.3 * torch.randn(rows, length - 1, generator=g), (1, 0))
        for name in ("prev_logprobs", "reference_policy_logprobs", "generation_logprobs")
    }
    mask = torch.ones(rows, length)
    mask[1, 3:] = 0
    fields = {"input_ids": ids, "token_mask": mask, "sample_mask": torch.tensor([1.0, 1.0, 0.0])}
    return logits, fields | near | {"advantages": torch.randn(rows, length, generator=g)}


OBJECTIVES = {
    "dapo": {"beta": 0.1},
    "gspo": {"beta": 0.05, "entropy_coef": 0.02},
}


def nemo_stand_in() -> None:
    kinds = {"LossType": SimpleNamespace(TOKEN_LEVEL=1, SEQUENCE_LEVEL=2), "LossInputType": SimpleNamespace(LOGIT="logit")}
    stand_in("nemo_rl.algorithms.loss.interfaces", **kinds)


def nemo_run(loss_fn: Any, logits: Tensor, fields: dict[str, Tensor], **more: Any) -> tuple[Tensor, dict[str, float], Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    made = leaf * 1.0  # a model's output
    loss, metrics = loss_fn(
        logits=made, data=fields, global_valid_seqs=torch.tensor(7.0), global_valid_toks=torch.tensor(31.0), **more
    )
    return loss.detach(), metrics, torch.autograd.grad(loss, leaf)[0]


def check_nemo_rl(rank: int, ranks: int) -> None:
    """Logits as a DTensor of an odd vocabulary, and Megatron's, padded to even parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    with modules():
        nemo_stand_in()
        asked = []

        def get_tensor_model_parallel_group() -> Any:
            asked.append(rank)
            return dist.group.WORLD

        stand_in("megatron.core.parallel_state", get_tensor_model_parallel_group=get_tensor_model_parallel_group)
        for name, changes in OBJECTIVES.items():
            objective = Objective.preset(name, numerics="nemo-rl", **changes)
            for inplace in (False, True):
                options = {"importance": {"mode": "truncate", "high": 1.2}, "inplace": inplace}

                def compare(got: tuple[Any, ...], whole: tuple[Any, ...], gradient: Tensor) -> None:
                    assert_close(got[0][None], whole[0][None])
                    assert got[1] == pytest.approx(whole[1], rel=1e-5, abs=1e-7)
                    assert_close(gradient, whole[2])

                plain = nemo_rl.PolicyLoss(objective, **options)
                logits, fields = nemo_case(V - 3)
                got = nemo_run(plain, distribute_tensor(logits, mesh, [Shard(-1)]), fields)
                compare(got, nemo_run(plain, logits, fields), got[2].full_tensor())

                logits, fields = nemo_case(V)
                whole = nemo_run(plain, logits, fields)
                part, columns = own(logits, rank), (*whole[:2], own(whole[2], rank))
                before = len(asked)
                got = nemo_run(nemo_rl.PolicyLoss(objective, megatron=True, **options), part, fields)
                assert len(asked) == before + 1
                compare(got, columns, got[2])
                got = nemo_run(plain, part, fields, vocab_parallel_group=dist.group.WORLD)
                compare(got, columns, got[2])
        for placement in (Replicate(), Shard(0)):
            with pytest.raises(ValueError, match="logits is a DTensor with placements"):
                nemo_run(plain, distribute_tensor(logits, mesh, [placement]), fields)
