"""Read the pages of the documentation: links, headings, examples, and variables for examples."""

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
    """A block of Python code of a page."""

    page: Path
    line: int  # of the page
    code: str
    needs: str  # what it needs that a test on a CPU does not have, "" for nothing

    @property
    def name(self) -> str:
        """Where the example is, as PATH:LINE."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def examples(page: Path) -> list[Example]:
    """Return the blocks of Python code of a Markdown page, in their order."""
    text = page.read_text()
    blocks = []
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        before = text[: match.start()]
        marker = NOT_RUN.search(before)
        needs = marker["what"] if marker else ""
        blocks.append(Example(page, before.count("\n") + 1, match[1], needs))
    return blocks


def example(part: str) -> str:
    """Return the code of the only example on the pages EXAMPLES that contains the text `part`."""
    (code,) = [x.code for page in EXAMPLES for x in examples(page) if part in x.code]
    return code


def without_code(text: str) -> str:
    """Return the Markdown text without code, in which brackets are not links.

    Code is a block between lines of three backticks, or inline between two backticks.
    """
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", without_blocks)


def links(page: Path) -> list[str]:
    """Return the targets of all Markdown links of a page, such as "../README.md#install"."""
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and Python-Markdown make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)}


def slug(heading: str) -> str:
    """Return the anchor of a heading: lower case, without punctuation, "-" for each space."""
    text = re.sub(r"[`*]", "", heading)
    text = re.sub(r"[^\w\s-]", "", text)
    return re.sub(r"[\s]", "-", text.strip().lower())


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the checkout that match a pattern, with new files that are not ignored.

    patterns   of git, such as "*.py"; a file matches if one of them does

    Outside of a git repository, all files that match are returned.
    """
    if not (ROOT / ".git").exists():
        return sorted(path for pattern in patterns for path in ROOT.rglob(pattern))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in git.stdout.split()]
    return sorted(path for path in paths if path.exists())  # git also lists deleted files


# ---- variables for the examples

#: Sequences, tokens of a sequence, size of the vocabulary, and width of hidden states.
B = 4
T = 6
V = 40
H = 16


def given() -> dict[str, Any]:
    """Return {name: value} of the variables that examples on the pages use without defining them.

    docs/functions.md introduces most of them. Random values are the same in each call, except the
    weights of `lm_head` and of the reference and teacher heads.
    """
    from grpo_kernels import LogitTransform, Objective, TokenBatch, TokenSets
    from grpo_kernels.batch import shift_targets

    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        """Draw normal numbers of a shape, fp32."""
        return torch.randn(*shape, generator=g)

    ids = torch.randint(3, V, (B, T), generator=g)
    completion_mask = torch.arange(T) >= torch.tensor([2, 3, 1, 2])[:, None]
    targets, mask = shift_targets(ids, mask=completion_mask)
    lm_head = torch.nn.Linear(H, V, bias=False)
    ref_head = torch.nn.Linear(H, V, bias=False)
    hidden = normal(B, T, H).requires_grad_()
    logits = normal(B, T, V).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(B, T)
    # Near -log(V), the log-prob of a uniform distribution.
    old_logps = normal(B, T) * 0.1 - 3.6
    ref_logps = normal(B, T) * 0.1 - 3.6
    objective = Objective.preset("dapo")
    batch = TokenBatch(targets, advantages, mask=mask, old_logps=old_logps)
    # The candidate set of each token of a completion.
    sampling_masks = [
        [sorted({token, (token + 3) % V, 5}) for token in row[row_mask].tolist()]
        for row, row_mask in zip(ids, completion_mask, strict=True)
    ]
    teacher_ids = torch.stack([torch.randperm(V, generator=g)[:5] for _ in range(B * T)])
    return {
        "torch": torch, "ids": ids, "completion_mask": completion_mask, "targets": targets,
        "mask": mask, "total_tokens": mask.sum(),
        "hidden": hidden, "weight": lm_head.weight, "lm_head": lm_head, "logits": logits,
        "attention": torch.ones_like(ids),
        "advantages": advantages, "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "old_logps": old_logps, "ref_logps": ref_logps,
        "objective": objective, "batch": batch, "micro_batches": [batch],
        "hidden_of": lambda rows: hidden,
        "transform": LogitTransform(temperature=0.7),
        # A reference, a teacher
        "ref_hidden": normal(B, T, H), "ref_weight": ref_head.weight.detach(),
        "ref_logits": normal(B, T, V),
        "teacher_hidden": normal(B, T, H), "teacher_weight": ref_head.weight.detach(),
        "teacher_logits": normal(B, T, V),
        "teacher_transform": LogitTransform(softcap=30.0), "teacher_ids": teacher_ids,
        "teacher_logps": torch.log_softmax(normal(B * T, V), -1).gather(-1, teacher_ids),
        # What samplers record
        "sampling_masks": sampling_masks,
        "outputs": [
            SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=row)) for row in sampling_masks
        ],
        "prompt_length": 2, "length": T,
        "response": TokenSets.from_counts(torch.arange(4), torch.ones(4, dtype=torch.int64)),
        "kept_ids": ids.reshape(-1).to(torch.int32), "counts": torch.ones(B * T, dtype=torch.int64),
    }  # fmt: skip
