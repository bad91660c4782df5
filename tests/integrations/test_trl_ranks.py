"""Two processes, each with data of its own, on gloo: DDP and FSDP2 (`fully_shard`) with TRL's
trainer and our loss in it.

Gradients are compared with those of TRL's own loss in one process on the whole batch. (accelerate's
FSDP on a CPU silently becomes DDP: modules are sharded here by `fully_shard` itself.)
"""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl", minversion="1.16.0")

from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer, fused_lm_head, patch
from support import trl_cases
from support.heads import gradients
from support.processes import finish, start_ranks

RANKS, SEQUENCES = 2, 8

#: One optimiser step in two micro-batches a rank; the entropies of a quantile are those of a
#: micro-batch, so it has one.
STEPS = {
    "dapo": {"loss_type": "dapo", "beta": 0.1, "entropy_coef": 0.0},
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "quantile": {"loss_type": "dapo", "top_entropy_quantile": 0.3, "accumulation": 1},
}
LAYOUTS = ("ddp", "tied", "norm and head", "head alone")
RUN = {
    "num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.1, "epsilon": 0.1, "steps": 4, "top_entropy_quantile": 0.3,
    "entropy_coef": 0.05,
}  # fmt: skip


def step_inputs():
    """Eight sequences of unequal length.

    The second micro-batch of rank 0 is the longest, the first of rank 1 fully masked.
    """
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 40, (SEQUENCES, trl_cases.LENGTH), generator=g)
    return {
        "prompt_ids": torch.randint(2, 40, (SEQUENCES, 3), generator=g), "prompt_mask": torch.ones(SEQUENCES, 3, dtype=torch.long),
        "completion_ids": ids, "advantages": torch.tensor([1.2, 0.8, -0.7, 0.0, -1.1, 0.6, 0.9, -0.4]),
        "completion_mask": (torch.arange(trl_cases.LENGTH) < torch.tensor([5, 9, 12, 12, 0, 0, 3, 7])[:, None]).long(),
        "old_per_token_logps": -3.5 + 0.3 * torch.randn(ids.shape, generator=g),
        "ref_per_token_logps": -3.5 + 0.3 * torch.randn(ids.shape, generator=g),
    }  # fmt: skip


def step_trainer(folder, name, options, accumulation):
    settings = {key: value for key, value in options.items() if key != "accumulation"}
    steps = {"gradient_accumulation_steps": accumulation, "steps_per_generation": accumulation}
    trainer = trl_cases.make_trainer(str(folder / name), folder / "out", **steps, **settings)
    trainer.current_gradient_accumulation_steps = accumulation  # which its training loop would set
    trainer.model.train()
    return trainer


def accumulate(trainer, model, rank, ranks, sync):
    """The sum of this rank's losses, after their backwards."""
    accumulation, inputs, total = trainer.current_gradient_accumulation_steps, step_inputs(), 0.0
    rows = SEQUENCES // ranks // accumulation
    for micro in range(accumulation):
        first = (rank * accumulation + micro) * rows
        part = {name: x[first : first + rows] for name, x in inputs.items()}
        with sync(micro == accumulation - 1):
            loss = trainer._compute_loss(
                model, part | {"num_items_in_batch": inputs["completion_mask"].sum()}
            )
            loss.backward()
        total += float(loss.detach())
    return total


# ---- in the two processes


def wrapped(model, layout):
    """The model of a layout, and what switches its reduction of gradients on for the last
    micro-batch.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if layout == "ddp":
        ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        return ddp, lambda last: nullcontext() if last else ddp.no_sync()
    mesh = init_device_mesh("cpu", (RANKS,))
    parts = [*model.model.layers]
    if layout == "norm and head":  # as accelerate has it
        parts += [model.model.embed_tokens, [model.model.norm, model.lm_head]]
    for part in [*parts, *([model.lm_head] if layout == "head alone" else []), model]:
        fully_shard(part, mesh=mesh)

    def sync(last):
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return model, sync


def off(model, want):
    """The largest error of each gradient, relative to its largest element."""
    got = gradients(model)
    assert got.keys() == want.keys()
    return {
        name: float((got[name] - want[name]).abs().max() / want[name].abs().max()) for name in want
    }


def alike_on_ranks(value):
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found[0] == found[1]


def check_gradients(folder, rank):
    """On both ranks, in all parameters, over two micro-batches, one of which has no tokens on one
    rank.
    """
    for layout in LAYOUTS:
        for name in STEPS if layout == "ddp" else ["dapo"]:
            options, model_name = STEPS[name], "tied" if layout == "tied" else "untied"
            want_loss, want = torch.load(folder / f"{name} {model_name}.pt")
            trainer = step_trainer(folder, model_name, options, options.get("accumulation", 2))
            fused = patch(trainer, strict=True)
            model, sync = wrapped(trainer.model, layout)
            loss = torch.tensor(accumulate(trainer, model, rank, RANKS, sync))
            dist.all_reduce(loss)
            assert max(off(model, want).values()) < 2e-5, (name, layout)
            assert fused.counts == {"fused": trainer.current_gradient_accumulation_steps}
            assert float(loss) / RANKS == pytest.approx(want_loss, rel=1e-5, abs=1e-6)
            assert type(next(trainer.model.parameters())).__name__ == (
                "Parameter" if layout == "ddp" else "DTensor"
            )
            assert alike_on_ranks(
                {n: float(g.double().abs().sum()) for n, g in gradients(model).items()}
            )


def check_slot(folder, rank):
    """TRL's own loss with a head that is wrapped alone. TRL's defect: it takes the gradient of the
    gathered head for the same on all ranks, and each keeps its own data's for its shard. Ours in
    its slot makes it the mean.
    """
    for name, context in (("TRL's", nullcontext), ("ours", lambda: fused_lm_head(strict=True))):
        with context():
            trainer = step_trainer(folder, "untied", STEPS["dapo"], 2)
            model, sync = wrapped(trainer.model, "head alone")
            accumulate(trainer, model, rank, RANKS, sync)
        errors = off(model, torch.load(folder / "dapo untied.pt")[1])
        assert errors["lm_head.weight"] > 0.1 if name == "TRL's" else max(errors.values()) < 2e-5


def check_runs(folder, rank):
    """Whole runs under accelerate's DDP; each rank samples answers to prompts of its own, and the
    ranks stay together.
    """
    trained = []
    for cls, keywords in ((GRPOTrainer, {}), (FusedGRPOTrainer, {"strict": True})):
        trained.append(
            trl_cases.make_trainer(
                str(folder / "tied"), folder / "out", cls, keywords=keywords, **RUN
            )
        )
        trained[-1].train()
    theirs, ours = trained
    logged, counts = trl_cases.history(ours), ours.fused_loss.counts
    trl_cases.assert_same_history(logged, trl_cases.history(theirs), 2e-4)
    assert (
        len([h for h in logged if "grad_norm" in h]) == RUN["steps"]
        and logged[0]["grad_norm"] > 1e-2
    )
    assert counts["fused"] == RUN["steps"] * 2 and {*counts} <= {"fused", "scored"}
    assert type(ours.model_wrapped).__name__ == "DistributedDataParallel"
    assert alike_on_ranks([float(p.double().abs().sum()) for p in ours.model.parameters()])
    assert not alike_on_ranks(ours._buffered_inputs[0]["completion_ids"][:, 0].tolist())


def main(rank, path):
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ["MASTER_ADDR"] = (
        "127.0.0.1"  # accelerate asks for it, and then takes the group that is there
    )
    torch.set_num_threads(1)
    folder = Path(path)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )  # which accelerate uses
    gc.freeze()  # accelerate collects garbage before every training
    for check in (check_runs, check_gradients, check_slot):
        check(folder, rank)
    dist.barrier()


# ---- the test


@pytest.mark.long
def test_two_ranks(tmp_path):
    for name, tied in (("tied", True), ("untied", False)):
        trl_cases.save_model(tmp_path / name, tie_word_embeddings=tied)
        for step, options in STEPS.items():  # TRL's own loss, one process, the whole batch
            if name == "untied" or step == "dapo":
                trainer = step_trainer(tmp_path, name, options, 1)
                loss = accumulate(trainer, trainer.model, 0, 1, lambda _: nullcontext())
                torch.save((loss, gradients(trainer.model)), tmp_path / f"{step} {name}.pt")
    finish(start_ranks(RANKS, main, str(tmp_path)))
