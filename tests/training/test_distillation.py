"""The trainer with an exact divergence to its reference, and with a teacher in the place of the reference."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import transformers

from grpo_kernels import Exact
from grpo_kernels.training.losses import Losses
from grpo_kernels.training.output import OutputFolder
from grpo_kernels.training.sampling import completion_logits
from grpo_kernels.training.trainer import Trainer
from support.runs import PROMPTS, config, evens, lines, parameters, tiny, trainer


def distilled(tok: Any, out: Path, given: Any, **changes: Any) -> Trainer:
    settings = config(out, **{"preset": "distillation", **changes})
    rows = (PROMPTS[:16], PROMPTS[16:])
    return Trainer(settings, model=tiny(tok), tokenizer=tok, rows=rows, rewards=[evens], teacher=given)


@pytest.mark.parametrize("kl", ["exact", "exact-jsd"])
def test_an_update_is_the_same_from_hidden_states_and_from_logits(tok: Any, tmp_path: Path, kl: str) -> None:
    updated, reported = [], []
    for loss in ("linear", "logits", "eager"):
        t = trainer(tok, tmp_path / loss, preset="dapo", beta=0.5, kl=kl, loss=loss, num_updates=2)
        assert t.objective.exact == {"exact": Exact(), "exact-jsd": Exact("jsd")}[kl]
        reported.append([t.train_step() for _ in range(2)])
        updated.append(parameters(t))
    for metrics in zip(*reported, strict=True):
        for name in ("kl", "grad_norm", "entropy"):
            values = [m[name] for m in metrics]
            assert values == pytest.approx([values[0]] * 3, rel=2e-3, abs=1e-7), name
    assert all(m["kl"] > 0 for m in reported[0])  # of the second update on a batch, which has left the reference
    for other in updated[1:]:
        for name, p in updated[0].items():
            torch.testing.assert_close(
                other[name], p, rtol=0, atol=3e-3
            )  # AdamW moves by lr where a gradient is of rounding size


def softcapped(tok: Any) -> Any:
    torch.manual_seed(5)
    settings = dict(
        vocab_size=len(tok), hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.5, final_logit_softcapping=1.5,
        eos_token_id=tok.eos_token_id, pad_token_id=tok.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**settings))


def seeing(text: Any) -> Any:
    """A model of images and text with this one as its language model: vocabulary and softcap stand in the config of its text."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "projection_dim": 16}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=4, patch_size=2)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text.config, vision_config=vision, image_token_index=0, pad_token_id=0)
    )
    model.get_decoder().load_state_dict(text.get_decoder().state_dict())
    model.get_output_embeddings().load_state_dict(text.get_output_embeddings().state_dict())
    return model


def test_a_teacher_that_also_sees(tok: Any, tmp_path: Path) -> None:
    for loss in ("linear", "logits"):
        runs = [
            distilled(tok, tmp_path / f"{loss}{i}", given, loss=loss).train_step()["kl"]
            for i, given in enumerate((tiny(tok, seed=5), seeing(tiny(tok, seed=5))))
        ]
        assert runs[0] == pytest.approx(runs[1], rel=1e-6) and runs[0] > 0.01
    with pytest.raises(ValueError, match=f"the teacher has a vocabulary of {len(tok) + 1}, the model of {len(tok)}"):
        distilled(tok, tmp_path / "refused", seeing(tiny(tok, vocab_size=len(tok) + 1)))


@pytest.mark.parametrize("loss", ["linear", "logits"])
@pytest.mark.parametrize("capped", [False, True])
def test_the_divergence_is_that_of_the_two_models(tok: Any, tmp_path: Path, capped: bool, loss: str) -> None:
    teacher = softcapped(tok) if capped else tiny(tok, seed=5, hidden_size=48)
    t = distilled(tok, tmp_path, teacher, temperature=0.7, loss=loss)
    seen: list[Any] = []
    loss = Losses.loss

    def watched(self: Losses, model: Any, completions: Any, *rest: Any) -> Any:
        with torch.no_grad():
            p, q = (torch.log_softmax(completion_logits(m, completions) / 0.7, -1).double() for m in (model, teacher))
        out = loss(self, model, completions, *rest)
        seen.append((float(out.loss.detach()), (p.exp() * (p - q)).sum(-1)[completions.mask].mean()))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Losses, "loss", watched)
        t.train_step()
    ((found, expected),) = seen
    assert found == pytest.approx(float(expected), rel=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "reverse": {"kl": "exact", "temperature": 0.7},
    "forward, pieces": {"kl": "exact-forward", "micro_batch": 5},
    "jsd, sets": {"kl": "exact-jsd", "top_k": 5, "micro_batch": 7},
    "reverse, sets, entropy of all": {"kl": "exact", "top_p": 0.8, "temperature": 1.3, "entropy_over": "vocabulary"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", ["linear", "logits", "eager"])
def test_the_gradient_of_a_batch_is_that_of_float64(tok: Any, tmp_path: Path, loss: str, case: str) -> None:
    """Prompts and completions of several lengths, one of them without a token, cut into uneven pieces, and two updates of them."""
    options = {"preset": "dapo", "beta": 0.5, "num_updates": 2, "lr": 0.0, "loss": loss, **CASES[case]}
    teacher = tiny(tok, seed=5, hidden_size=48)
    t = trainer(tok, tmp_path, teacher=teacher, **options)
    rows = [{**t.train_rows[i], "prompt_ids": t.train_rows[i]["prompt_ids"] * (1 + i)} for i in range(3)]
    c = t.config
    completions = t.sample(rows, c.group_size, c.temperature, c.top_p, c.top_k, c.min_p, torch.Generator().manual_seed(3))
    attention = completions.attention.clone()
    lengths = torch.tensor([4, 1, 3, 0] * 3)[:, None]
    attention[:, completions.prompt_width :] &= torch.arange(4) < lengths
    completions, advantages = dataclasses.replace(completions, attention=attention), torch.linspace(-1.0, 2.0, 12)

    student = copy.deepcopy(t.model).double()
    z, w = (completion_logits(m, completions) / c.temperature for m in (student, copy.deepcopy(teacher).double()))
    if completions.kept is not None:
        outside = ~completions.kept.mask(z.shape[-1]).view(z.shape)
        z, w = z.masked_fill(outside, -1e4), w.masked_fill(outside, -1e4)
    p, q = z.log_softmax(-1), w.detach().log_softmax(-1)
    m = torch.logaddexp(p, q) - math.log(2.0)
    kl = {
        "exact": p.exp() * (p - q),
        "exact-forward": q.exp() * (q - p),
        "exact-jsd": 0.5 * (p.exp() * (p - m) + q.exp() * (q - m)),
    }[c.kl].sum(-1)
    logps = p.gather(-1, completions.targets[..., None])[..., 0]
    terms = -advantages[:, None] * (logps - logps.detach()).exp() + 0.5 * kl
    mask = completions.mask
    (terms[mask].sum() / mask.sum()).backward()

    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        move = t.move

        def watched(lr: float) -> Any:
            found.append({name: p.grad.clone() for name, p in t.model.named_parameters()})
            return move(lr)

        patch.setattr(t, "move", watched)
        metrics = t.update(completions, advantages)
    assert len(found) == 2 and metrics["kl"] == pytest.approx(float(kl[mask].detach().mean()), rel=1e-5)
    for gradients in found:
        for name, parameter in student.named_parameters():
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-4, (name, float(error))


def test_a_student_becomes_its_teacher(tok: Any, tmp_path: Path) -> None:
    distilled(tok, tmp_path, tiny(tok, seed=5), steps=40, lr=1e-2).train()
    kl = [line["kl"] for line in lines(tmp_path)]
    assert kl[-1] < 0.3 * kl[0]


def test_a_teacher_by_its_path(tok: Any, tmp_path: Path) -> None:
    tiny(tok, seed=5).save_pretrained(tmp_path / "teacher")
    t = distilled(tok, tmp_path / "run", None, teacher=str(tmp_path / "teacher"), steps=1)
    given = distilled(tok, tmp_path / "given", tiny(tok, seed=5), steps=1)
    assert t.train_step()["kl"] == given.train_step()["kl"]


def test_what_does_not_go_together_is_refused(tok: Any, tmp_path: Path) -> None:
    for changes, teacher, message in (
        ({}, None, "preset='distillation': it learns from a teacher: name one"),
        ({"preset": "sampled_distillation"}, None, "preset='sampled_distillation': it learns from a teacher: name one"),
        ({"teacher": "a/b"}, tiny(tok), "teacher='a/b', but a model is passed as well"),
        ({"beta": 0.0}, tiny(tok), "at beta=0 nothing looks at it"),
        ({"ref_refresh_steps": 3}, tiny(tok), "set beta above 0 and ref_refresh_steps to 0"),
        ({"parallel": "fsdp2"}, tiny(tok), "use parallel='ddp'"),
        ({}, tiny(tok, vocab_size=len(tok) + 1), "the teacher has a vocabulary of"),
        ({"teacher": str(tmp_path / "nowhere")}, None, "there is no such file or folder"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            distilled(tok, tmp_path / "refused", teacher, **changes)


def test_a_teacher_is_another_model_and_a_kl_has_a_weight(tok: Any, tmp_path: Path) -> None:
    model = tiny(tok)
    with pytest.raises(ValueError, match=r"teacher shares parameters with model.*copy.deepcopy"):
        trainer(tok, tmp_path, model=model, teacher=model, preset="distillation")
    assert all(p.requires_grad for p in model.parameters())
    for kl in ("exact", "k3"):
        with pytest.raises(ValueError, match=rf"kl='{kl}': its weight is 0 in preset='grpo': set beta as well"):
            config(tmp_path, kl=kl)
        assert config(tmp_path, kl=kl, beta=0.0).objective.beta == 0


def test_a_teacher_larger_than_its_student_counts_in_the_space_of_a_checkpoint(
    tok: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(OutputFolder, "check_space", lambda self, needed: asked.append(needed))
    teachers = [tiny(tok, seed=5, hidden_size=size) for size in (32, 128)]
    for i, teacher in enumerate(teachers):
        distilled(tok, tmp_path / str(i), teacher, keep_checkpoints=2)
    bytes_of = [sum(p.numel() * p.element_size() for p in teacher.parameters()) for teacher in teachers]
    assert asked[1] - asked[0] == 3 * (bytes_of[1] - bytes_of[0]) > 0  # two checkpoints, and a third before one goes
