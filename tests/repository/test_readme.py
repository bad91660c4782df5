"""Tables, figures and trees in README, docs and the report agree with the code, the result files and the repository."""

from __future__ import annotations

import copy
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cell_tables, crossover, exact_kl_page, front, replay, results, sparse_training_page, swaps, tables
from benchmarks.harness import RESULTS
from benchmarks.suites import SUITES
from grpo_kernels import Objective, TokenBatch, TokenSets, grpo_loss, linear_grpo_loss
from grpo_kernels.batch import shift_targets
from support import sample_results
from support.pages import example

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


@pytest.mark.parametrize("page", tables.blocks(), ids=lambda page: page.name)
def test_generated_blocks_are_current(page: Path) -> None:
    assert tables.updated(page) == page.read_text(), "run `python -m benchmarks.tables --write`"


def test_report_is_current() -> None:
    assert tables.REPORT.read_text() == tables.report(), "run `python -m benchmarks.tables --write`"


def test_figures_of_the_swaps_are_current() -> None:
    assert swaps.insert(swaps.PAGE.read_text(), results.load(swaps.FILE)) == swaps.PAGE.read_text(), (
        "run `python -m benchmarks.swaps --write`"
    )


def test_figures_of_the_crossover_are_current() -> None:
    assert crossover.insert(crossover.PAGE.read_text(), results.load(crossover.FILE)) == crossover.PAGE.read_text(), (
        "run `python -m benchmarks.crossover --write`"
    )


def test_figures_and_picture_of_replay_are_current() -> None:
    record = results.load(replay.FILE)
    assert replay.insert(replay.PAGE.read_text(), record) == replay.PAGE.read_text(), (
        "run `python -m benchmarks.replay --write`"
    )
    assert html.unescape(replay.PICTURE.read_text()).count(replay.described(record)) == 1


def test_figures_and_pictures_of_the_exact_kl_are_current() -> None:
    record, page = results.load(exact_kl_page.FILE), exact_kl_page.PAGE.read_text()
    assert exact_kl_page.insert(page, record) == page, "run `python -m benchmarks.exact_kl --write`"
    for picture, path in exact_kl_page.PICTURES.items():
        assert html.unescape(path.read_text()).count(exact_kl_page.described(record, picture)) == 1


def test_figures_and_picture_of_sparse_training_are_current() -> None:
    record, page = results.load(sparse_training_page.FILE), sparse_training_page.PAGE.read_text()
    assert sparse_training_page.insert(page, record) == page, "run `python -m benchmarks.sparse_training --write`"
    assert html.unescape(sparse_training_page.PICTURE.read_text()).count(sparse_training_page.described(record)) == 1


# ---- examples, and the results that they must equal


def test_the_examples_from_hidden_states_hold_for_a_head_with_a_softcap(mesh: Any) -> None:
    """They give the loss and the gradients of the model's own logits, cut into micro-batches and on a vocabulary shard, too."""
    pytest.importorskip("transformers")
    from support.models import VOCAB, build

    model = build("Gemma2ForCausalLM")
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (4, 9), generator=g)
    completion_mask = torch.arange(9) >= torch.tensor([3, 4, 2, 5])[:, None]
    targets, mask = shift_targets(ids, mask=completion_mask)
    old_logps, ref_logps, advantages = (
        torch.randn(3, *targets.shape, generator=g) - torch.tensor([3.0, 3.0, 0.0])[:, None, None]
    )
    objective = Objective.preset("dapo", beta=0.04)
    batch = TokenBatch(targets, advantages, mask=mask, old_logps=old_logps, ref_logps=ref_logps)

    def gradients(loss: torch.Tensor | None = None) -> list[torch.Tensor]:
        if loss is not None:
            loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    own = grpo_loss(model(ids).logits[:, : targets.shape[1]], batch, objective)
    wanted = gradients(own.loss)
    given = vars() | {
        "total_tokens": mask.sum(), "attention": torch.ones_like(ids), "Objective": Objective, "TokenBatch": TokenBatch,
        "lm_head": model.lm_head, "weight": model.lm_head.weight, "tp_group": mesh.get_group(), "dp_group": mesh.get_group(),
    }  # fmt: skip
    exec(example("loss_from_model"), given)
    torch.testing.assert_close(given["out"].loss, own.loss)
    torch.testing.assert_close(gradients(given["out"].loss), wanted, rtol=1e-3, atol=1e-6)

    def hidden_of(rows: TokenBatch) -> torch.Tensor:
        (at,) = [i for i, other in enumerate(given["micro_batches"]) if other is rows]
        return model.model(input_ids=ids[2 * at : 2 * at + 2]).last_hidden_state[:, : targets.shape[1]]

    halves = [
        TokenBatch(*(x[i : i + 2] for x in (targets, advantages)), mask=mask[i : i + 2], old_logps=old_logps[i : i + 2],
                   ref_logps=ref_logps[i : i + 2]) for i in (0, 2)
    ]  # fmt: skip
    given |= {"micro_batches": [batch], "hidden": model.model(input_ids=ids).last_hidden_state[:, : targets.shape[1]]}
    exec(example("VocabShard.of"), given)
    torch.testing.assert_close(gradients(), wanted, rtol=1e-3, atol=1e-6)
    given |= {"micro_batches": halves, "hidden_of": hidden_of}
    exec(example("for batch in micro_batches"), given)
    torch.testing.assert_close(gradients(), wanted, rtol=1e-3, atol=1e-6)


def test_the_example_of_kept_sets_is_the_loss_over_logits_with_the_others_masked() -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (3, 7), generator=g)
    completion_mask = torch.arange(7) >= torch.tensor([2, 3, 5])[:, None]
    drawn = [row[mask].tolist() for row, mask in zip(ids, completion_mask, strict=True)]
    sampling_masks = [[sorted({token, (token + 3) % 40, 5}) for token in row] for row in drawn]
    hidden, lm_head = torch.randn(3, 7, 8, generator=g, requires_grad=True), torch.nn.Linear(8, 40, bias=False)
    objective, old_logps = Objective.preset("dapo"), torch.randn(3, 7, generator=g) * 0.1 - 1
    given = {
        "shift_targets": shift_targets, "TokenSets": TokenSets, "TokenBatch": TokenBatch, "linear_grpo_loss": linear_grpo_loss,
        "advantages": torch.tensor([1.0, -1.0, 0.5]), "ids": ids, "completion_mask": completion_mask, "objective": objective,
        "sampling_masks": sampling_masks, "hidden": hidden, "lm_head": lm_head, "old_logps": old_logps,
    }  # fmt: skip
    exec(example("sampling_masks"), given)
    found = torch.autograd.grad(given["out"].loss, (hidden, lm_head.weight))
    other = torch.ones(3, 7, 40, dtype=torch.bool)
    for b, masks in enumerate(sampling_masks):
        first = 6 - len(masks)
        for t in range(7):
            other[b, t, masks[t - first] if first <= t < 6 else slice(None)] = False
    targets, generated = shift_targets(ids, mask=completion_mask)
    plain = TokenBatch(targets, given["advantages"], mask=generated, old_logps=old_logps)
    wanted = grpo_loss(lm_head(hidden).masked_fill(other, -torch.inf), plain, objective)
    torch.testing.assert_close(given["out"].loss, wanted.loss)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.loss, (hidden, lm_head.weight)), rtol=1e-4, atol=1e-6)


# ---- tables of made-up figures


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_headline_table(samples: Path) -> None:
    whole = tables.figures(samples, "hidden")
    text, last = whole.rsplit("\n\n| 1,000 x 1,024 x 151,936 |", 1)
    assert "| grpo_kernels |" in last
    assert text.startswith("Sample CPU, 2 threads, avx2, torch 2.0; 2000-01-01; `python -m benchmarks --suite hidden`.")
    lines = {cells_of(line)[0]: cells_of(line)[1:] for line in text.splitlines() if line.startswith("|")}
    head = ["fp32 ms", "x products", "extra MB", "bf16 ms", "x products", "extra MB", "worst error fp32 / bf16"]
    assert lines["256 x 1,024 x 151,936"] == head
    expected = []
    for cell in cell_tables.headline(results.load(samples / "sample-cpu" / "hidden.json"))[0]:
        ours = cell["providers"][0]
        expected += [cell_tables.figure(ours["ms"]), f"{ours['ms'] / cell['limit']['ms']:.2f}", f"{ours['extra_mb']:,.0f}"]
    assert lines["grpo_kernels"] == [*expected, "2e-06 / 2e-06"]
    assert lines["products (limit)"][1] == "1.00"
    assert "eager PyTorch, 16-bit softmax" not in lines  # wrong in bf16, not for fp32
    assert "- wrong, d_logits is off by 2.0e-01, more than 3e-02: eager PyTorch, 16-bit softmax [bf16]" in text
    assert re.search(r"^- skipped, runs on cuda only: .*CCE, filtered .*; .*verl kernel \+ loss(;|$)", text, re.MULTILINE)


def test_two_kinds_of_machine_stand_side_by_side(samples: Path, tmp_path: Path) -> None:
    """The second is four times as fast, and so in every figure but the ratios."""
    shutil.copytree(samples / "sample-cpu", tmp_path / "sample-cpu")
    one = tables.blocks(tmp_path)
    sample_results.write(tmp_path, sample_results.OTHER, faster=4.0)
    both = tables.blocks(tmp_path)
    assert cell_tables.machines(tmp_path, "cpu") == ["other-cpu", "sample-cpu"] and not cell_tables.machines(tmp_path, "cuda")
    text = both[tables.FIGURES]["hidden_cpu"]
    head, _, *lines = (cells_of(line) for line in text.splitlines() if line.startswith("|"))
    assert head[1:13:3] == ["other-cpu fp32 ms", "other-cpu bf16 ms", "sample-cpu fp32 ms", "sample-cpu bf16 ms"]
    assert head[2:13:3] == ["x products"] * 4
    ours = next(line for line in lines if line[0] == "grpo_kernels")
    cells = cell_tables.headline(results.load(tmp_path / "sample-cpu" / "hidden.json"))[0]
    expected = [cell["providers"][0]["ms"] / by for by in (4, 1) for cell in cells]
    assert ours[1:13:3] == [cell_tables.figure(ms) for ms in expected] and ours[2] == ours[8]
    assert (
        "wrong, d_logits is off by 2.0e-01, more than 3e-02: eager PyTorch, 16-bit softmax [other-cpu bf16, sample-cpu bf16]"
        in text
    )
    sources = [line.partition(", 2 threads")[0] for line in text.splitlines() if "; `python" in line]
    assert sources == ["Other CPU", "Sample CPU"]
    front_lines = [cells_of(line) for line in both[README]["front"].splitlines() if line.startswith("|")][2:]
    assert [line[0].split(":")[0] for line in front_lines] == [
        f"{name}, 2 threads, {isa}, {which}"
        for name, isa in (("Sample CPU", "avx2"), ("Other CPU", "avx512, products by amx")) for which in ("strongest", "weakest")
    ]  # fmt: skip
    alone = [cells_of(line) for line in one[README]["front"].splitlines() if line.startswith("|")][2:]
    assert alone == front_lines[:2] and [line[-1] for line in alone] == [line[-1] for line in front_lines[2:]]
    for suite in ("divergences_cpu", "logits_divergence_cpu"):
        shown = both[tables.DIVERGENCES][suite]
        assert "Other CPU" in shown and "Sample CPU" in shown and "Other CPU" not in one[tables.DIVERGENCES][suite]
    assert all(f"## {kind}\n" in tables.report(tmp_path) for kind in ("other-cpu", "sample-cpu"))


def test_a_promise_is_broken_by_what_a_user_of_pytorch_would_have_sooner(samples: Path, tmp_path: Path) -> None:
    """Only by that: not by another project, not below 64 rows, not by what is wrong, not by our own eager backend."""
    assert front.promise(samples, "sample-cpu")[0]
    path = tmp_path / "sample-cpu" / "hidden.json"

    def said(changes: dict[str, float], rows: int = 64, **wrong: str) -> tuple[bool, str]:
        """The promise of one cell, whose providers take so many times the fastest of ours."""
        record = results.load(samples / "sample-cpu" / "hidden.json")
        cell = record["cells"][0] | {"rows": rows}
        ms = next(row["ms"] for row in cell["providers"] if row["name"] == "grpo_kernels")
        for row in cell["providers"]:
            row |= ({"ms": changes[row["name"]] * ms} if row["name"] in changes else {}) | (
                wrong if row["name"] in changes else {}
            )
        results.save(path, record | {"cells": [cell]})
        return front.promise(tmp_path, "sample-cpu")

    kept, text = said({"eager PyTorch": 0.96})
    assert kept and "none of 1 cells of 64 rows or more on sample-cpu" in text
    for name in ("eager PyTorch", "torch.compile", "torch linear_cross_entropy + loss"):
        kept, text = said({name: 0.5})
        assert not kept and "1 of 1 cells" in text and f"{name} " in text and "2.00 times as long" in text
        assert "GRPO_KERNELS_PRODUCTS" in text and "doctor" in text
    assert said({"TRL fused head + loss": 0.5})[0]
    assert said({"eager PyTorch": 0.5}, status="wrong", reason="off")[0]
    assert not said({"eager PyTorch": 0.5, "grpo_kernels, eager backend": 0.4})[0]
    assert said({"eager PyTorch": 0.5, "grpo_kernels, layer 1 + loss": 0.5})[0]
    kept, text = said({"eager PyTorch": 0.5}, rows=48)
    assert kept and "none of 0 cells" in text


@pytest.mark.parametrize("machine", cell_tables.machines(RESULTS))
def test_the_promise_is_kept_on_every_machine_that_was_measured(machine: str) -> None:
    kept, text = front.promise(RESULTS, machine)
    assert kept and "none of 0" not in text, text


def test_report_has_every_suite_and_names_everybody(samples: Path) -> None:
    parts = re.split(r"^## ", tables.report(samples), flags=re.MULTILINE)[1:]
    assert [part.splitlines()[0] for part in parts] == list(sample_results.MACHINES)
    for part, machine in zip(parts, sample_results.MACHINES, strict=True):
        sections = re.split(r"^### ", part, flags=re.MULTILINE)[1:]
        for section, (name, suite) in zip(sections, SUITES.items(), strict=True):
            assert section.startswith(suite.title)
            for cell in results.load(samples / machine / f"{name}.json")["cells"]:
                for row in cell["providers"]:
                    assert row["name"] in section
                    if row["status"] == "ok":
                        assert f"| {cell_tables.figure(row['ms'])} " in section
                    else:
                        assert f"- {row['status']}, {row['reason']}: " in section


def test_sweep_table_names_missing_contenders(samples: Path) -> None:
    text = cell_tables.sweep(results.load(samples / "sample-cpu" / "length.json"))
    assert (
        "| ms (x limit) by tokens in the batch (one sequence from 65,536 on), fp32, H = 128, V = 32,768 | 4,096 | 16,384 | 65,536 |"
        in text
    )
    eager = [cells_of(line) for line in text.splitlines() if line.startswith("| eager PyTorch")]
    assert [line[-1] for line in eager] == ["skipped", "skipped"]
    assert text.endswith("- skipped, would need 80 GB, 60 GB are free: eager PyTorch [65,536]")


def test_a_step_is_compared_with_eager(samples: Path) -> None:
    (cell,) = results.load(samples / "sample-cpu" / "step.json")["cells"]
    lines = [cells_of(line) for line in cell_tables.details(cell).splitlines()]
    assert lines[0][5] == "x eager PyTorch" and "% of limit" not in lines[0]
    assert next(line for line in lines if line[0] == "eager PyTorch")[5] == "1.00"


def test_what_is_not_measured_names_its_command(tmp_path: Path) -> None:
    blocks = tables.blocks(tmp_path)[tables.FIGURES]
    for suite in ("logits", "hidden"):
        assert blocks[f"{suite}_cpu"] == f"Not measured yet: `python -m benchmarks --suite {suite}`."
    assert "No GPU has run this package yet" in blocks["gpus"] and "benchmarks.gpu_kit" in blocks["gpus"]
    report = tables.report(tmp_path)
    assert all(f"`python -m benchmarks --suite {name}`" in report for name in SUITES)
    assert tables.gpus(tmp_path, tables.REPORT) in report
    assert tables.blocks(tmp_path)[README]["front"] == "Not measured yet: `python -m benchmarks`."


def test_gpus_are_shown_once_measured(samples: Path) -> None:
    text = tables.gpus(samples)
    assert "Sample GPU" in text and "Sample CPU" not in text and "No GPU" not in text
    assert text.count("| grpo_kernels") >= 2


def test_what_a_limit_is_the_sum_of_is_shown(samples: Path) -> None:
    cell = results.load(samples / "sample-cpu" / "hidden.json")["cells"][0]
    assert (
        "products (limit), ms: logits 1 by torch.mm (oneDNN 2, ours 3, ours in chunks 4); d_hidden 1 by torch.mm ("
        in cell_tables.details(cell)
    )


def test_two_kinds_of_runs_are_both_shown() -> None:
    row = {"name": "ours", "ms": 39.0, "modes": [[15.04, 0.4], [39.0, 0.6]]}
    assert cell_tables.milliseconds(row) == "15.0 (40%) or 39.0 (60%)"
    assert cell_tables.milliseconds({"ms": 39.0}) == "39.0"


def test_figures_have_three_significant_digits() -> None:
    shown = {0.01234: "0.0123", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 12345.6: "12,346", 0.0: "0", None: ""}
    assert {x: cell_tables.figure(x) for x in shown} == shown


def test_the_command_writes_pages_and_the_report(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {*tables.blocks(samples), tables.REPORT}
    named = {name: value for name, value in vars(tables).items() if isinstance(value, Path) and value in pages}
    assert set(named.values()) == pages  # every page that is written is replaced by a copy here
    for name, page in named.items():
        copy = tmp_path / page.name
        copy.write_text(page.read_text())
        monkeypatch.setattr(tables, name, copy)
    tables.main(["--write", "--results", str(samples)])
    assert "Sample CPU" in tables.FIGURES.read_text() and tables.REPORT.read_text() == tables.report(samples)
    assert "Sample GPU" in tables.README.read_text()  # users' hardware first
    tables.FIGURES.write_text(tables.FIGURES.read_text().replace("<!-- end of gpus -->", ""))
    with pytest.raises(SystemExit, match=r"benchmarks\.md lacks the markers of gpus"):
        tables.main(["--write", "--results", str(samples)])


def test_the_front_shows_the_strongest_and_the_weakest_cell(samples: Path) -> None:
    """Found again from the result files, without the rule's code."""
    ratios = []
    for path in (samples / "sample-cpu").glob("*.json"):
        for cell in results.load(path)["cells"] if path.stem not in ("kept", "sparse") else ():
            right = [r for r in cell["providers"] if r["status"] == "ok" and "limit" not in r["name"] and not r.get("limit")]
            ours, others = ([r["ms"] for r in right if r["name"].startswith("grpo_kernels") == own] for own in (True, False))
            if ours and others:
                ratios.append(min(others) / min(ours))
    (strongest, weakest) = (standing.ratio for _, standing in front.extremes(samples, "sample-cpu"))
    assert (strongest, weakest) == (max(ratios), min(ratios)) and strongest > weakest
    lines = [cells_of(line)[-1] for line in front.table(samples, ["sample-cpu"]).splitlines()[2:]]
    assert lines == [f"x {strongest:.2f}", f"x {weakest:.2f}"]


def test_the_front_leaves_out_few_rows_and_what_was_not_checked(samples: Path, tmp_path: Path) -> None:
    before = [standing.ratio for _, standing in front.extremes(samples, "sample-cpu")]
    shutil.copytree(samples / "sample-cpu", tmp_path / "sample-cpu")
    path = tmp_path / "sample-cpu" / "hidden.json"
    record = results.load(path)
    cell = copy.deepcopy(record["cells"][0])
    ours = next(row for row in cell["providers"] if row["name"].startswith("grpo_kernels"))
    cell["providers"] += [{"name": "grpo_kernels, more", "status": "ok", "ms": ours["ms"] / 1000, "x_limit": 1.0}]
    few = copy.deepcopy(cell) | {"rows": 16}
    for row in few["providers"]:
        row |= {"ms": 1000 * ours["ms"]} if "errors" in row and not row["name"].startswith("grpo_kernels") else {}
    path.write_text(json.dumps(record | {"cells": [*record["cells"], cell, few]}))
    assert [standing.ratio for _, standing in front.extremes(tmp_path, "sample-cpu")] == before


# ---- the tree


def tree(page: Path) -> list[str]:
    """Paths of a page's annotated tree, folders with a trailing slash."""
    (block,) = re.findall(r"```\n\.\n(.*?)```", page.read_text(), re.DOTALL)
    paths, folders = [], []  # type: list[str], list[tuple[int, str]]
    for line in block.splitlines():
        indent, names = re.match(r"( *)(.*?)(?:  +.*)?$", line).groups()  # type: ignore[union-attr]
        folders = [f for f in folders if f[0] < len(indent)]
        parent = folders[-1][1] if folders else ""
        for name in names.split():
            paths.append(parent + name)
            if name.endswith("/"):
                folders.append((len(indent), parent + name))
    return paths


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("page", [README, ARCHITECTURE], ids=lambda page: page.name)
def test_every_path_of_the_tree_exists(page: Path) -> None:
    missing = [p for p in tree(page) if not (ROOT / p).exists()]
    assert not missing


def test_every_source_file_is_in_the_tree_of_the_architecture() -> None:
    known = tree(ARCHITECTURE)
    # A folder that the tree does not open stands for what is in it.
    closed = [p for p in known if p.endswith("/") and not any(q != p and q.startswith(p) for q in known)]
    absent = [
        f
        for f in tracked()
        if f not in known and not f.startswith(tuple(closed)) and not f.endswith(("__init__.py", ".gitignore"))
    ]
    assert not absent


def test_the_tree_of_the_readme_has_every_folder() -> None:
    parts = [Path(f).parent.parts for f in tracked()]
    folders = {f"{p[0]}/" for p in parts if p} | {f"{p[0]}/{p[1]}/" for p in parts if p[:1] == ("grpo_kernels",) and p[1:]}
    assert not {f for f in folders if not f.startswith(".")} - {*tree(README)}
