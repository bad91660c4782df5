"""What importing costs, and what happens where Triton, the C++ module or a GPU is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpo_kernels
from grpo_kernels import backends, doctor

#: Makes `import NAME` fail as if it were not installed.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == m or name.startswith(m + ".") for m in {missing!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str, missing: tuple[str, ...] = (), **environment: str) -> str:
    source = Path(grpo_kernels.__file__).parent.parent
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRPO_KERNELS_")} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(source), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing) + code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_pulls_in_nothing_optional() -> None:
    optional = ("triton", "transformers", "trl", "liger_kernel", "matplotlib", "datasets", "tqdm", "numpy")
    # What torch itself imports is not ours to avoid.
    out = run(
        f"import torch\nbefore = set(sys.modules)\nimport grpo_kernels\nnew = set(sys.modules) - before\n"
        f"print([m for m in {optional!r} if m in new])"
    )
    assert out.strip() == "[]"


LOSS = """
import warnings, torch
from grpo_kernels import Objective, TokenBatch, grpo_loss
x = torch.randn(3, 11, requires_grad=True)
batch = TokenBatch(torch.tensor([1, 2, 3]), torch.tensor([1.0, -1.0, 0.5]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        grpo_loss(x, batch, Objective.preset("grpo", aggregate="token-mean")).loss.backward()
expected = torch.softmax(x.detach(), -1)
expected[range(3), batch.targets] -= 1
assert torch.allclose(x.grad, 2 * expected * batch.advantages[:, None] / 3, atol=1e-6)
print([str(w.message) for w in caught])
"""


def test_without_triton_and_without_the_cpp_module_eager_runs_with_one_warning() -> None:
    out = run(LOSS, missing=("triton", "grpo_kernels._cpu"))
    assert out.count("falls back to eager") == 1 and "doctor" in out


def test_strict_mode_turns_the_fallback_into_an_error() -> None:
    code = "\n".join(
        ["try:", *("    " + line for line in LOSS.splitlines()), "except RuntimeError as e:", "    print('refused:', e)"]
    )
    assert "refused: " in run(code, missing=("grpo_kernels._cpu",), GRPO_KERNELS_STRICT="1")


def test_a_backend_asked_for_by_name_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"backend='cuda'.*auto or one of eager, cpu, triton"):
        backends.pick("cuda", torch.device("cpu"))
    out = run(
        "import torch\nfrom grpo_kernels import backends\n"
        "for name in ('cpu', 'triton'):\n"
        "    try:\n        backends.pick(name, torch.device('cpu'))\n"
        "    except RuntimeError as e:\n        print(e)",
        missing=("triton", "grpo_kernels._cpu"),
    )
    assert out.count("cannot run: ") == 2 and "doctor" in out


def test_doctor_reports_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main([])
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in backends.BACKENDS)
    assert "eager    ok: gradient error" in out
    assert ("falls back" in out) == (status == 1)


def test_doctor_sees_a_wrong_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    eager = backends.load("eager")
    right = eager.row_grads

    def wrong(*args: object, **kwargs: object) -> None:
        right(*args, **kwargs)
        args[7].mul_(1.01)  # type: ignore[attr-defined]

    monkeypatch.setattr(eager, "row_grads", wrong)
    assert doctor.main([]) == 1
    assert "eager    WRONG" in capsys.readouterr().out


def test_doctor_says_why_the_native_backend_is_missing() -> None:
    out = run("from grpo_kernels import doctor\nprint('status', doctor.main([]))", missing=("triton", "grpo_kernels._cpu"))
    assert "cpu      not available: " in out and "triton   not available: " in out and "status 1" in out
