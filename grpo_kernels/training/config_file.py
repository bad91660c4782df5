"""The configuration of a run as YAML: read with every key and value checked, and written so that it can be read again."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..checks import near_name
from . import require

#: What other trainers call our options.
ELSEWHERE = {
    "model_name_or_path": "model", "dataset_name": "dataset", "reward_funcs": "rewards", "loss_type": "preset",
    "num_generations": "group_size", "max_completion_length": "max_new_tokens", "max_prompt_length": "max_prompt_tokens",
    "learning_rate": "lr", "lr_scheduler_type": "lr_schedule", "max_steps": "steps", "num_iterations": "num_updates",
    "scale_rewards": "advantage_scale", "per_device_train_batch_size": "micro_batch", "output_dir": "out", "report_to": "log_to",
    "save_steps": "checkpoint_steps", "save_total_limit": "keep_checkpoints", "resume_from_checkpoint": "resume",
    "log_completions": "sample_every", "sync_ref_model": "ref_refresh_steps",
}  # fmt: skip


def base_type(hint: Any) -> Any:
    """The type of an option's value where it is not None."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def closest(name: str, known: Collection[str]) -> str:
    """What a mistyped or foreign option is likely to mean, as the end of a message, and written as it was: with dashes or not."""
    plain = name.lstrip("-").replace("-", "_")
    meant = ELSEWHERE.get(plain) or near_name(plain, known)
    if not meant:
        return "`python -m grpo_kernels train --help` lists all."
    return f"did you mean {'--' + meant.replace('_', '-') if name.startswith('--') else meant}?"


def read(path: str, config: type) -> dict[str, Any]:
    """The options in a file, by their names in `config`. Keys are names with dashes or underscores. Raises ValueError with file,
    line and key for an unknown key, one that is there twice, or a value of another type."""
    yaml = require("yaml")
    hints = typing.get_type_hints(config)
    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file.read())
        node = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config={path!r} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"config={path!r} is not YAML: {error}") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"config={path!r}: it must be lines of `option: value`.")
    options: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, where = str(key_node.value), f"config={path!r}, line {key_node.start_mark.line + 1}"
        name = key.replace("-", "_")
        if name not in hints:
            raise ValueError(f"{where}: there is no option {key!r}: {closest(key, hints)}")
        if name in options:
            raise ValueError(f"{where}: {key!r} is there twice: keep one.")
        try:
            value = loader.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            raise ValueError(f"{where}: {key!r} cannot be read: {error}") from error
        options[name] = _typed(value, hints[name], f"{where}: {key}={value!r}")
    return options


def _typed(value: Any, hint: Any, where: str) -> Any:
    """A value as the type of its option; what YAML takes for another type is an error, but for numbers such as 1e-6."""
    kind = base_type(hint)
    if value is None and kind is not hint:
        return None
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        if not isinstance(value, list):
            raise ValueError(f"{where}: it must be a list, as in [{value}].")
        return [_typed(each, inner, where) for each in value]
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif type(value) is kind:
        return value
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a text; put it between quotes"}[kind]
    raise ValueError(f"{where}: it must be {expected}.")


def write(config: Any, path: Path) -> None:
    """All options of a run, in their groups."""
    yaml = require("yaml")
    text = "# All options of this run. Another one like it: python -m grpo_kernels train --config THIS_FILE --out FOLDER\n"
    for title, fields in itertools.groupby(dataclasses.fields(config), key=lambda f: f.metadata["group"]):
        values = {f.name: getattr(config, f.name) for f in fields}
        text += f"\n# {title}\n" + yaml.safe_dump(
            values, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
        )
    path.write_text(text, encoding="utf-8")
