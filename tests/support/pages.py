"""The pages of the documentation:

their links, headings and examples, and the variables for the examples.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
#: Pages with examples.
EXAMPLES = [README, *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))

#: Marks an example that no quick test on a CPU can run, and says what it needs.
NOT_RUN = re.compile(r"<!-- not run: needs (?P<what>.+?) -->\n$")


class Example(NamedTuple):
    page: Path
    line: int
    code: str
    needs: str  # "" if it runs here

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def examples(page: Path) -> list[Example]:
    """The blocks of Python code of a page."""
    text, found = page.read_text(), []
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        before = text[: match.start()]
        marker = NOT_RUN.search(before)
        found.append(
            Example(page, before.count("\n") + 1, match[1], marker["what"] if marker else "")
        )
    return found


def example(part: str) -> str:
    """The only example that contains this text."""
    (found,) = [e.code for page in EXAMPLES for e in examples(page) if part in e.code]
    return found


def without_code(text: str) -> str:
    """The text without blocks of code and inline code, in which brackets are not links."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)}


def slug(heading: str) -> str:
    """Lower case, words joined by hyphens, without punctuation and marks."""
    return re.sub(
        r"[\s]", "-", re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading)).strip().lower()
    )


def tracked(*patterns: str) -> list[Path]:
    """The files of the checkout, including new ones; without a repository, all files."""
    if not (ROOT / ".git").exists():
        return sorted(path for pattern in patterns for path in ROOT.rglob(pattern))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return sorted(ROOT / name for name in listed if (ROOT / name).exists())


# ---- variables for the examples

B, T, V, H = 4, 6, 40, 16


def given() -> dict[str, Any]:
    """The names that docs/functions.md introduces, and those of single examples."""
    from grpo_kernels import LogitTransform, Objective, TokenBatch, TokenSets
    from grpo_kernels.batch import shift_targets

    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    ids = torch.randint(3, V, (B, T), generator=g)
    completion_mask = torch.arange(T) >= torch.tensor([2, 3, 1, 2])[:, None]
    targets, mask = shift_targets(ids, mask=completion_mask)
    lm_head, ref_head = torch.nn.Linear(H, V, bias=False), torch.nn.Linear(H, V, bias=False)
    hidden = normal(B, T, H).requires_grad_()
    logits = normal(B, T, V).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(B, T)
    old_logps, ref_logps = normal(B, T) * 0.1 - 3.6, normal(B, T) * 0.1 - 3.6
    objective = Objective.preset("dapo")
    batch = TokenBatch(targets, advantages, mask=mask, old_logps=old_logps)
    drawn = [
        [sorted({token, (token + 3) % V, 5}) for token in row[m].tolist()]
        for row, m in zip(ids, completion_mask, strict=True)
    ]
    teacher_ids = torch.stack([torch.randperm(V, generator=g)[:5] for _ in range(B * T)])
    return {
        "torch": torch, "ids": ids, "completion_mask": completion_mask, "targets": targets, "mask": mask, "total_tokens": mask.sum(),
        "hidden": hidden, "weight": lm_head.weight, "lm_head": lm_head, "logits": logits, "attention": torch.ones_like(ids),
        "advantages": advantages, "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]), "old_logps": old_logps, "ref_logps": ref_logps,
        "objective": objective, "batch": batch, "micro_batches": [batch], "hidden_of": lambda rows: hidden,
        "transform": LogitTransform(temperature=0.7),
        # A reference, a teacher
        "ref_hidden": normal(B, T, H), "ref_weight": ref_head.weight.detach(), "ref_logits": normal(B, T, V),
        "teacher_hidden": normal(B, T, H), "teacher_weight": ref_head.weight.detach(), "teacher_logits": normal(B, T, V),
        "teacher_transform": LogitTransform(softcap=30.0), "teacher_ids": teacher_ids,
        "teacher_logps": torch.log_softmax(normal(B * T, V), -1).gather(-1, teacher_ids),
        # What samplers record
        "sampling_masks": drawn, "outputs": [SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=row)) for row in drawn],
        "prompt_length": 2, "length": T, "response": TokenSets.from_counts(torch.arange(4), torch.ones(4, dtype=torch.int64)),
        "kept_ids": ids.reshape(-1).to(torch.int32), "counts": torch.ones(B * T, dtype=torch.int64),
    }  # fmt: skip
