"""Checks of trainers whose vocabulary is cut over tensor-parallel ranks: run by test_adapters_vocab_parallel.py.

Each adapter on two ranks is compared with itself on one rank, which other tests compare with the trainers; AReaL's and SkyRL's too
with the trainer's own function on two ranks, if its package is on the path."""

from __future__ import annotations

import functools
import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import Objective, Options, TokenSets
from grpo_kernels.integrations import areal, nemo_rl, skyrl, slime, verl
from support.trainers import stand_in, their_file, without_trainers

N, H, WIDTH = 11, 6, 13
V = 2 * WIDTH  # the last ids are padding of the head: no target, but in the softmax, as they are for the trainers

#: Checks that need a trainer's package.
OWN = {"check_areal_itself": "areal", "check_skyrl_itself": "skyrl"}
HOME, SKYRL = "areal.utils.functional.vocab_parallel", "skyrl.backends.skyrl_train"
MEGATRON_HEAD = f"{SKYRL}.distributed.megatron.model_utils"

G = torch.Generator().manual_seed(7)
LOGITS, HIDDEN, WEIGHT = 2 * torch.randn(N, V, generator=G), torch.randn(N, H, generator=G), torch.randn(V, H, generator=G)
TOKENS, KEEP = torch.tensor([0, WIDTH - 1, WIDTH, V - 4, 5, 20, 3, 14, 9, 16, 2]), torch.rand(N, V, generator=G) < 0.3
KEEP[2, :WIDTH], KEEP[3, WIDTH:] = False, False  # none on one rank


def is_installed(package):
    return importlib.util.find_spec(package) is not None


def alone_with_modules(check):
    """Removes the modules that a check has put into sys.modules."""

    @functools.wraps(check)
    def checked(rank, ranks):
        with (
            without_trainers("areal", "slime", "skyrl", "nemo_rl", "verl", "megatron"),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setenv("GRPO_KERNELS_ANY_VERSION", "1")
            check(rank, ranks)

    return checked


@functools.cache
def alone():
    """A process group with this rank only."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def not_reached():
    """A new function each time: names are bound by what they hold."""

    def theirs(*_, **__):
        raise AssertionError("the trainer's own function was called")

    return theirs


def own(x, rank, dim=-1):
    return x.split(WIDTH, dim)[rank].clone()


def graded(f, *inputs):
    """The result of f, and the gradient of a weighted sum of it with respect to the inputs. One weight is 0."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    made = f(*leaves)
    outputs = [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs if x.requires_grad)
    return [x.detach() for x in outputs], list(torch.autograd.grad(loss, leaves))


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


def assert_logits(rank, parts, whole, logits=LOGITS):
    """Values on this rank, and its columns of the gradient."""
    (values, (gradient,)), (expected, (whole_gradient,)) = graded(parts, own(logits, rank)), graded(whole, logits)
    assert all(x.dtype == torch.float32 for x in values)
    assert_close([*values, gradient], [*expected, own(whole_gradient, rank)])


def assert_head(rank, parts, whole, hidden):
    """The gradient of hidden is this rank's share: the shares of all add up to it."""
    values, (d_hidden, d_weight) = graded(parts, hidden, own(WEIGHT, rank, 0))
    expected, (whole_d_hidden, whole_d_weight) = graded(whole, hidden, WEIGHT)
    assert (d_hidden - whole_d_hidden).abs().max() > 0.1
    dist.all_reduce(d_hidden)
    assert_close([*values, d_weight, d_hidden], [*expected, own(whole_d_weight, rank, 0), whole_d_hidden])


def exact_logps(keep):
    keep = keep | torch.nn.functional.one_hot(TOKENS, V).bool()
    return LOGITS.double().masked_fill(~keep, -math.inf).log_softmax(-1).gather(1, TOKENS[:, None])


@alone_with_modules
def check_areal(rank, ranks):
    names = {"gather_logprobs": not_reached(), "gather_logprobs_entropy": not_reached()}
    home, group = stand_in(HOME, **names), dist.group.WORLD
    for name, t in (("gather_logprobs", 1.0), ("gather_logprobs_entropy", 0.7)):
        with areal.bind(strict=True) as slots:
            assert_logits(
                rank,
                lambda x, n=name, t=t: getattr(home, n)(x, TOKENS, t, tp_group=group),
                lambda x, n=name, t=t: getattr(areal, n)(x, TOKENS, t),
            )
        assert slots.counts == {"fused": 1}
    with areal.bind() as slots, pytest.raises(AssertionError, match="own function was called"):
        home.gather_logprobs(own(LOGITS, rank).double(), TOKENS, tp_group=group)
    assert slots.counts == {"AReaL: dtype torch.float64": 1}


def beside_itself(home, bind, call, *inputs):
    theirs = graded(call, *inputs)
    with bind(strict=True) as slots:
        ours = graded(call, *inputs)
    assert slots.counts == {"fused": 1}
    assert_close((*ours[0], *ours[1]), (*theirs[0], *theirs[1]))


@alone_with_modules
def check_areal_itself(rank, ranks):
    if is_installed("areal"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            home = their_file(HOME, monkeypatch, areal__infra__platforms={"is_npu_available": False})
            for name in ("gather_logprobs", "gather_logprobs_entropy"):
                call = lambda x, n=name: getattr(home, n)(x, TOKENS, 0.7, tp_group=dist.group.WORLD, chunk_size=4)  # noqa: E731
                beside_itself(home, areal.bind, call, own(LOGITS, rank))


@alone_with_modules
def check_slime(rank, ranks):
    """With the tokens that top-p sampling kept: none on this rank in some rows, the target not among them in others. No group
    is all ranks, as torch.distributed and slime have it."""
    home = stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=not_reached())
    for options, group, mask in (
        ({}, None, None), ({"with_entropy": True}, dist.group.WORLD, KEEP), ({"with_entropy": True, "with_entropy_grad": False}, None, None),
        ({}, dist.group.WORLD, KEEP),
    ):  # fmt: skip
        with slime.bind(strict=True) as slots:
            assert_logits(
                rank,
                lambda x, o=options, m=mask, group=group: home.calculate_log_probs_and_entropy(
                    x, TOKENS, group, log_prob_keep_mask=None if m is None else own(m, rank), **o
                ),
                lambda x, o=options, m=mask: slime.calculate_log_probs_and_entropy(
                    x, TOKENS, alone(), log_prob_keep_mask=m, **o
                ),
            )
        assert slots.counts == {"fused": 1}
    logps, _ = slime.calculate_log_probs_and_entropy(own(LOGITS, rank), TOKENS, None, log_prob_keep_mask=own(KEEP, rank))
    assert_close([logps.double()], [exact_logps(KEEP)])


def check_slime_replay(rank, ranks):
    """slime's record as sets of the whole vocabulary: in one rank's part alone, in both, without the target, empty."""
    lists = [[0, 2], [WIDTH + 1], [1, WIDTH], [], [int(TOKENS[4])], *[[3, WIDTH + 2, 7]] * (N - 5)]
    scored = torch.tensor([bool(row) for row in lists])
    replay = slime.Replay(TokenSets.from_lists(lists), scored)
    for options in ({}, {"with_entropy": True}, {"with_entropy": True, "options": Options(entropy_over="kept")}):

        def score(x, group, options=options):
            return slime.calculate_log_probs_and_entropy(x, TOKENS, group, log_prob_keep_mask=replay, **options)

        assert_logits(rank, lambda x, score=score: score(x, dist.group.WORLD), lambda x, score=score: score(x, alone()))
    logps, _ = slime.calculate_log_probs_and_entropy(own(LOGITS, rank), TOKENS, None, log_prob_keep_mask=replay)
    assert_close([logps.double()], [torch.where(scored[:, None], exact_logps(replay.kept.mask(V)), 0.0)])


@alone_with_modules
def check_slime_policy_loss(rank, ranks):
    """The custom loss over slime's own scores of two samples: the loss of each rank, the gradient of its columns."""
    from test_policy_losses import slime_args

    g, lengths = torch.Generator().manual_seed(8), [6, 5]
    drawn = {name: (torch.randn(N, generator=g) - 3 * (name != "advantages")).split(lengths) for name in (
        "rollout_log_probs", "ref_log_probs", "log_probs", "advantages")}  # fmt: skip
    batch = {**{name: [*x] for name, x in drawn.items()}, "loss_masks": [torch.ones(n) for n in lengths], "unconcat_tokens": [],
             "response_lengths": lengths, "total_lengths": lengths}  # fmt: skip
    args = slime_args(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.05)
    home = stand_in("slime.utils.ppo_utils", calculate_log_probs_and_entropy=not_reached())

    def loss(logits, group):
        def scores(logits, **_):
            logps, entropy = home.calculate_log_probs_and_entropy(logits[0], TOKENS, group, with_entropy=True)
            return None, {"log_probs": [*logps[:, 0].split(lengths)], "entropy": [*entropy.split(lengths)]}

        stand_in(
            "slime.backends.megatron_utils.loss",
            get_log_probs_and_entropy=scores,
            get_rollout_top_p_logprob_kwargs=lambda *_: {},
        )
        return slime.policy_loss()(args, batch, logits[None], lambda x: x.sum() / N)[0].view(1)

    with slime.bind(strict=True) as slots:
        assert_logits(rank, lambda x: loss(x, dist.group.WORLD), lambda x: loss(x, alone()))
        assert slots.counts == {"fused": 2}


def functions_of_logits():
    stand_in(f"{SKYRL}.utils.torch_utils", logprobs_from_logits=not_reached(), chunked_entropy_from_logits=not_reached())


@alone_with_modules
def check_skyrl(rank, ranks):
    functions_of_logits()
    home, hidden, bounds = (
        stand_in(MEGATRON_HEAD, _fused_lm_head_logprob_apply=not_reached()),
        HIDDEN[None],
        (rank * WIDTH, (rank + 1) * WIDTH),
    )

    def parts(h, w, inference_only=False, group=None):
        return home._fused_lm_head_logprob_apply("torch", h, w, TOKENS[None], *bounds, 4, group, inference_only)

    with skyrl.bind(megatron=True, strict=True) as slots:
        assert_head(
            rank, parts, lambda h, w: skyrl.fused_lm_head_logprobs("torch", h, w, TOKENS[None], 0, V, 4, alone(), False), hidden
        )
        leaf = own(WEIGHT, rank, 0).requires_grad_()
        assert not parts(hidden, leaf, True, dist.group.WORLD).requires_grad
        assert slots.counts == {"fused": 2}
        with pytest.raises(ValueError, match=r"is \[0, \d+\): pass the group"):
            parts(hidden, leaf if rank else leaf[:5], True, alone())


@alone_with_modules
def check_skyrl_itself(rank, ranks):
    """Its way in plain PyTorch, with the share of the gradient of hidden that it leaves on each rank."""
    if is_installed("skyrl"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            home = their_file(MEGATRON_HEAD, monkeypatch, megatron__core__parallel_state={})
            functions_of_logits()
            call = lambda h, w: home._fused_lm_head_logprob_apply(  # noqa: E731
                "torch", h, w, TOKENS[None], rank * WIDTH, (rank + 1) * WIDTH, 4, dist.group.WORLD, False
            )
            beside_itself(home, functools.partial(skyrl.bind, megatron=True), call, HIDDEN[None], own(WEIGHT, rank, 0))


def check_skyrl_support(rank, ranks):
    """From hidden states and this rank's part of the weight, over sets of the whole vocabulary."""
    g = torch.Generator().manual_seed(3)
    sets = torch.stack([torch.randperm(V, generator=g)[:4] for _ in range(N)]).to(torch.int32)
    sets = torch.where((sets == TOKENS[:, None].int()), -1, sets)
    sets[:, 0], sets[1], sets[2, 1:] = TOKENS, -1, -1

    def score(h, w, group, start):
        bounds = {"vocab_start_index": start, "vocab_end_index": start + len(w)}
        return skyrl.sample_support_logprobs(h, TOKENS, sets, tp_group=group, lm_head_weight=w, **bounds)[0]

    assert_head(rank, lambda h, w: score(h, w, dist.group.WORLD, rank * WIDTH), lambda h, w: score(h, w, alone(), 0), HIDDEN)


@alone_with_modules
def check_verl(rank, ranks):
    """Megatron's layout, [S, 1, H]."""
    home = stand_in("verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=not_reached())
    with verl.bind(logits=False, strict=True) as slots:
        assert_head(
            rank, lambda h, w: home.linear_cross_entropy(h, w, TOKENS[None], 0.7, "none", dist.group.WORLD),
            lambda h, w: verl.linear_cross_entropy(h, w, TOKENS[None], 0.7, "none", None), HIDDEN[:, None],
        )  # fmt: skip
    assert slots.counts == {"fused": 1}


# ---- NeMo-RL


def nemo_case(vocab):
    g = torch.Generator().manual_seed(11)
    ids, logits, mask = (
        torch.randint(vocab - 3, (3, 6), generator=g),
        2 * torch.randn(3, 6, vocab, generator=g),
        torch.ones(3, 6),
    )
    ids[0, 1:3], mask[1, 3:] = torch.tensor([vocab - 4, 0]), 0
    logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    near = {name: torch.nn.functional.pad(logps + 0.3 * torch.randn(3, 5, generator=g), (1, 0)) for name in (
        "prev_logprobs", "reference_policy_logprobs", "generation_logprobs")}  # fmt: skip
    fields = {
        "input_ids": ids,
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "advantages": torch.randn(3, 6, generator=g),
    }
    return logits, fields | near


def nemo_run(loss_fn, logits, fields, **more):
    leaf = logits.detach().clone().requires_grad_()
    given = {"global_valid_seqs": torch.tensor(7.0), "global_valid_toks": torch.tensor(31.0)}
    loss, metrics = loss_fn(logits=leaf * 1.0, data=fields, **given, **more)  # a model's output
    return [loss.detach()[None], torch.autograd.grad(loss, leaf)[0]], metrics


@alone_with_modules
def check_nemo_rl(rank, ranks):
    """Logits as a DTensor of an odd vocabulary, and Megatron's, padded to even parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, asked = init_device_mesh("cpu", (ranks,)), []
    kinds = {"LossType": SimpleNamespace(TOKEN_LEVEL=1, SEQUENCE_LEVEL=2), "LossInputType": SimpleNamespace(LOGIT="logit")}
    stand_in("nemo_rl.algorithms.loss.interfaces", **kinds)
    stand_in("megatron.core.parallel_state", get_tensor_model_parallel_group=lambda: asked.append(rank) or dist.group.WORLD)
    for name, changes, inplace in (("dapo", {"beta": 0.1}, False), ("gspo", {"beta": 0.05, "entropy_coef": 0.02}, True)):
        options = {"importance": {"mode": "truncate", "high": 1.2}, "inplace": inplace}
        objective = Objective.preset(name, numerics="nemo-rl", **changes)
        plain, megatron = nemo_rl.PolicyLoss(objective, **options), nemo_rl.PolicyLoss(objective, megatron=True, **options)
        (odd, fields), (even, even_fields) = nemo_case(V - 3), nemo_case(V)
        part, group = own(even, rank), {"vocab_parallel_group": dist.group.WORLD}
        cut = nemo_run(plain, distribute_tensor(odd, mesh, [Shard(-1)]), fields)
        cut[0][1] = cut[0][1].full_tensor()
        (loss, gradient), metrics = nemo_run(plain, even, even_fields)
        for got, want in (
            (cut, nemo_run(plain, odd, fields)), (nemo_run(megatron, part, even_fields), ([loss, own(gradient, rank)], metrics)),
            (nemo_run(plain, part, even_fields, **group), ([loss, own(gradient, rank)], metrics)),
        ):  # fmt: skip
            assert_close(got[0], want[0])
            assert got[1] == pytest.approx(want[1], rel=1e-5, abs=1e-7)
    assert len(asked) == 2
    for placement in (Replicate(), Shard(0)):
        with pytest.raises(ValueError, match="logits is a DTensor with placements"):
            nemo_run(plain, distribute_tensor(odd, mesh, [placement]), fields)
    filtered = nemo_rl.PolicyLoss(
        Objective.preset("dapo", numerics="nemo-rl", beta=0.0), sampling_params=SimpleNamespace(top_k=3, top_p=1.0)
    )
    with pytest.raises(ValueError, match="a filter needs whole rows of logits"):
        nemo_run(filtered, part, even_fields, **group)
