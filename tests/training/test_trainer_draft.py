"""The draft head of the reference trainer: what it learns, against plain float64, that the policy
does not notice it, and that a run with it is resumed.
"""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from benchmarks import results
from benchmarks.tables import marked
from examples import draft_head
from support.runs import PROMPTS, config, lines, noisy, seed, tiny, trainer, weights

RUN = {"steps": 4, "micro_batch": 5, "checkpoint_steps": 1}


def without_draft(metrics):
    """Metrics of steps, without those of the draft head."""
    return [{k: v for k, v in line.items() if not k.startswith("draft")} for line in metrics]


def test_the_policy_is_bitwise_that_of_a_run_without_a_draft(tok, tmp_path):
    """The rewards draw from the random generators that everybody in a process shares."""
    for name, rate in (("without", 0.0), ("with", 0.02)):
        seed(7)
        assert trainer(tok, tmp_path / name, rewards=[noisy], **RUN, draft_lr=rate).train()
    found = lines(tmp_path / "with")
    assert without_draft(found) == lines(tmp_path / "without")
    assert all("draft_acceptance" in line for line in found)
    expected = weights(tmp_path / "without")
    for name, value in weights(tmp_path / "with").items():
        assert torch.equal(value, expected[name]), name
    assert (tmp_path / "with" / "draft.pt").exists()
    assert not (tmp_path / "without" / "draft.pt").exists()


@pytest.mark.parametrize("loss", ["linear", "eager"])
def test_acceptance_rises(tok, tmp_path, loss):
    """At a policy whose learning rate is 0."""
    t = trainer(tok, tmp_path, steps=40, lr=0.0, draft_lr=0.02, loss=loss)
    assert t.train()
    found = lines(tmp_path)
    assert found[-1]["draft_acceptance"] > found[0]["draft_acceptance"] + 0.05
    assert found[-1]["draft_loss"] < found[0]["draft_loss"] - 0.05


def plain_update(t, completions):
    """(loss, acceptance, gradients of the draft) by autograd in float64, position by position."""
    model, head = copy.deepcopy(t.model).double(), copy.deepcopy(t.draft.head).double()
    with torch.no_grad():
        hidden = model.get_decoder()(**completions.inputs, use_cache=False).last_hidden_state
        embeddings = model.get_input_embeddings()(completions.ids[:, 1:])
    weight = model.get_output_embeddings().weight.detach()
    log_p = (head(hidden, embeddings) @ weight.T / t.config.temperature).log_softmax(-1)
    q = (hidden @ weight.T / t.config.temperature).softmax(-1)
    real = completions.attention
    losses, accepted = [], []
    for i, j in (real[:, :-2] & real[:, 1:-1]).nonzero().tolist():
        losses.append(-(q[i, j + 1] * log_p[i, j]).sum())
        accepted.append(torch.minimum(q[i, j + 1], log_p[i, j].exp()).sum())
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, [*head.parameters()])
    return loss.item(), torch.stack(accepted).mean().item(), gradients


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_an_update_is_the_plain_one(tok, tmp_path, micro_batch):
    t = trainer(
        tok,
        tmp_path,
        draft_lr=1.0,
        temperature=0.7,
        micro_batch=micro_batch,
        max_grad_norm=float("inf"),
    )
    prompts = [
        PROMPTS[i] | {"prompt_ids": tok(PROMPTS[i]["prompt"])["input_ids"]} for i in (0, 4, 9)
    ]
    completions = t.rollouts.sample(prompts, 4)
    loss, acceptance, gradients = plain_update(t, completions)
    before = [p.detach().clone() for p in t.draft.head.parameters()]
    t.draft.optimizer = torch.optim.SGD(t.draft.head.parameters(), lr=1.0)
    metrics = t.draft.update(completions)
    assert metrics["draft_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["draft_acceptance"] == pytest.approx(acceptance, rel=1e-5)
    for p, old, gradient in zip(t.draft.head.parameters(), before, gradients, strict=True):
        torch.testing.assert_close((old - p).double(), gradient, rtol=1e-3, atol=1e-5)
    assert all(p.grad is None for p in t.model.parameters())


def test_a_resumed_run_has_the_draft_of_the_whole_run(tok, tmp_path):
    run = {**RUN, "draft_lr": 0.02}
    assert trainer(tok, tmp_path / "whole", **run).train()
    assert trainer(tok, tmp_path / "half", **run | {"steps": 2}).train()
    other = tiny(tok, seed=5)
    assert trainer(tok, tmp_path / "half", model=other, resume=True, **run).train()
    assert lines(tmp_path / "half") == lines(tmp_path / "whole")
    whole, half = (torch.load(tmp_path / name / "draft.pt") for name in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)


def test_the_example_measures_a_draft_that_stops(tmp_path, monkeypatch, capsys):
    """A stopped draft is a copy: it has the acceptance of the other one at the step where it stops,
    and another one later.
    """
    size = draft_head.Size(width=32, layers=1, warm_up=3, steps=6, prompts=2, group=4)
    page = tmp_path / "page.md"
    start, end = marked("draft_head", draft_head.COMMAND)
    page.write_text(f"{start}\n{end}\n")
    for name, path in (("FILE", "x.json"), ("PICTURE", "x.svg"), ("PAGE", page.name)):
        monkeypatch.setattr(draft_head, name, tmp_path / path)
    threads = torch.get_num_threads()
    assert draft_head.main(["--write"], size) == 0
    torch.set_num_threads(threads)
    (record,) = results.load(tmp_path / "x.json")["runs"]
    learning, stopped = record["draft_acceptance"], record["stopped_acceptance"]
    assert len(learning) == 6 and len(stopped) == 3
    assert learning[3] == stopped[0] and learning[4:] != stopped[1:]
    assert f"{learning[0]:.3f}" in page.read_text() and "| seed |" in capsys.readouterr().out
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_the_page_shows_the_record():
    record = results.load(draft_head.FILE)
    assert draft_head.block(record) in draft_head.PAGE.read_text()


def test_a_rate_below_0_is_refused(tmp_path):
    with pytest.raises(ValueError, match="draft_lr=-1"):
        config(tmp_path, draft_lr=-1.0)
