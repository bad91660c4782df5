"""The package as a kernel of the Hugging Face `kernels` library: `python
tests/repository/hub_kernel.py OUT [--version 1]`.

OUT/build/torch-<backend>/ for each backend holds the Python sources with their Triton kernels and
the eager backend, the same for each (noarch: nothing is compiled ahead), `layers`, and
metadata.json with the digest of every file. A build is imported by a name of its own, its `id`, so
that versions live side by side in a process: all imports inside are relative, and the operators'
namespace is that name.

    from kernels import get_local_kernel kernel = get_local_kernel(Path("OUT")) out =
    kernel.linear_grpo_loss(hidden, weight, kernel.TokenBatch(...), kernel.Objective.preset("dapo"))
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "grpo_kernels"
BACKENDS = ("cpu", "cuda", "rocm", "xpu")
#: Folders for trainers and the command line, which a kernel does not need.
LEFT_OUT = ("integrations", "plugins", "training", "diagnosis")

OPS = '''"""Names of this build's operators: its own namespace in torch.ops."""

import torch

NAMESPACE = __name__.partition(".")[0]
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{NAMESPACE}}::{{op_name}}"
'''.replace("{{", "{").replace("}}", "}")

LAYERS = '''"""Forwards for modules that have a head's weight [V, H] and bias [V] or None: kernelize() puts them in their place."""

import torch
from torch import nn

from .logprobs import linear_logprobs
from .losses import LossOutput, linear_grpo_loss
from .options import Head


class LinearLogProbs(nn.Module):
    """forward(hidden, targets) -> log-probs, fp32 in the shape of targets."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear_logprobs(hidden, Head(self.weight, self.bias), targets).logps


class LinearGRPOLoss(nn.Module):
    """forward(hidden, batch, objective) -> LossOutput."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, hidden: torch.Tensor, batch, objective) -> LossOutput:
        return linear_grpo_loss(hidden, Head(self.weight, self.bias), batch, objective)
'''

#: For loaders that look for a folder of the kernel's name.
REDIRECT = '''"""This build by the name of the kernel."""

import importlib.util
import sys
from pathlib import Path

if {id!r} not in sys.modules:
    spec = importlib.util.spec_from_file_location({id!r}, Path(__file__).parents[1] / "__init__.py")
    sys.modules[{id!r}] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[{id!r}])
sys.modules[__name__] = sys.modules[{id!r}]
'''


def sources() -> dict[str, str]:
    """{path in a build: text}, of the package without the rooms that are left out."""
    package = ROOT / NAME
    paths = [
        path.relative_to(package) for path in sorted([*package.rglob("*.py"), package / "py.typed"])
    ]
    found = {
        str(path): (package / path).read_text()
        for path in paths
        if path.parts[0] not in (*LEFT_OUT, "__main__.py")
    }
    found["__init__.py"] += "\nfrom . import layers as layers\n"
    return found | {"_ops.py": OPS, "layers.py": LAYERS}


def build(out: Path, version: int, backends: Sequence[str] = BACKENDS) -> list[Path]:
    """Write the builds, and return their folders.

    Another version of the same sources has another id.
    """
    files = sources()
    content = hashlib.sha256(json.dumps([version, files]).encode()).hexdigest()[:8]
    folders = [out / "build" / f"torch-{backend}" for backend in backends]
    for backend, folder in zip(backends, folders, strict=True):
        shutil.rmtree(folder, ignore_errors=True)
        name = f"{NAME}_{backend}_v{version}_{content}"
        own = {**files, f"{NAME}/__init__.py": REDIRECT.format(id=name)}
        for path, text in own.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        digests = {
            path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for path, text in own.items()
        }
        metadata = {
            "id": name, "name": NAME.replace("_", "-"), "version": version, "license": "Apache-2.0", "python-depends": [],
            "backend": {"type": backend}, "digest": {"algorithm": "sha256", "files": digests},
        }  # fmt: skip
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2, sort_keys=True) + "\n")
    return folders


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, and print the folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="the folder of the kernel's repository"
    )
    parser.add_argument(
        "--version",
        type=int,
        default=1,
        help="of the kernel: raised where its names or their meaning change",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        default=BACKENDS,
        choices=BACKENDS,
        metavar="NAME",
        help=", ".join(BACKENDS),
    )
    options = parser.parse_args(arguments)
    print(*build(options.out, options.version, options.backends), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
