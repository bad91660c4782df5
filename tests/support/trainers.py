"""Helpers for tests of the adapters: modules of trainers, a batch, and float64 references.

A module of a trainer is a stand-in, or one file of an installed trainer. To test with the files,
download these packages, unpack them, and add the folders to PYTHONPATH:

    pip download --no-deps openrlhf==0.11.2 areal==1.0.4 skyrl==0.3.0 unsloth_zoo==2026.10.9
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from support import oracle

#: Packages of trainers, whose modules tests hide or replace.
ROOTS = (
    "openrlhf",
    "areal",
    "slime",
    "prime_rl",
    "nemo_rl",
    "skyrl",
    "miles",
    "unsloth_made",
    "unsloth_zoo",
    "deepspeed",
)
#: Size of the vocabulary, and width of hidden states.
V = 23
H = 16


def versions() -> dict[str, str]:
    """Return {package of a trainer: the newest version that its adapter was tested with}."""
    from grpo_kernels.integrations import adapters

    return {
        adapter.package: adapter.tested[-1] for adapter in adapters().values() if adapter.tested
    }


# ---- a batch


@dataclass(frozen=True, eq=False)
class Data:
    """Eight sequences of at most 12 tokens. Each tensor is [B, T] = [8, 12].

    logps        log-probs of the policy
    old          log-probs of the old policy
    ref          log-probs of the reference model
    advantages   per token
    mask         True for trained tokens. Sequences differ in length: one has no token, one has two
                 masked tokens in its middle
    weights      importance weights of the tokens, some of them 0
    sampler      log-probs of the sampler
    """

    logps: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sampler: Tensor


def drawn(far: bool = False) -> Data:
    """Draw a batch, which is the same in each call.

    The ratios of tokens and of sequences are on both sides of the clip range. One sequence has
    advantage 0, and one has advantages of both signs.

    far   whether log-ratios of the first three sequences exceed the clamps of trainers
    """
    num_sequences = 8
    length = 12
    shape = (num_sequences, length)
    g = torch.Generator().manual_seed(7)
    num_trained = torch.tensor([12, 5, 9, 0, 12, 1, 8, 10])
    mask = torch.arange(length) < num_trained[:, None]
    mask[4, 3:5] = False

    logps = -0.02 - 4 * torch.rand(shape, generator=g).square()  # in (-4.02, -0.02]
    # The mean of log(policy / old) of each sequence, about.
    mean_log_ratio = torch.tensor([0.3, -0.35, -0.24, 0.1, 0.5, 0.2, 0.05, 0.1])[:, None]
    old = (logps - mean_log_ratio - 0.25 * torch.randn(shape, generator=g)).clamp(max=-0.01)
    if far:
        # Log-ratios of single tokens, of both signs, on both sides of 20.
        old[0, :6] = logps[0, :6] - torch.tensor([21.0, 0.0, 19.0, 0.0, 40.0, 0.0])
        logps[0, :6] -= torch.tensor([0.0, 21.0, 0.0, 19.0, 0.0, 60.0])
        # Log-ratios of whole sequences.
        old[1] = logps[1] - 11.0
        old[2] = logps[2] - 30.0

    mean_advantage = torch.tensor([1.2, 0.8, -0.7, 0.9, -1.1, 0.6, 0.0, -0.4])[:, None]
    advantages = mean_advantage * (1 + 0.2 * torch.randn(shape, generator=g))
    advantages[7, ::3] *= -1
    weights = torch.exp(0.4 * torch.randn(shape, generator=g)).clamp(max=1.5)
    weights[weights < 0.45] = 0.0
    ref = logps + 0.4 * torch.randn(shape, generator=g)
    sampler = old + 0.3 * torch.randn(shape, generator=g)
    return Data(
        logps=logps,
        old=old,
        ref=ref,
        advantages=advantages,
        mask=mask,
        weights=weights,
        sampler=sampler.clamp(max=-0.01),
    )


DATA = drawn()
MASK, (B, T) = DATA.mask, DATA.mask.shape


# ---- trainers' modules


def stand_in(name: str, **contents: Any) -> ModuleType:
    """Return the module of this name in sys.modules, with `contents` as further attributes.

    The module and the packages that contain it are made if they do not exist. After this, code can
    import the module as if the package were installed.

    name   such as "areal.utils.functional"
    """
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path in sys.modules:
            continue
        module = ModuleType(path)
        is_package = depth < len(parts)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=is_package)
        module.__path__ = []
        sys.modules[path] = module
        if depth > 1:
            parent = sys.modules[".".join(parts[: depth - 1])]
            setattr(parent, parts[depth - 1], module)
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


def their_file(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    beside: ModuleType | None = None,
    **stubs: dict[str, Any],
) -> ModuleType:
    """Import one file of an installed trainer, without the `__init__` of its packages.

    These would import the whole trainer and what it depends on, such as Ray or vLLM, which need not
    be installed. The test is skipped if the file does not exist.

    Returns the module, which has torch.compile switched off.

    name     dotted name of the module
    beside   a module of the same installation, which says where the packages are; None: Python
             finds them
    stubs    {module that the file imports, with __ for each dot: its contents}
    """
    root, *path_in_root = name.split(".")
    if beside is not None:
        # The folder of the root package: a module has as many dots as packages above it.
        folder = Path(str(beside.__file__)).parents[beside.__name__.count(".") - 1]
    else:
        spec = importlib.util.find_spec(root) if root not in sys.modules else None
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{root} is not installed")
        folder = Path(spec.submodule_search_locations[0])
    path = folder.joinpath(*path_in_root).with_suffix(".py")
    if not path.exists():
        pytest.skip(f"this {root} has no {path.name}")
    for stub, contents in stubs.items():
        stand_in(stub.replace("__", "."), **contents)
    module = stand_in(name)
    module.__file__ = str(path)
    module.__package__ = name.rpartition(".")[0]
    monkeypatch.setattr(torch, "compile", _without_compiling)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


def _without_compiling(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replace torch.compile, because compiling takes seconds. The options are ignored.

    Returns the function itself or, for @torch.compile(...), a decorator that does so.
    """
    if function is not None:
        return function
    return lambda decorated: decorated


@contextmanager
def without_trainers(*roots: str) -> Iterator[None]:
    """Remove the modules of packages from sys.modules, and restore them afterwards.

    Modules of these packages that the block adds, such as stand-ins, are removed at its end.

    roots   names of top-level packages
    """

    def modules_of_roots() -> dict[str, ModuleType]:
        """Return the imported modules of the packages."""
        return {
            name: module for name, module in sys.modules.items() if name.partition(".")[0] in roots
        }

    hidden = modules_of_roots()
    for name in hidden:
        del sys.modules[name]
    yield
    for name in modules_of_roots():
        del sys.modules[name]
    sys.modules.update(hidden)


# ---- float64

#: (logits, targets) -> (log-probs, entropies)
log_softmax_of = oracle.log_probs


def entropy_of(logits: Tensor) -> Tensor:
    """Return the entropy of each row of logits [..., V], float64 [...]."""
    return log_softmax_of(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))[1]


def exact(
    spec: oracle.Spec,
    logps: Tensor,
    data: Data = DATA,
    entropy: Tensor | None = None,
    **fields: Any,
) -> oracle.Result:
    """Return the oracle's loss of log-probs [B, T], with its further results.

    spec      the loss
    data      its advantages, mask and old log-probs are used
    entropy   [B, T]; None: 0
    fields    arguments of `oracle.objective`. They take precedence over the tensors of `data`
    """
    fields_of_data = {"advantages": data.advantages, "mask": data.mask, "old_logps": data.old}
    if entropy is None:
        entropy = torch.zeros_like(logps)
    sequences = oracle.sequences_of(logps, None)
    return oracle.objective(
        spec, logps.reshape(-1), entropy.reshape(-1), sequences, **{**fields_of_data, **fields}
    )


def value_and_gradient(
    f: Callable[..., Any], x: Tensor | list[Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Return (what f returns, the gradient of its loss).

    The loss is detached. The gradient is float64, in the shape of x.

    f       returns a 0-d loss, or a tuple that begins with a loss
    x       the argument of f, or a list of its arguments. The gradient is a list then, too
    dtype   of the arguments that f gets
    """
    arguments = [x] if isinstance(x, Tensor) else x
    leaves = [argument.detach().to(dtype, copy=True).requires_grad_() for argument in arguments]
    result = f(*leaves)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    loss = results[0]
    gradients = [gradient.double() for gradient in torch.autograd.grad(loss, leaves)]
    value: Any = loss.detach()
    if len(results) > 1:
        value = (value, *results[1:])
    return value, gradients[0] if isinstance(x, Tensor) else gradients


def assert_same(got: Any, want: Any, rtol: float = 2e-5) -> None:
    """Assert that two results of `value_and_gradient` have nearly equal losses and gradients.

    got, want   the results of the function under test and of the reference

    The terms of a sum may cancel, so there is an absolute tolerance too. For the loss it is `rtol`
    times the largest element of all gradients, at most `rtol`. For a gradient it is `rtol` / 2
    times its own largest element.
    """

    def loss_and_gradients(result: Any) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the list of gradients, of a result of `value_and_gradient`."""
        value = result[0]
        gradients = result[1]
        loss = value[0] if isinstance(value, tuple) else value
        return loss, [gradients] if isinstance(gradients, Tensor) else gradients

    got_loss, got_gradients = loss_and_gradients(got)
    want_loss, want_gradients = loss_and_gradients(want)
    sizes = [float(gradient.abs().max()) for gradient in want_gradients]
    assert max(sizes) > 0, "a gradient of 0 proves nothing"
    loss_atol = rtol * min(max(sizes), 1.0)
    assert_close(got_loss.double(), want_loss.double(), rtol=rtol, atol=loss_atol)
    for ours, theirs, size in zip(got_gradients, want_gradients, sizes, strict=True):
        assert_close(ours, theirs, rtol=rtol, atol=rtol / 2 * size)


def values_and_gradients(
    f: Callable[..., Any], *leaves: Tensor, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the outputs of a function and the gradients of its arguments, in float64.

    The gradients belong to a sum of all outputs, with a different weight for each element. Outputs
    that are None are left out.

    f        returns a tensor or a tuple
    leaves   the arguments
    dtype    of the arguments that f gets
    """
    arguments = tuple(x.detach().to(dtype, copy=True).requires_grad_() for x in leaves)
    result = f(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    outputs = [x for x in results if x is not None]
    loss: Any = 0
    for output in outputs:
        if output.requires_grad:
            weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype)
            loss = loss + (output * weights.view(output.shape)).sum()
    gradients = torch.autograd.grad(loss, arguments)
    return [x.detach().double() for x in (*outputs, *gradients)]


def assert_scored(
    ours: Any, theirs: Any, *leaves: Tensor, dtype: torch.dtype = torch.float64, rtol: float = 2e-5
) -> None:
    """Assert that two functions of the same arguments have equal outputs and gradients.

    See `values_and_gradients` for the gradients. The absolute tolerance is `rtol` times the largest
    element of a tensor.

    ours     the function under test, which gets fp32 arguments
    theirs   the function of the trainer, or a reference
    leaves   the arguments
    dtype    of the arguments of `theirs`
    """
    got = values_and_gradients(ours, *leaves)
    want = values_and_gradients(theirs, *leaves, dtype=dtype)
    for a, b in zip(got, want, strict=True):
        largest = float(b.abs().max())
        assert_close(a, b, rtol=rtol, atol=rtol * max(1e-3, largest))


def same_metrics(got: Any, want: Any) -> None:
    """Assert that the metrics in `want` are nearly equal in `got`, which may have further metrics.

    Numbers may differ by a ten-thousandth, or by 1e-5 if they are small.

    got, want   {name: number, 0-d tensor or None}
    """
    got_numbers: dict[Any, Any] = {}
    expected: dict[Any, Any] = {}
    for name in want:
        got_numbers[name] = None if got[name] is None else float(got[name])
        if want[name] is None:
            expected[name] = None
        else:
            expected[name] = pytest.approx(float(want[name]), rel=1e-4, abs=1e-5)
    assert got_numbers == expected


def refused(*calls: tuple[Callable[[], Any], str]) -> None:
    """Assert that each call raises ValueError.

    calls   (function, regular expression for its message)
    """
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


# ---- losses that have the same names in TRL and Liger

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
#: Constants of SAPO and VESPO under the names in TRL and Liger, none of them a default.
CONSTANTS = {
    "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3, "vespo_k_pos": 1.8,
    "vespo_lambda_pos": 2.6, "vespo_k_neg": 2.7, "vespo_lambda_neg": 2.1,
}  # fmt: skip
