"""Options as text: fields of a dataclass as arguments of a command, and names that have options of their own."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import types
import typing

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


def parse_args(argv: list[str], config: type[T]) -> T:
    """A dataclass from `--field value` arguments; a bad one ends the program with its message."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels train",
        description="Train a causal language model with GRPO.",
        epilog="Exit status: 0 done; 128 + the signal's number (130, 143) stopped by it after a step, with a checkpoint that --resume "
        "goes on from; 2 an argument is wrong.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    hints = typing.get_type_hints(config)
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        kind = hints[f.name]
        if isinstance(kind, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
        options: dict[str, typing.Any] = {"type": kind}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(kind) is list:
            options = {"type": typing.get_args(kind)[0], "nargs": "+"}
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        # argparse formats help with %, and shows defaults only where there is a text.
        text = f.metadata["help"].replace("%", "%%")
        parser.add_argument("--" + f.name.replace("_", "-"), default=default, required=default == "", help=text, **options)
    try:
        return config(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
