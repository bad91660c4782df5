"""FusedLMHead on several ranks with different data: DDP, FSDP2, similar wrappers and ZeRO-3,
compared with one process in float64.

Two accumulation steps, two optimiser steps, evaluation in between. Every rank has other lengths;
rank 0 has a micro-batch of no rows, rank 1 one that is fully masked.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import Head, Options, TokenSets, linear_grpo_loss, linear_logprobs
from grpo_kernels.model import FusedLMHead, HeadLogprobs, HeadLoss
from support import oracle
from support.heads import (
    NORMALIZER,
    OBJECTIVE,
    TEMPERATURE,
    Case,
    H,
    Model,
    V,
    call_head,
    fused,
    gradients,
    make_batch,
    value_of,
)
from support.processes import checks_of, finish, run_checks, start

RATE = 0.3
SPEC = oracle.Spec(eps_high=0.28, beta=0.1, entropy_coef=0.02)
RANKS, STEPS, UPDATES = 2, 2, 2
BEFORE_THE_RANKS = ("torch.distributed.fsdp",)


#: Of a rank and a step. The second optimiser step sees the same data with other weights.
DATA = {
    (0, 0): make_batch(1, [5, 2, 4]), (0, 1): make_batch(2, []),
    (1, 0): make_batch(3, [3, 7], masked=True), (1, 1): make_batch(4, [6, 1, 2, 0]),
}  # fmt: skip


# ---- one process, plain torch, float64


@dataclass
class Expected:
    values: dict[tuple[int, int, int], float]  # of update, rank, step
    logps: dict[tuple[int, int, int], Tensor]
    gradients: list[dict[str, Tensor]]  # of each update: the mean over ranks


@functools.cache
def expected(kind, tied, bias):
    model = Model(Case(kind="logits", tied=tied, bias=bias)).double()
    found = Expected({}, {}, [])
    for update in range(UPDATES):
        for (rank, step), batch in DATA.items():
            logits = model(batch)
            assert batch.mask is not None
            mask = batch.mask.reshape(-1)
            logps, entropy = (
                x.reshape(-1) for x in oracle.log_probs(logits, batch.targets, TEMPERATURE)
            )
            if kind == "loss":
                result = oracle.objective(
                    SPEC, logps, entropy, oracle.sequences_of(batch.targets, None), advantages=batch.advantages, mask=mask,
                    old_logps=batch.old_logps, ref_logps=batch.ref_logps, normalizer=NORMALIZER,
                )  # fmt: skip
                assert result.margin > 1e-4, (
                    result.margin
                )  # rounding must not move a ratio across a bound
                value = result.loss
            else:
                weights = batch.advantages[:, None].expand(batch.targets.shape).reshape(-1)
                value = (weights * logps - 0.1 * entropy)[mask].sum() / NORMALIZER
            (value / RANKS).backward()
            found.values[update, rank, step] = float(value.detach())
            found.logps[update, rank, step] = torch.where(mask, logps.detach(), 0.0).view(
                batch.targets.shape
            )
        found.gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
                p.grad = None
    return found


# ---- a training run on each rank

Sync = Callable[[bool], AbstractContextManager[Any]]
Wrap = Callable[[nn.Module], tuple[Any, Sync]]


def assert_close(got, want, tolerance, what):
    """The largest error of each gradient, relative to its largest element."""
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name in want:
        off = float((got[name].double() - want[name]).abs().max() / want[name].abs().max())
        assert off < tolerance, f"{what}: the gradient of {name} is off by {off:.2g} on this rank"


def checked(out, batch, want, at, what, tolerance=2e-5):
    """Checks everything in an output and returns its value."""
    value = value_of(out, batch)
    assert float(value.detach()) == pytest.approx(want.values[at], rel=tolerance, abs=tolerance), (
        what,
        at,
    )
    if isinstance(out, HeadLoss | HeadLogprobs):
        assert (out.logps.detach() - want.logps[at]).abs().sum() <= tolerance * want.logps[
            at
        ].abs().sum(), (what, at)
    return value


def run(
    case,
    wrap,
    rank,
    what,
    tolerance=2e-5,
    collect=gradients,
):
    """Train for two updates, and compare every value and gradient with one process."""
    model = fused(case)
    wrapped, sync = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaled)
    want = expected(case.kind, case.tied, case.bias)

    def forward(batch):
        with torch.autocast("cpu", dtype=case.autocast, enabled=case.autocast is not None):
            out = wrapped(batch)
            return call_head(model.lm_head, out, batch, case.kind) if case.outside else out

    for update in range(UPDATES):
        for step in range(STEPS):
            batch, at = DATA[rank, step], (update, rank, step)
            wrapped.eval()
            with torch.no_grad():
                assert not checked(forward(batch), batch, want, at, what, tolerance).requires_grad
            wrapped.train()
            with sync(step == STEPS - 1):
                scaler.scale(checked(forward(batch), batch, want, at, what, tolerance)).backward()
        scaler.unscale_(optimizer)
        assert_close(
            collect(wrapped), want.gradients[update], tolerance, (what, f"update {update}")
        )
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def calls():
    """Ways to call the head, and what runs again in the backward."""
    for kind in ("loss", "log-probs"):
        yield Case(kind)
        for recompute in ("layers", "head", "all"):
            for reentrant in (False, True):
                yield Case(kind, recompute=recompute, reentrant=reentrant)
    yield Case("logits")


def ddp(every=False, **options):
    """every: reduce after every micro-batch, not only after the last."""

    def wrap(model):
        wrapped = torch.nn.parallel.DistributedDataParallel(model, **options)
        return wrapped, lambda last: nullcontext() if last or every else wrapped.no_sync()

    return wrap


def check_ddp(rank, ranks):
    for case in calls():
        run(case, ddp(), rank, ("DDP", case))
        if (
            not case.reentrant
        ):  # such a checkpoint hides its graph from the search for unused parameters
            run(case, ddp(every=True, find_unused_parameters=True), rank, ("DDP, unused", case))
        if not case.recompute:
            run(case, ddp(True, static_graph=True), rank, ("DDP, static graph", case))
    for kind in ("loss", "log-probs"):
        run(Case(kind, tied=True), ddp(), rank, ("DDP, tied", kind))
        run(
            Case(kind, bias=False, outside=True),
            ddp(True, gradient_as_bucket_view=True),
            rank,
            ("DDP, head after the forward", kind),
        )


def fsdp2(layout, every=False, **options):
    """layout: which of the modules besides the layers and the root are groups of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        names = ("replicas", "shards")
        mesh = (
            init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=names)
            if layout == "replicas"
            else init_device_mesh("cpu", (RANKS,))
        )
        shard = functools.partial(fully_shard, mesh=mesh, **options)
        for layer in model.layers:
            shard(layer)
        if layout == "norm and head":  # as accelerate has it
            shard(model.embedding)
            shard([model.norm, model.lm_head])
        elif layout in ("head alone", "replicas"):
            shard(model.lm_head)
        shard(model)
        assert isinstance(model.lm_head, FusedLMHead) and hasattr(
            model.lm_head.weight, "placements"
        )

        def sync(last):
            model.set_requires_gradient_sync(last or every)
            return nullcontext()

        return model, sync

    return wrap


LAYOUTS = ("root", "head alone", "norm and head", "replicas")


def check_fsdp2(rank, ranks):
    from torch.distributed.fsdp import CPUOffloadPolicy

    for layout in LAYOUTS:
        for i, case in enumerate(calls() if layout != "replicas" else (Case(), Case("log-probs"))):
            if layout != "root" and case.recompute and (i + len(layout)) % 2:
                continue  # each of the other layouts with half of what may run again
            # A group whose last module runs again alone frees what the others still need: torch
            # says so, of any head.
            if (layout, case.recompute, case.reentrant) != ("norm and head", "head", True):
                run(case, fsdp2(layout), rank, ("FSDP2", layout, case))
        for reshard in (False, True):
            wrap = fsdp2(layout, every=True, reshard_after_forward=reshard)
            run(
                Case("loss" if reshard else "log-probs"),
                wrap,
                rank,
                ("FSDP2, every step", layout, reshard),
            )
    for kind in ("loss", "log-probs"):
        offload = fsdp2("head alone", offload_policy=CPUOffloadPolicy(pin_memory=False))
        run(Case(kind, bias=False), offload, rank, ("FSDP2, offloaded", kind))
        run(
            Case(kind, tied=True),
            fsdp2("root", reshard_after_forward=True),
            rank,
            ("FSDP2, tied", kind),
        )
        run(
            Case(kind, outside=True),
            fsdp2("head alone"),
            rank,
            ("FSDP2, head after the forward", kind),
        )


def check_mixed_precision(rank, ranks):
    """In bf16 by FSDP2's policy, by autocast, and in fp16 with a loss scale; the errors are those
    of 16 bits.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for kind in ("loss", "log-probs"):
        for layout in LAYOUTS:
            run(
                Case(kind),
                fsdp2(layout, mp_policy=policy),
                rank,
                ("FSDP2 in bf16", layout, kind),
                0.05,
            )
        for wrap in (ddp(), fsdp2("head alone")):
            run(Case(kind, autocast=torch.bfloat16), wrap, rank, ("autocast", kind), 0.05)
            run(
                Case(kind, autocast=torch.float16, scaled=True),
                wrap,
                rank,
                ("fp16, loss scale", kind),
                0.01,
            )

    # The policy that everyone writes casts arguments. Old log-probs must not be among them.
    casting = fsdp2("head alone", mp_policy=replace(policy, cast_forward_inputs=True))
    with pytest.raises(
        ValueError, match=r"advantages is torch\.bfloat16.*cast_forward_inputs=False"
    ):
        casting(fused(Case()))[0](DATA[0, 0])
    rounding, model = (
        fsdp2("head alone", mp_policy=replace(policy, output_dtype=torch.bfloat16)),
        fused(Case()),
    )
    rounding(model)
    with pytest.raises(ValueError, match="output_dtype=None"):
        call_head(model.lm_head, torch.randn(*DATA[0, 0].targets.shape, H), DATA[0, 0], "log-probs")


def check_kin_of_fsdp2(rank, ranks):
    """DDP on FSDP2's machinery, and FSDP1."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    def replicated(model):
        mesh = init_device_mesh("cpu", (RANKS,))
        replicate(model.lm_head, mesh=mesh)
        replicate(model, mesh=mesh)
        return model, lambda last: nullcontext()

    def fsdp1(model):
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu")
        )
        return wrapped, lambda last: nullcontext() if last else wrapped.no_sync()

    def fsdp1_gradients(model):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                name.split("_module.")[-1]: p.grad.clone() for name, p in model.named_parameters()
            }

    for kind in ("loss", "log-probs"):
        run(Case(kind), replicated, rank, ("replicate", kind))
        run(Case(kind), fsdp1, rank, ("FSDP1", kind), collect=fsdp1_gradients)


def check_what_bypasses_the_hooks(rank, ranks):
    """A clear error, not another rank's gradient."""
    batch = DATA[0, 0]
    hidden = torch.randn(*batch.targets.shape, H, generator=torch.Generator().manual_seed(rank))

    def built(**options):
        return fsdp2("head alone", **options)(fused(Case(outside=True)))[0]

    head = built().lm_head
    for weight, bias, name in (
        (head.weight, None, "weight"),
        (head.weight.full_tensor().detach(), head.bias, "bias"),
    ):
        with pytest.raises(ValueError, match=f"{name} is a DTensor"):
            linear_grpo_loss(hidden, Head(weight, bias), batch, OBJECTIVE)
        with pytest.raises(ValueError, match=f"{name} is a DTensor"):
            linear_logprobs(hidden, Head(weight, bias), batch.targets)
    with pytest.raises(ValueError, match="whose weight is a DTensor"):
        FusedLMHead(head.plain())

    # A weight that is gone once its module's forward is over; its shape is still there.
    model, kept = built(reshard_after_forward=True), []
    model.lm_head.register_forward_pre_hook(lambda head, _: kept.append(head.weight))
    out = call_head(model.lm_head, hidden, batch, "log-probs")
    (weight,) = kept
    assert weight.shape == (V, H) and not hasattr(weight, "placements")
    for backend in ("eager", "cpu"):
        with pytest.raises((ValueError, RuntimeError)):
            linear_grpo_loss(hidden, weight, batch, OBJECTIVE, options=Options(backend=backend))
    value_of(out, batch).backward()  # brings it back
    assert model.lm_head.weight.grad is not None


# ---- memory of the caller's for the gradient of the weight


def micro_batch(rank):
    """With sets in every other row."""
    batch = DATA[rank, rank]
    return replace(
        batch,
        kept=TokenSets.from_lists(
            [sorted({i % V, 5, 9}) if i % 2 else [] for i in range(batch.tokens)]
        ),
    )


def check_weight_grad(rank, ranks):
    """With the head left to the caller, by DDP or FSDP2, its memory is reduced once, after two
    micro-batches. Refused where FSDP2 gathers the head, in its own group or in the root's.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def left_out(model):
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["lm_head.weight"]
        )
        return ddp()(model)

    def whole_head(model):
        mesh, ignored = init_device_mesh("cpu", (ranks,)), {model.lm_head.weight}
        return fully_shard(model, mesh=mesh, ignored_params=ignored), lambda last: nullcontext()

    alone = fused(Case(bias=False))
    for each in range(RANKS):
        (2 * alone(micro_batch(each)).loss / RANKS).backward()
    for wrap in (left_out, whole_head, fsdp2("root"), fsdp2("head alone")):
        model, total = fused(Case(bias=False)), torch.zeros(V, H)
        model.options = Options(weight_grad=total)
        wrapped, sync = wrap(model)
        if wrap not in (left_out, whole_head):
            with pytest.raises(ValueError, match="FSDP gathers this weight"):
                wrapped(micro_batch(rank))
            continue
        for last in (False, True):
            with sync(last):
                wrapped(micro_batch(rank)).loss.backward()
        torch.distributed.all_reduce(total)
        assert_close(
            gradients(model) | {"lm_head.weight": total / RANKS}, gradients(alone), 2e-5, wrap
        )


# ---- ZeRO-3


def zero3(rank, store):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    import deepspeed

    deepspeed.init_distributed("gloo")

    def engine_of(model):
        zero = {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
        }
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": STEPS, "zero_optimization": zero,
            "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
        }  # fmt: skip
        # DeepSpeed divides the gradient by the steps.
        optimizer = torch.optim.SGD(model.parameters(), lr=STEPS * RATE)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        assert model.lm_head.weight.shape == (0,)
        return engine

    cases = [case for case in calls() if case.recompute in ("", "head")]
    for case in [
        *cases,
        Case(tied=True),
        Case("log-probs", tied=True),
        Case(outside=True),
        Case("log-probs", outside=True),
    ]:
        model, want = fused(case), expected(case.kind, case.tied, case.bias)
        engine = engine_of(model)
        for update in range(UPDATES):
            for step in range(STEPS):
                batch, at = DATA[rank, step], (update, rank, step)

                def forward(batch=batch, model=model, engine=engine, case=case):
                    out = engine(batch)
                    return call_head(model.lm_head, out, batch, case.kind) if case.outside else out

                engine.eval()
                with torch.no_grad():
                    checked(forward(), batch, want, at, case)
                engine.train()
                engine.backward(checked(forward(), batch, want, at, case))
                if step == STEPS - 1:
                    got = {
                        name: STEPS * deepspeed.utils.safe_get_full_grad(p)
                        for name, p in model.named_parameters()
                    }
                    assert_close(got, want.gradients[update], 2e-5, ("ZeRO-3", case, update))
                engine.step()

    dist.barrier()
    os._exit(0)


# ---- the tests


@pytest.mark.long
def test_on_two_ranks(two, name):
    assert two[name] == "ok", two[name]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_checks("test_head_ranks", RANKS, tmp_path_factory.mktemp("ranks"))


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", checks_of("test_head_ranks"))


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
def test_zero3(tmp_path):
    code = "import sys; from test_head_ranks import zero3; zero3(int(sys.argv[1]), sys.argv[2])"
    environment = {
        "DS_ACCELERATOR": "cpu",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    ranks = (
        start(code, str(r), str(tmp_path / "store"), RANK=str(r), LOCAL_RANK=str(r), **environment)
        for r in range(RANKS)
    )
    finish(*ranks)
