"""Plugins as trainers load them:

by the trainer's own loader where it is installed, else by that loader's contract.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grpo_kernels
from grpo_kernels import plugins as _once
from grpo_kernels.__main__ import main
from grpo_kernels.integrations import liger
from support.megatron import GPTModel
from support.trainers import H, V, stand_in, without_trainers

SOURCE = Path(grpo_kernels.__file__).parents[1]
ENTRY = metadata.EntryPoint("grpo_kernels", "grpo_kernels.plugins.verl", "verl.plugins")
REGISTRY = "verl.trainer.ppo.core_algos"
#: A batch of Liger's loss, and options of it.
GIVEN = (
    torch.randn(2, 5, H),
    torch.randn(V, H),
    torch.randint(V, (2, 5)),
    torch.ones(2, 5),
    torch.tensor([1.0, -0.5]),
)
OPTIONS = {
    "beta": 0.0,
    "compiled": False,
    "temperature": 0.8,
    "loss_type": "bnpo",
    "use_ref_model": False,
}


@pytest.fixture(autouse=True)
def fresh(stand_ins, monkeypatch):
    """No plugin has acted in this process, or was imported (as `import verl` does it), and what
    these do is undone.
    """
    monkeypatch.setattr(_once, "DONE", {})
    monkeypatch.delenv("RANK", raising=False)
    forget_plugins()
    yield
    for slots in _once.DONE.values():
        getattr(slots, "undo", lambda: None)()
    forget_plugins()


def forget_plugins():
    for name in [name for name in sys.modules if name.startswith("grpo_kernels.plugins.")]:
        del sys.modules[name]
        vars(_once).pop(name.rpartition(".")[2], None)


def loaded(path):
    """What slime, miles and prime-rl make of "module.name"."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == _once.LOG.name]


def is_ours(x):
    return getattr(x, "grpo_kernels", False)


# ---- verl


def test_the_entry_point_is_that_of_the_project():
    project = SOURCE / "pyproject.toml"
    if not project.exists():
        pytest.skip("not a checkout")
    assert (
        f'[project.entry-points."{ENTRY.group}"]\n{ENTRY.name} = "{ENTRY.value}"\n'
        in project.read_text()
    )


CORE_ALGOS = """
POLICY_LOSS_REGISTRY = {"vanilla": len}

def register_policy_loss(name):
    if FAILS:
        raise ValueError(f"no {name} here")
    return lambda function: POLICY_LOSS_REGISTRY.setdefault(name, function)
"""


@pytest.fixture
def core_algos(tmp_path, monkeypatch):
    """Writes the file of verl's registry, of a package that nothing has imported."""
    home = tmp_path / "verl" / "trainer" / "ppo"
    home.mkdir(parents=True)
    for folder in (home, home.parent, home.parents[1]):
        (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.1")
    before = [*sys.meta_path]
    with without_trainers("verl"):
        yield lambda fails: (home / "core_algos.py").write_text(f"FAILS = {fails}{CORE_ALGOS}")
    sys.meta_path[:] = before


@pytest.mark.parametrize("imported", [False, True])
def test_verl_imports_the_entry_point(core_algos, imported, caplog):
    """It loads the module and calls nothing. `import verl` does not wait for its registry, which
    has our losses as soon as it is there. A second import, under another name too, adds nothing.
    Nothing is said.
    """
    core_algos(False)
    finders = [*sys.meta_path]
    if imported:
        importlib.import_module(REGISTRY)
    module = ENTRY.load()
    del sys.modules[ENTRY.module]
    ENTRY.load()
    assert (REGISTRY in sys.modules) == imported
    first = {**importlib.import_module(REGISTRY).POLICY_LOSS_REGISTRY}
    assert {"vanilla", "fused_vanilla", "fused_dapo"} <= {*first} and sys.meta_path == finders
    spec = importlib.util.spec_from_file_location(
        "grpo_kernels.plugins.again", str(module.__file__)
    )
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert first == sys.modules[REGISTRY].POLICY_LOSS_REGISTRY and not said(caplog)


@pytest.mark.parametrize("imported", [False, True])
def test_an_error_that_verl_would_hide_is_logged(core_algos, imported, caplog):
    """verl goes on without our losses."""
    core_algos(True)
    if imported:
        importlib.import_module(REGISTRY)
        with pytest.raises(ValueError, match="no fused_vanilla"):
            ENTRY.load()
    else:
        ENTRY.load()
        importlib.import_module(REGISTRY)
    (record,) = (record for record in caplog.records if record.name == _once.LOG.name)
    assert (
        record.levelno == logging.ERROR
        and "plugin verl failed: no fused_vanilla here" in record.getMessage()
    )


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["", "grpo_kernels.plugins.verl_head"])
def test_verls_own_loader(tmp_path, modules, monkeypatch):
    """`import verl` alone, with the metadata of an installed grpo_kernels on the path."""
    monkeypatch.undo()  # the versions are those that are here
    pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
    info = tmp_path / "grpo_kernels-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo_kernels\nVersion: 9\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY.group}]\n{ENTRY.name} = {ENTRY.value}\n")
    code = (
        f"import sys, verl\nassert {REGISTRY!r} not in sys.modules\nfrom"
        " verl.trainer.ppo.core_algos import get_policy_loss_fn\nfrom"
        " verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as"
        " head\nprint(get_policy_loss_fn('fused_vanilla').__module__, getattr(head,"
        " 'grpo_kernels', False))\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(SOURCE), *sys.path])
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["grpo_kernels.integrations.verl", str(bool(modules))]
    assert "policy losses" not in done.stderr


# ---- slime, miles, prime-rl: a path of a function


def test_slime_and_miles_call_a_function_at_their_start(caplog):
    """Twice, which changes nothing; slime's arguments ask for replay."""
    name = "calculate_log_probs_and_entropy"
    homes = [
        stand_in(home, **{name: len})
        for home in ("slime.utils.ppo_utils", "miles.backends.training_utils.loss_hub.math_utils")
    ]
    masks = stand_in(
        "slime.backends.megatron_utils.loss", _build_topp_keep_mask=lambda *_, **__: None
    )
    for _ in range(2):
        loaded("grpo_kernels.plugins.slime.init")(SimpleNamespace(rollout_top_p=0.9))
        loaded("grpo_kernels.plugins.miles.init")(SimpleNamespace())
    assert all(is_ours(getattr(home, name)) for home in homes) and is_ours(
        masks._build_topp_keep_mask
    )
    assert callable(loaded("grpo_kernels.plugins.slime.loss"))
    assert [line.split(" run ")[0].split()[-1] for line in said(caplog)] == ["slime", "miles"]


HOMES = {
    "slime": ("slime.utils.ppo_utils", "slime.backends.megatron_utils.loss"),
    "miles": (
        "miles.backends.training_utils.loss_hub.math_utils",
        "miles.backends.training_utils.loss_hub.logit_processors",
    ),
}


@pytest.mark.parametrize("trainer", HOMES)
def test_hooks_of_slime_and_miles_skip_the_logits(trainer):
    """The function that needs hidden states is bound at the start, if a hook is named."""
    functions, home = HOMES[trainer]
    stand_in(functions, calculate_log_probs_and_entropy=len)

    def scores(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
        return None

    scored = stand_in(home, get_log_probs_and_entropy=scores)
    plugin = f"grpo_kernels.plugins.{trainer}"
    model = GPTModel(torch.randn(5, 3))
    with pytest.raises(RuntimeError, match=f"{plugin}.init too"):
        loaded(f"{plugin}.before_train_step")(SimpleNamespace(), 0, 0, [model], None, None)
    args = SimpleNamespace(
        vocab_size=4,
        custom_megatron_before_log_prob_hook_path=f"{plugin}.before_log_probs",
        custom_megatron_before_train_step_hook_path=f"{plugin}.before_train_step",
    )
    loaded(f"{plugin}.init")(args)
    assert is_ours(scored.get_log_probs_and_entropy)
    loaded(f"{plugin}.before_log_probs")(args, [model], "ref_")
    loaded(f"{plugin}.before_train_step")(args, 0, 0, [model], None, None)
    logits = model(None, None, None, torch.randn(6, 1, 3))
    assert logits.options.shard.vocab == 4


def test_prime_rl_imports_a_loss_and_gets_the_head_too(caplog):
    home = stand_in(
        "prime_rl.trainer.models.layers.lm_head",
        _SequenceChunkedLogProbEntropyFn=SimpleNamespace(apply=len),
    )
    stand_in("prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)
    loss, logps = (
        loaded("grpo_kernels.plugins.prime_rl.loss"),
        torch.tensor([-1.0, -2.0, -0.5, -3.0]),
    )
    inputs = SimpleNamespace(
        trainer_logprobs=logps, inference_logprobs=logps - 0.1, ref_logprobs=None, advantages=torch.ones(4),
        loss_mask=torch.tensor([True, True, True, False]), loss_weights=None,
    )  # fmt: skip
    out = loss(inputs, objective="importance_sampling")
    torch.testing.assert_close(out.loss, -3 * torch.tensor(0.1).exp())
    assert is_ours(home._SequenceChunkedLogProbEntropyFn) and len(said(caplog)) == 1


# ---- ms-swift: a file; axolotl: a class


def run_swift(file_path, monkeypatch):
    """By ms-swift's own function where it is installed; else as that does it, under a name of its
    own.
    """
    try:
        from swift.utils.utils import import_external_file
    except ImportError:
        monkeypatch.syspath_prepend(os.path.dirname(file_path))
        spec = importlib.util.spec_from_file_location("_swift_external_0", file_path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    else:
        import_external_file(file_path)
    for name in [name for name in sys.modules if name.startswith("_swift_external_")]:
        del sys.modules[name]


def test_ms_swift_runs_the_file(capsys, caplog, monkeypatch):
    chunked = pytest.importorskip(
        "liger_kernel.chunked_loss", reason="liger-kernel is not installed"
    )
    assert main(["plugin", "ms_swift"]) == 0
    path, theirs = capsys.readouterr().out.strip(), chunked.LigerFusedLinearGRPOLoss
    assert [file.name for file in Path(path).parent.glob("*.py")] == ["__init__.py"]
    monkeypatch.setattr(metadata, "version", lambda _: liger.LIGER_VERSION)
    for _ in range(2):
        run_swift(path, monkeypatch)
    # ms-swift has put the folder of the file first on the path, where a trainer's name is that
    # trainer's.
    find = importlib.machinery.PathFinder.find_spec
    assert not any(find(name, sys.path[:1]) for name in ("verl", "slime", "miles", "axolotl"))
    from liger_kernel.chunked_loss import (
        LigerFusedLinearGRPOLoss,
    )  # as ms-swift does where it makes the loss

    torch.testing.assert_close(
        LigerFusedLinearGRPOLoss(**OPTIONS)(*GIVEN)[0], theirs(**OPTIONS)(*GIVEN)[0]
    )
    slots = _once.DONE["ms_swift"]
    assert slots.counts == {"fused": 1} and len(said(caplog)) == 1
    slots.undo()
    assert chunked.LigerFusedLinearGRPOLoss is theirs
    assert main(["plugin", "no_such"]) == 2 and "ms_swift" in capsys.readouterr().err


def test_axolotl_makes_the_class_and_hands_it_the_trainer(monkeypatch, caplog):
    """By axolotl's own plugin manager where it is installed, else by a base class of that name; the
    trainer is as those of the TRL that axolotl pins, whose loss with `trl: {use_liger_loss: true}`
    is Liger's.
    """
    monkeypatch.undo()  # the versions are those that are here
    monkeypatch.setattr(_once, "DONE", {})
    chunked = pytest.importorskip(
        "liger_kernel.chunked_loss", reason="liger-kernel is not installed"
    )
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    trainer = object.__new__(pytest.importorskip("trl", reason="TRL is not installed").GRPOTrainer)
    path = "grpo_kernels.plugins.axolotl.FusedGRPO"
    try:
        from axolotl.integrations.base import PluginManager
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(BasePlugin=object, __path__=[]))
        plugin = loaded(path)()
        settings = [plugin.get_input_args()]
    else:
        plugin = PluginManager.get_instance()
        plugin.register(path)
        settings = plugin.get_input_args()
    monkeypatch.setattr(metadata, "version", lambda _: liger.LIGER_VERSION)
    with pytest.raises(RuntimeError, match="in axolotl: use_liger_loss=True"):
        plugin.post_trainer_create({}, trainer)
    theirs = trainer.liger_loss = chunked.LigerFusedLinearGRPOLoss(**OPTIONS)
    for _ in range(2):
        plugin.post_trainer_create({"grpo_kernels_strict": True}, trainer)
    torch.testing.assert_close(trainer.liger_loss(*GIVEN)[0], theirs(*GIVEN)[0])
    assert trainer.fused_loss.strict and trainer.fused_loss.counts == {"fused": 1}
    assert [loaded(name)().grpo_kernels_strict for name in settings] == [False]
    assert ["the loss of GRPOTrainer is ours" in line for line in said(caplog)] == [True]
