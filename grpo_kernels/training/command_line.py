"""Options as text: fields of a dataclass as arguments of a command, and names that have options of their own."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import typing
from typing import Any

from . import config_file
from .config_file import base_type, closest

T = typing.TypeVar("T")


def with_options(text: str) -> tuple[str, dict[str, typing.Any]]:
    """A name, and the options that follow it as in "name:key=value,key=value"."""
    name, _, rest = text.partition(":")
    options = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: options are written as name:key=value,key=value.")
        options[key.strip()] = _value(value.strip())
    return name.strip(), options


def _value(text: str) -> typing.Any:
    for read in (ast.literal_eval, float):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


#: How values are named in the help where an option does not say.
KINDS = {int: "N", float: "X", str: "TEXT"}


def parse_args(argv: list[str], config: type[T]) -> T:
    """A dataclass from `--field value` arguments, and from the file that `--config` names; what is among the arguments wins. A bad
    one ends the program with its message."""
    parser, names = _parser(config), [f.name for f in dataclasses.fields(config)]  # type: ignore[arg-type]
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"there is no option {unknown[0]!r}: {closest(unknown[0], names)}")
    options = vars(given)
    path = options.pop("config", None)
    try:
        options = (config_file.read(path, config) if path is not None else {}) | options
        missing = [f.name for f in dataclasses.fields(config) if f.default == "" and not options.get(f.name)]  # type: ignore[arg-type]
        if missing:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ValueError(f"{flags} must be given{'' if path is None else f', here or in {path}'}.")
        return config(**options)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))


def _parser(config: type) -> argparse.ArgumentParser:
    """Options that are not given leave no value: the file may have one."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels train",
        usage="%(prog)s --model NAME --dataset NAME [option ...]\n       %(prog)s --config FILE [option ...]",
        description="Train a causal language model with GRPO.",
        epilog="Exit status: 0 done; 128 + the signal's number (130, 143) stopped by it after a step, with a checkpoint that --resume "
        "goes on from; 2 an argument is wrong.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    text = (
        "YAML file of options by their names here, `max_new_tokens: 64`; what the command line says wins. A run writes its own "
    )
    parser.add_argument("--config", metavar="FILE", help=text + "into out/config.yaml (default: none)")
    hints, groups = typing.get_type_hints(config), dict[str, Any]()
    for f in dataclasses.fields(config):
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            "--" + f.name.replace("_", "-"), help=_help(f), **_reading(hints[f.name], f.metadata["unit"])
        )
    return parser


def _reading(hint: Any, unit: str | None) -> dict[str, Any]:
    """How argparse reads an option of a type."""
    kind = base_type(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        return {"type": inner, "nargs": "*", "metavar": unit or KINDS[inner]}
    return {"type": kind, "metavar": unit or KINDS[kind]}


def _help(f: dataclasses.Field) -> str:
    """What an option does and its default, with % as argparse wants it."""
    text = f.metadata["help"]
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    if default == "":
        text += " (required)"
    elif default is not None:
        shown = " ".join(map(str, default)) or "none" if isinstance(default, list) else default
        text += f" (default: {'on' if default is True else 'off' if default is False else shown})"
    return text.replace("%", "%%")
