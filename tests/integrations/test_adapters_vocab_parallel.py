"""Adapters of trainers on logits and heads that are cut over two tensor-parallel ranks.

Each adapter on two ranks is compared with itself on one rank, which other tests compare with the trainers; AReaL's and SkyRL's too
with the trainer's own function on two ranks, if its package is on the path."""

from __future__ import annotations

import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import Objective, Options, TokenSets
from grpo_kernels.integrations import areal, nemo_rl, skyrl, slime, verl
from support.processes import checks_of
from support.trainers import (
    stand_in,
    their_file,
    value_and_gradient,
    values_and_slopes,
    without_trainers,
)

N, H, WIDTH = 11, 6, 13
V = 2 * WIDTH  # the last ids are padding of the head: no target, but in the softmax, as they are for the trainers

#: Checks that need a trainer's package.
OWN = {"check_areal_itself": "areal", "check_skyrl_itself": "skyrl"}
HOME, SKYRL = "areal.utils.functional.vocab_parallel", "skyrl.backends.skyrl_train"

G = torch.Generator().manual_seed(7)
LOGITS, HIDDEN, WEIGHT = 2 * torch.randn(N, V, generator=G), torch.randn(N, H, generator=G), torch.randn(V, H, generator=G)
TOKENS, KEEP = torch.tensor([0, WIDTH - 1, WIDTH, V - 4, 5, 20, 3, 14, 9, 16, 2]), torch.rand(N, V, generator=G) < 0.3
KEEP[2, :WIDTH], KEEP[3, WIDTH:] = False, False  # none on one rank
#: In one rank's part alone, in both, without the target, empty.
LISTS = [[0, 2], [WIDTH + 1], [1, WIDTH], [], [int(TOKENS[4])], *[[3, WIDTH + 2, 7]] * (N - 5)]
REPLAY = slime.Replay(TokenSets.from_lists(LISTS), torch.tensor([bool(row) for row in LISTS]))
SETS = torch.where(KEEP, torch.arange(V), -1).sort(-1, descending=True).values[:, :9]
SETS = torch.where(SETS == TOKENS[:, None], -1, SETS)
SETS[:, 0], SETS[1], SETS[2, 1:] = TOKENS, -1, -1


def is_installed(package):
    return importlib.util.find_spec(package) is not None


@functools.cache
def alone():
    """A process group with this rank only."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def own(x, rank, dim=-1):
    return x.split(WIDTH, dim)[rank].clone()


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


def of_slime(x, group, mask=None, **options):
    mask = mask if isinstance(mask, slime.Replay) or mask is None or x.shape[-1] == V else own(mask, dist.get_rank())
    return slime.calculate_log_probs_and_entropy(x, TOKENS, group, log_prob_keep_mask=mask, **options)


ENTROPY = {"with_entropy": True}
#: Calls of logits and a group; no group is all ranks, as torch.distributed and slime have it.
OF_LOGITS = {
    "areal": lambda x, group: areal.gather_logprobs(x, TOKENS, 1.0, tp_group=group),
    "areal, entropy": lambda x, group: areal.gather_logprobs_entropy(x, TOKENS, 0.7, tp_group=group),
    "slime": of_slime, "slime, entropy": functools.partial(of_slime, **ENTROPY), "slime, mask": functools.partial(of_slime, mask=KEEP, **ENTROPY),
    "slime, no group": lambda x, group: of_slime(x, None if x.shape[-1] < V else group, with_entropy_grad=False, **ENTROPY),
    "slime, replay": functools.partial(of_slime, mask=REPLAY, **ENTROPY),
    "slime, entropy of sets": functools.partial(of_slime, mask=REPLAY, options=Options(entropy_over="kept"), **ENTROPY),
}  # fmt: skip


def of_skyrl(h, w, group):
    start = dist.get_rank() * WIDTH if len(w) < V else 0
    return skyrl.fused_lm_head_logprobs("torch", h[None], w, TOKENS[None], start, start + len(w), 4, group, False)


def of_skyrls_sets(h, w, group):
    start = dist.get_rank() * WIDTH if len(w) < V else 0
    bounds = {"vocab_start_index": start, "vocab_end_index": start + len(w)}
    return skyrl.sample_support_logprobs(h, TOKENS, SETS, tp_group=group, lm_head_weight=w, **bounds)[0]


#: Calls of hidden states, a head and a group; verl's are in Megatron's layout, [S, 1, H].
OF_HEADS = {
    "skyrl": of_skyrl, "skyrl, no group": lambda h, w, group: of_skyrl(h, w, None if len(w) < V else group), "skyrl, sets": of_skyrls_sets,
    "verl": lambda h, w, group: verl.linear_cross_entropy(h[:, None], w, TOKENS[None], 0.7, "none", group),
}  # fmt: skip


def check_logits(rank, ranks):
    """Values on this rank, and its columns of the gradient."""
    for call in OF_LOGITS.values():
        *values, gradient = values_and_slopes(lambda x, call=call: call(x, dist.group.WORLD), own(LOGITS, rank))
        *expected, whole = values_and_slopes(lambda x, call=call: call(x, alone()), LOGITS)
        same([*values, gradient], [*expected, own(whole, rank)])


def check_heads(rank, ranks):
    """The gradient of hidden is this rank's share: the shares of all add up to it."""
    for call in OF_HEADS.values():
        *values, d_hidden, d_weight = values_and_slopes(
            lambda h, w, call=call: call(h, w, dist.group.WORLD), HIDDEN, own(WEIGHT, rank, 0)
        )
        *expected, whole, whole_weight = values_and_slopes(lambda h, w, call=call: call(h, w, alone()), HIDDEN, WEIGHT)
        assert (d_hidden - whole).abs().max() > 0.1
        dist.all_reduce(d_hidden)
        same([*values, d_weight, d_hidden], [*expected, own(whole_weight, rank, 0), whole])


def beside_itself(name, bind, call, *inputs, beside=None, **stubs):
    """A trainer's own function on this rank, and ours in its place."""
    with without_trainers("areal", "skyrl", "megatron"), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("GRPO_KERNELS_ANY_VERSION", "1")
        home = their_file(name, monkeypatch, **stubs)
        for module, names in (beside or {}).items():
            stand_in(module, **names)
        theirs = values_and_slopes(functools.partial(call, home), *inputs)
        with bind(strict=True) as slots:
            ours = values_and_slopes(functools.partial(call, home), *inputs)
        assert slots.counts == {"fused": 1}
    same(ours, theirs)


def check_areal_itself(rank, ranks):
    for name in ("gather_logprobs", "gather_logprobs_entropy") if is_installed("areal") else ():
        beside_itself(
            HOME, areal.bind, lambda home, x, n=name: getattr(home, n)(x, TOKENS, 0.7, tp_group=dist.group.WORLD, chunk_size=4),
            own(LOGITS, rank), areal__infra__platforms={"is_npu_available": False},
        )  # fmt: skip


def check_skyrl_itself(rank, ranks):
    """Its way in plain PyTorch, with the share of the gradient of hidden that it leaves on each rank."""
    if is_installed("skyrl"):
        beside_itself(
            f"{SKYRL}.distributed.megatron.model_utils", functools.partial(skyrl.bind, megatron=True),
            lambda home, h, w: home._fused_lm_head_logprob_apply(
                "torch", h, w, TOKENS[None], rank * WIDTH, (rank + 1) * WIDTH, 4, dist.group.WORLD, False),
            HIDDEN[None], own(WEIGHT, rank, 0), megatron__core__parallel_state={},
            beside={f"{SKYRL}.utils.torch_utils": {"logprobs_from_logits": len, "chunked_entropy_from_logits": sum}},
        )  # fmt: skip


# ---- NeMo-RL


def nemo_case(vocab):
    """Logits, and a micro-batch beside them."""
    g = torch.Generator().manual_seed(11)
    ids, logits, mask = (
        torch.randint(vocab - 3, (3, 6), generator=g),
        2 * torch.randn(3, 6, vocab, generator=g),
        torch.ones(3, 6),
    )
    ids[0, 1:3], mask[1, 3:] = torch.tensor([vocab - 4, 0]), 0
    names = ("prev_logprobs", "reference_policy_logprobs", "generation_logprobs", "advantages")
    return logits, {"input_ids": ids, "token_mask": mask, "sample_mask": torch.tensor([1.0, 1.0, 0.0])} | {
        name: torch.randn(3, 6, generator=g) - 2.0 * (name != "advantages") for name in names
    }  # fmt: skip


def check_nemo_rl(rank, ranks):
    """Logits as a DTensor of an odd vocabulary, and Megatron's, padded to even parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, asked = init_device_mesh("cpu", (ranks,)), []
    (odd, fields), (even, even_fields) = nemo_case(V - 1), nemo_case(V)
    group, counts = {"vocab_parallel_group": dist.group.WORLD}, (torch.tensor(7.0), torch.tensor(31.0))

    def run(loss_fn, logits, fields=even_fields, **more):
        """(loss and gradient, metrics)"""
        (loss, metrics), gradient = value_and_gradient(lambda x: loss_fn(x * 1.0, fields, *counts, **more), logits)
        return [loss[None].double(), gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient], metrics

    def cut(x, placement=Shard(-1)):  # noqa: B008
        return distribute_tensor(x, mesh, [placement])

    with without_trainers("nemo_rl", "megatron"):
        kinds = {"LossType": SimpleNamespace(TOKEN_LEVEL=1, SEQUENCE_LEVEL=2), "LossInputType": SimpleNamespace(LOGIT="logit")}
        stand_in("nemo_rl.algorithms.loss.interfaces", **kinds)
        stand_in("megatron.core.parallel_state", get_tensor_model_parallel_group=lambda: asked.append(rank) or dist.group.WORLD)
        objective = Objective.preset("gspo", numerics="nemo-rl", beta=0.05, entropy_coef=0.02)
        plain, megatron = (
            nemo_rl.PolicyLoss(objective, importance={"mode": "truncate", "high": 1.2}, inplace=m, megatron=m)
            for m in (False, True)
        )
        (loss, gradient), metrics = run(plain, even)
        part, of_part = own(even, rank), ([loss, own(gradient, rank)], metrics)
        for got, want in (
            (run(plain, cut(odd), fields), run(plain, odd, fields)), (run(megatron, part), of_part), (run(plain, part, **group), of_part),
        ):  # fmt: skip
            same(got[0], want[0])
            assert got[1] == pytest.approx(want[1], rel=1e-5, abs=1e-7)
        assert len(asked) == 1
        with pytest.raises(ValueError, match="logits is a DTensor with placements"):
            run(plain, cut(odd, Shard(0)), fields)


# ---- the test


@pytest.mark.parametrize("check", checks_of(__name__))
def test_on_two_ranks(on_ranks, check):
    if check in OWN and not is_installed(OWN[check]):
        pytest.skip(f"{OWN[check]} is not installed")
    assert on_ranks(__name__, 2)[check] == "ok", on_ranks(__name__, 2)[check]
