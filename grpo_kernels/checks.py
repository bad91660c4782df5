"""Checks of arguments, and the tensors of a batch as flat rows.

Every message names the argument, its value, and what to pass instead.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable
from dataclasses import fields
from itertools import pairwise
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

C = TypeVar("C", bound="Checked")

#: Bounds for "above 0" and "finite".
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max

#: Keys of the warnings that were issued, see `warn_once`.
_warned: set[str] = set()

_PACKAGE = __name__.partition(".")[0]


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    """Raise ValueError "{name}={value}: {remedy}" unless ok.

    ok       whether the argument is right
    name     the argument
    value    what the caller passed
    remedy   what to pass instead
    """
    if not ok:
        raise ValueError(f"{name}={value!r}: {remedy}")


def require_number(
    name: str, value: object, remedy: str, low: float = -math.inf, high: float = math.inf
) -> None:
    """Raise ValueError unless value is a real number in [low, high].

    Python's and NumPy's numbers are accepted. bool, tensors, strings and NaN are refused.

    name     the argument that the message names
    remedy   what to pass instead, the end of the message
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(is_number and low <= as_number(value) <= high, name, value, remedy)


def require_one_of(name: str, value: object, known: Collection[str]) -> None:
    """Raise ValueError unless value is one of the known names. Suggest the nearest one.

    name   the argument that the message names
    """
    if value not in known:
        remedy = f"it must be one of {', '.join(known)}.{nearest(value, known)}"
        require(False, name, value, remedy)


def near_name(value: object, known: Iterable[str]) -> str:
    """Return the known name that a misspelt one is likely to mean, "" if none is near.

    The first rule that finds a name decides:

    1. the same words, whatever the case and separators: "dapo_loss" and "DAPO loss" mean "dapo"
    2. the same letters in another order
    3. similar letters (difflib)
    4. one word of the misspelt name: "my_dapo" means "dapo"
    """
    text = str(value).lower()
    names = list(known)
    words = [word for word in re.split(r"\W+|_", text.removesuffix("loss")) if word]
    for name in names:
        if name.split("_") == words:
            return name
    with_same_letters = [name for name in names if sorted(name) == sorted(text)]
    with_similar_letters = difflib.get_close_matches(text, names, n=1)
    that_are_a_word = [name for name in names if name in text.split("_")]
    near = with_same_letters or with_similar_letters or that_are_a_word
    return near[0] if near else ""


def nearest(value: object, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest known name, "" if none is near."""
    name = near_name(value, known)
    return f" Did you mean {name}?" if name else ""


def refuse_unknown(
    owner: str, given: Iterable[str], known: Collection[str], remedy: str = ""
) -> None:
    """Raise TypeError if a keyword is no argument of `owner`. Suggest the nearest one that is.

    owner    name of the function or class that was called
    given    the keywords that the caller passed
    known    the keywords that `owner` has
    remedy   the end of the message; "": the list of `known`
    """
    for name in given:
        if name not in known:
            remedy = remedy or f"It has {', '.join(known) or 'none'}."
            raise TypeError(f"{name!r} is no argument of {owner}.{nearest(name, known)} {remedy}")


class Checked:
    """The base of dataclasses that check their fields.

    The constructor suggests a field for a misspelt keyword. It checks the fields in `ranges`,
    unless they have their default, and turns numbers of NumPy into Python's.
    """

    #: Fields that are numbers: (their names with spaces between, what to pass, lowest, highest).
    ranges: ClassVar[tuple[tuple[Any, ...], ...]] = ()

    def __new__(cls: type[C], *values: Any, **named: Any) -> C:
        """Return a new instance. Raise TypeError for a keyword that the constructor does not have.

        Python calls this before the constructor. The constructor would raise a TypeError as well,
        but without suggesting a field.
        """
        # The keywords are read from the constructor itself: a user's subclass may have one whose
        # arguments are not the fields.
        code: Any = getattr(cls.__init__, "__code__", None)
        if code is None or not named:
            return super().__new__(cls)
        accepts_any_keyword = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        if not accepts_any_keyword:
            num_arguments = code.co_argcount + code.co_kwonlyargcount
            names_without_self = list(code.co_varnames[1:num_arguments])
            refuse_unknown(cls.__name__, named, names_without_self)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the fields in `ranges`. Raise ValueError for a value out of its range.

        A field that has its default is not checked. A default may be outside of the range, as None.
        """
        for names, remedy, *bounds in self.ranges:
            for name in names.split():
                value = getattr(self, name)
                # The class has the default of a field as an attribute. For a field without a
                # default, `self` takes its place, which is no value of a field.
                default = getattr(type(self), name, self)
                if value is not default:
                    require_number(name, value, remedy, *bounds)
                    # A frozen dataclass does not allow an assignment.
                    object.__setattr__(self, name, as_number(value))


def warn_once(message: str, key: str | None = None) -> None:
    """Issue a RuntimeWarning, once per process and key.

    The warning shows the line of the user's code that called this package.

    key   identifies the warning; None: the message itself. Pass a key if the message contains
          numbers that differ from call to call.
    """
    key = message if key is None else key
    if key in _warned:
        return
    _warned.add(key)
    # Go up to the first frame outside of this package and torch, which may call this package.
    frame = sys._getframe(1)
    stacklevel = 2
    while frame.f_back is not None and _top_package(frame) in (_PACKAGE, "torch"):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)


def _top_package(frame: FrameType) -> str:
    """Return the first part of the name of the module whose code runs in a frame, e.g. "torch"."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def as_number(value: Any) -> Any:
    """Return a NumPy number as a Python number, and anything else unchanged."""
    # Tensors have `item` as well, but are no numbers.Real.
    return value.item() if isinstance(value, numbers.Real) and hasattr(value, "item") else value


def require_whole(name: str, value: object, remedy: str, low: int = 1) -> None:
    """Raise ValueError unless value is an integer (Python's or NumPy's, no bool) of at least `low`.

    name     the argument that the message names
    remedy   what to pass instead, the end of the message
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(is_whole and value >= low, name, value, remedy)  # type: ignore[operator]


def check_temperature(temperature: Any) -> None:
    """Raise ValueError unless the temperature is a finite number above 0, or a float tensor.

    A tensor must not require grad. Its values are checked later, when the shape of targets is known
    (`inverse_temperatures`).
    """
    if not isinstance(temperature, torch.Tensor):
        remedy = "it divides the logits and must be a finite number above 0."
        require_number("temperature", temperature, remedy, low=SMALLEST, high=LARGEST)
        return
    if not temperature.is_floating_point():
        raise ValueError(
            f"temperature has dtype {temperature.dtype}: pass a floating-point tensor."
        )
    if temperature.requires_grad:
        raise ValueError(
            "temperature requires grad, but no gradient flows to it: pass temperature.detach()."
        )


def describe(spec: Any) -> str:
    """Return the repr of a dataclass or named tuple that holds tensors.

    Tensors are shown as dtype and shape. Fields that are None are left out.
    """
    names = getattr(spec, "_fields", None) or [f.name for f in fields(spec) if f.repr]
    shown = []
    for name in names:
        value = getattr(spec, name)
        if value is not None:
            shown.append(f"{name}={_describe_value(value)}")
    return f"{type(spec).__name__}({', '.join(shown)})"


def _describe_value(value: Any) -> str:
    """Return how `describe` shows the value of a field: a tensor as dtype and shape."""
    if isinstance(value, dict):
        items = [f"{name}: {_describe_value(item)}" for name, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)


#: What to do with a target that is not in its candidate set: add it to the set, use the whole
#: vocabulary, mask the token, or raise ValueError.
MISSING = ("include", "full", "mask", "raise")


def check_missing(missing: object, hint: str = "") -> None:
    """Raise ValueError unless `missing` is one of MISSING. `hint` ends the message."""
    remedy = f"it must be one of {', '.join(map(repr, MISSING))}.{hint}"
    require(missing in MISSING, "missing", missing, remedy)


# ---- tensors of a batch

#: Dtypes of token ids and of row numbers.
INTEGERS = (torch.int32, torch.int64)
#: Dtypes of logits, hidden states and weights.
MATMUL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: All dtypes, all floating-point ones, and all dtypes of whole numbers and bools.
DTYPES = frozenset(x for x in vars(torch).values() if isinstance(x, torch.dtype))
FLOATING = frozenset(x for x in DTYPES if x.is_floating_point)
INTEGRAL = frozenset(x for x in DTYPES if not (x.is_floating_point or x.is_complex))


def require_tensor(
    name: str, x: Any, dtypes: Collection[torch.dtype], remedy: str, verb: str = "is"
) -> None:
    """Raise ValueError unless x is a tensor of one of these dtypes.

    The message is "{name} {verb} {dtype or type of x}: pass {remedy}."

    name     the argument that the message names
    x        what the caller passed
    dtypes   the dtypes that x may have
    remedy   what to pass instead
    verb     "is", or "are" for an argument in the plural
    """
    if isinstance(x, Tensor) and x.dtype in dtypes:
        return
    what = x.dtype if isinstance(x, Tensor) else f"a {type(x).__name__}"
    # The outputs of the public functions are often passed in place of their log-probs.
    hint = ", .logps of it" if hasattr(x, "logps") else ""
    raise ValueError(f"{name} {verb} {what}: pass {remedy}{hint}.")


def require_shape(name: str, x: Tensor, shape: torch.Size, other_name: str) -> None:
    """Raise ValueError unless x, the argument `name`, has the shape of `other_name`."""
    if x.shape != shape:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, but {other_name} has {list(shape)}: they must be"
            " the same."
        )


def require_device(name: str, x: Tensor, device: torch.device, other_name: str) -> None:
    """Raise ValueError unless x, the argument `name`, is on the device of `other_name`."""
    if x.device != device:
        raise ValueError(
            f"{name} is on {x.device}, but {other_name} is on {device}: move it there."
        )


def refuse_where(is_bad: Tensor, name: str, x: Tensor, remedy: str) -> None:
    """Raise ValueError "{name}[index]={element}{remedy}" for the first bad element of x, if any.

    The host waits for a GPU to know.

    is_bad   bool, the shape of x
    """
    if is_bad.any():
        index = is_bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{index}={x[tuple(index)].item()}{remedy}")


def values_are_checked(tensor: Tensor) -> bool:
    """Return whether the values of a tensor (ids, temperatures, offsets) are checked.

    On a CPU they are. On a GPU the host would have to wait for them, so they are checked only with
    GRPO_KERNELS_CHECK=1 in the environment. Under torch.compile there are no values while it
    traces, and the operators check them when they run. Shapes, dtypes and devices are always
    checked.
    """
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" or os.environ.get("GRPO_KERNELS_CHECK", "0") == "1"


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured on a device's current stream (torch.cuda.graph).

    While it is, the host cannot read values of the device.
    """
    if device.type == "meta":  # torch has no module for it
        return False
    module = torch.get_device_module(device)
    # Not every torch has this function for xpu.
    query = getattr(module, "is_current_stream_capturing", None)
    return query is not None and bool(query())


def check_targets(
    targets: Tensor, mask: Tensor | None, vocab: int, has_logits: bool = False
) -> None:
    """Raise ValueError naming the first target outside of [0, vocab) that is not masked.

    Nothing is checked on a GPU, where the host would have to wait (`values_are_checked`).

    targets      int64, any shape
    mask         bool, the shape of targets: targets to check; None: all
    vocab        number of ids
    has_logits   whether the caller passed logits, whose last dimension is `vocab`. They may have
                 been hidden states by mistake, so the message says where those belong.
    """
    if not values_are_checked(targets) or targets.numel() == 0:
        return
    # Minimum and maximum are fast, and tell in most calls that no target is outside.
    low, high = targets.aminmax()
    if int(low) >= 0 and int(high) < vocab:
        return
    is_outside = (targets < 0) | (targets >= vocab)
    if mask is not None:
        is_outside = is_outside & mask
    remedy = (
        f" is outside the vocabulary [0, {vocab}). Mask the position (mask=False) if it is"
        " padding; its id may then be anything."
    )
    if has_logits:
        remedy += (
            " If the logits are hidden states: those go to linear_grpo_loss or linear_logprobs."
        )
    refuse_where(is_outside, "targets", targets, remedy)


def check_rows(rows: Any, targets: Tensor) -> None:
    """Raise ValueError unless `rows` is an integer tensor of the shape and device of targets.

    rows   which row of the logits predicts each token, as the caller passed it
    """
    remedy = (
        "int64 numbers of rows of the logits or hidden states, one for each target, in their shape"
    )
    require_tensor("rows", rows, INTEGERS, remedy)
    require_shape("rows", rows, targets.shape, "targets")
    require_device("rows", rows, targets.device, "targets")


def check_row_numbers(rows: Tensor, mask: Tensor | None, num_rows: int) -> None:
    """Raise ValueError naming the first token whose row is not in [0, num_rows).

    Nothing is checked on a GPU, where the host would have to wait (`values_are_checked`). Masked
    tokens may have any row number, because row 0 is used for them. If there is no row at all
    (num_rows = 0), they are refused as well.

    rows       integer: which row of the logits predicts each token
    mask       bool, the shape of rows: tokens to check; None: all
    num_rows   number of rows of the logits or hidden states
    """
    if not values_are_checked(rows):
        return
    is_outside = (rows < 0) | (rows >= num_rows)
    if mask is not None and num_rows > 0:
        is_outside = is_outside & mask
    hint = ", or mask the token" if num_rows > 0 else ""
    remedy = (
        f" is none of the {num_rows} rows of the logits or hidden states, which count from 0 in"
        f" the order in which they lie: pass the row that predicts the token{hint}."
    )
    refuse_where(is_outside, "rows", rows, remedy)


def leading_shape(x: Any, targets: Tensor) -> torch.Size:
    """Return the shape of x without its last dimension: [B, T] for logits [B, T, V].

    x         logits or hidden states, as the caller passed them, still unchecked
    targets   its shape is returned if x is no such tensor. A later check refuses x then.
    """
    return x.shape[:-1] if isinstance(x, Tensor) and x.dim() > 1 else targets.shape


def flat(x: Tensor) -> Tensor:
    """Return x as a contiguous vector, which kernels need."""
    return x.flatten().contiguous()


def as_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """Return a mask as bool of `shape`. Integers 0 and 1, as tokenizers return them, are accepted.

    name    the argument that an error names
    mask    what the caller passed
    shape   the shape of targets

    Raises ValueError for other numbers (on a GPU they count as True), dtypes and shapes.
    """
    require_tensor(name, mask, DTYPES, "a bool tensor, the shape of targets")
    require_shape(name, mask, shape, "targets")
    remedy = f"a bool (or 0/1 integer) tensor, for example {name}.bool()"
    require_tensor(name, mask, INTEGRAL, remedy)
    if mask.dtype == torch.bool:
        return mask
    is_set = mask != 0
    if values_are_checked(mask):
        remedy = (
            ": pass a bool (or 0/1 integer) tensor, for example labels != -100 or segments > 0."
        )
        refuse_where(is_set & (mask != 1), name, mask, remedy)
    return is_set


def check_mask(mask: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """Return the argument `mask` as bool of `shape`, or None (no row is masked) if it is None.

    Raises ValueError if it has another shape or dtype, or is not on `device`.
    """
    if mask is None:
        return None
    mask = as_mask("mask", mask, shape)
    require_device("mask", mask, device, "the rows")
    return mask


def check_offsets(name: str, packed: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless cu_seqlens splits the tokens of `packed` [N] into sequences.

    Its numbers must not decrease, from 0 to N. On a GPU only its shape and dtype are checked.

    name         the argument that `packed` is, for errors
    packed       a tensor with one element a token, all sequences one after the other
    cu_seqlens   int32 or int64 [num_sequences + 1]: sequence s has the tokens cu_seqlens[s] to
                 cu_seqlens[s + 1] - 1
    """
    if packed.dim() != 1:
        is_row = packed.dim() == 2 and packed.shape[0] == 1
        hint = f" Pass {name}[0], and the same of what goes with it." if is_row else ""
        raise ValueError(
            f"cu_seqlens goes with packed tokens [N], but {name} has shape"
            f" {list(packed.shape)}.{hint}"
        )
    remedy = "int32 [B + 1], starting at 0"
    require_tensor("cu_seqlens", cu_seqlens, INTEGERS, remedy)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}: pass {remedy}.")
    if not values_are_checked(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    num_rows = packed.numel()
    is_rising = all(start <= stop for start, stop in pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != num_rows or not is_rising:
        raise ValueError(
            f"cu_seqlens={offsets}: it must rise from 0 to the number of rows, {num_rows}."
        )


def sequence_ids(cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """Return which sequence each packed row is in, int64 [num_rows].

    The host does not wait for a GPU.

    cu_seqlens   int32 or int64 [num_sequences + 1]: the first row of each sequence, and num_rows
    """
    # Row r is in the sequence s with cu_seqlens[s] <= r < cu_seqlens[s + 1]. So s is the number of
    # sequence ends that are at most r.
    rows = torch.arange(num_rows, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long().contiguous(), rows, right=True)


def per_token(
    name: str, value: Tensor, shape: torch.Size, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return one fp32 number for each token, [num_tokens], without gradient.

    name         the argument that an error names
    value        a number for each token (the shape of targets), for each sequence ([B] or [B, 1]),
                 or for all (0-d)
    shape        the shape of targets
    cu_seqlens   boundaries of packed sequences; None if targets are not packed

    Raises ValueError for a value of another shape.
    """
    check_token_shape(name, value.shape, shape, cu_seqlens)
    return expand_to_tokens(value, shape, cu_seqlens).flatten()


def check_token_shape(
    name: str, value_shape: torch.Size, shape: torch.Size, cu_seqlens: Tensor | None = None
) -> None:
    """Raise ValueError unless a value is one number per token, per sequence, or for all tokens.

        per token      the shape of targets
        per sequence   [B] or [B, 1]; refused if the sequences are not known
        for all        0-d

    name          the argument that the message names
    value_shape   the shape of the value
    shape         the shape of targets: [B, T], or [N] for packed sequences
    cu_seqlens    int [B + 1], boundaries of packed sequences. Without them those are not known.
    """
    if value_shape == shape or len(value_shape) == 0:
        return
    is_packed = len(shape) == 1
    if is_packed and cu_seqlens is None:
        raise ValueError(
            f"{name} has shape {list(value_shape)}, but targets of shape {list(shape)} want"
            f" {list(shape)}. (Packed sequences take one per sequence in a TokenBatch with"
            " cu_seqlens.)"
        )
    per_sequence = shape[:1] if cu_seqlens is None else (cu_seqlens.numel() - 1,)  # [B]
    # One dimension of size 1 for each dimension of targets after the first, at least one.
    column = (*per_sequence, *(1,) * max(1, len(shape) - 1))  # [B, 1]
    if value_shape not in (per_sequence, column):
        raise ValueError(
            f"{name} has shape {list(value_shape)}, but targets of shape {list(shape)} want"
            f" {list(shape)}, {list(per_sequence)} or {list(column)}: one per token, or per"
            " sequence."
        )


def expand_to_tokens(value: Tensor, shape: torch.Size, cu_seqlens: Tensor | None) -> Tensor:
    """Return one fp32 number per token, in the shape of targets or flat, without gradient.

    value        a number for each token, each sequence or all tokens, of a shape that
                 `check_token_shape` accepts
    shape        the shape of targets
    cu_seqlens   int [B + 1], boundaries of packed sequences, or None

    Values per sequence of packed targets are copied to [N]. Any other result is a view of the value
    if it is fp32.
    """
    # Both calls return the tensor itself if it needs no change, but they cost some microseconds.
    if value.requires_grad:
        value = value.detach()
    if value.dtype != torch.float32:
        value = value.float()
    if value.shape == shape:
        return value
    if cu_seqlens is not None and value.dim() > 0:  # one value per packed sequence
        return value.flatten()[sequence_ids(cu_seqlens, shape.numel())]
    # [B], [B, 1] or 0-d -> [B, 1, ...] or [1, 1, ...], which broadcasts to the shape of targets.
    num_other_dims = len(shape) - 1
    return value.reshape(-1, *(1,) * num_other_dims).expand(shape)


def inverse_temperatures(
    temperature: float | Tensor,
    shape: torch.Size,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    device: torch.device,
) -> float | Tensor:
    """Return 1 / temperature: a float, or fp32 [num_tokens] if the temperature is a tensor.

    temperature   a number, or a float tensor with a number for each token, each sequence or all
                  tokens
    shape         the shape of targets
    mask          bool of that shape: tokens whose temperature is checked; None: all
    cu_seqlens    int [B + 1], boundaries of packed sequences, or None
    device        device of the other tensors of the call, where the temperature must be too

    Raises ValueError if a tensor has another shape or device, or a value that is not finite and
    above 0.
    """
    if not isinstance(temperature, Tensor):
        return 1.0 / float(temperature)
    require_device("temperature", temperature, device, "the input")
    per_token_values = per_token("temperature", temperature, shape, cu_seqlens)
    if values_are_checked(per_token_values):
        is_bad = ~((per_token_values > 0) & torch.isfinite(per_token_values))
        if mask is not None:
            is_bad = is_bad & mask.flatten()
        refuse_where(is_bad, "temperature", per_token_values, ": it must be finite and above 0.")
    return per_token_values.reciprocal().contiguous()


def is_leaf_or_view_of_leaf(logits: Tensor) -> bool:
    """Return whether logits are a leaf of autograd that requires grad, or a view of one.

    A gradient must not be written over such logits: the values and .grad of the leaf would share
    memory. torch, too, refuses in-place operations on a leaf.
    """
    base = logits if logits._base is None else logits._base
    return torch.is_grad_enabled() and base.is_leaf and base.requires_grad


# ---- tensors that autograd and torch.func watch


def plain(x: Tensor) -> Tensor:
    """Return the tensor inside the wrappers that torch.func puts around x; x itself if it has none.

    Kernels cannot read a wrapper. A gradient does not flow to x this way.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return torch's version counter of each tensor, which every write in place increases.

    Equal results of two calls mean that no tensor was written to in between. None, and tensors of
    inference mode, which have no counter, are left out.
    """
    return [x._version for x in tensors if x is not None and not x.is_inference()]
