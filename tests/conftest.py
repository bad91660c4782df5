"""Fixtures:

backends, seeds, poisoned uninitialised memory, and others that several folders share.
"""

from __future__ import annotations

import atexit
import functools
import gc
import math
import os
import sys
from importlib import metadata
from pathlib import Path

# Imported modules and collected tests stay alive. Searching them for garbage again and again takes
# a third of the collection time.
if gc.isenabled():
    gc.disable()

import pytest
import torch

import grpo_kernels
from support.processes import run_checks
from support.trainers import ROOTS, versions

try:  # the same examples in every run, on a busy machine too
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    pass
else:
    settings.register_profile(
        "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("suite")

PACKAGE = grpo_kernels.__name__

#: The slowest files. They run first, so that at the end of a run no process has to wait for the
#: other's last file.
LONG = (
    "rows/test_triton_compiled.py", "core/test_ranks.py", "training/test_trainer_ranks.py",
    "core/test_compile.py", "core/test_cost.py", "integrations/test_trl_runs.py", "core/test_relations.py",
    "core/test_combinations.py", "core/test_package.py", "benchmarks/test_resources.py", "rows/test_row_kernels.py",
    "rows/test_cpu_products.py", "rows/test_two_row_kernels.py",
    "core/test_waits.py", "core/test_head_ranks.py",
    "integrations/test_liger.py", "integrations/test_trl_ranks.py", "benchmarks/test_gpu_kit.py",
    "benchmarks/test_benchmarks.py", "diagnosis/test_doctor.py", "training/test_trainer_resume.py",
    "rows/test_triton_compile.py",
)  # fmt: skip


def pytest_collection_modifyitems(config, items):
    if "PYTEST_XDIST_WORKER" not in os.environ or config.pluginmanager.hasplugin(
        "support.on_device"
    ):
        return  # which has an order of its own
    rank = {str(Path(__file__).parent / name): i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(str(item.path), len(LONG)))


def pytest_collection_finish():
    gc.freeze()
    atexit.register(gc.unfreeze)  # bindings that look for leaks at exit would report all of it
    gc.enable()


@pytest.fixture(params=os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "eager cpu").split())
def backend(request):
    """Each backend that runs on CPU tensors in this process; Triton's interpreter has a process of
    its own.
    """
    if request.param == "cpu":
        from grpo_kernels.core.backends import cpu

        reason = cpu.unavailable_reason()
        if reason is not None:
            pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    """torch.manual_seed, which formats a traceback for each device that has not been used yet:

    a tenth of a small test.
    """
    if torch.cuda.is_initialized():
        torch.manual_seed(20260)
    else:
        torch.default_generator.manual_seed(20260)


@pytest.fixture(autouse=True)
def one_thread():
    """With small tensors more threads only cost time, and much of it where other processes share
    the cores. A test of several sets their number itself.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty and similar functions, called from the package, return NaN (integers: their
    minimum), so that an element that was never written cannot pass a comparison by chance.
    """

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if torch.compiler.is_compiling():  # traced tensors have no values
                return tensor
            if (
                str(sys._getframe(1).f_globals.get("__name__", "")).split(".")[0] == PACKAGE
                and not tensor.is_meta
            ):
                with torch.no_grad():
                    tensor.fill_(
                        float("nan")
                        if tensor.dtype.is_floating_point
                        else -(2**7)
                        if tensor.dtype != torch.uint8
                        else 255
                    )
            return tensor

        return made

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def stand_ins(monkeypatch):
    """Trainers' modules that a test puts into sys.modules go away with it; their versions are as
    the adapters know them.
    """
    before, known, version = set(sys.modules), versions(), metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: known[name] if name in known else version(name)
    )
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ROOTS:
            del sys.modules[name]


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory):
    """The outcomes of a module's checks on a number of ranks, which are started once for all
    checks.
    """
    pytest.importorskip(
        "numpy", reason="the checks send objects, for which torch.distributed takes NumPy"
    )
    return functools.cache(
        lambda module, ranks: run_checks(module, ranks, tmp_path_factory.mktemp(f"ranks{ranks}"))
    )


@pytest.fixture(scope="session")
def tok():
    """The tokenizer of the arithmetic example, one token per character."""
    pytest.importorskip("transformers")
    from examples.arithmetic import tokenizer

    return tokenizer()


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this one process."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def lots_in_order(monkeypatch):
    """Clip-Cov draws from its candidates: both sides take the first ones."""
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    monkeypatch.setattr(
        torch, "rand", lambda shape, **_: torch.arange(math.prod(shape)).view(shape) / 1e3
    )
