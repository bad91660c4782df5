"""Checks of arguments, and the tensors of a batch as flat rows.

Every message names the argument, its value and the remedy.
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
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

C = TypeVar("C", bound="Checked")

#: Bounds for "above 0" and "finite".
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max

_warned: set[str] = set()


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    """Raise ValueError unless ok, with the name and value of an argument and what to pass."""
    if not ok:
        raise ValueError(f"{name}={value!r}: {remedy}")


def require_number(
    name: str, value: object, remedy: str, low: float = -math.inf, high: float = math.inf
) -> None:
    """Raise ValueError unless value is a real number in [low, high].

    Numbers of Python and NumPy are accepted, bool, tensors, strings and NaN are not.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(is_number and low <= as_number(value) <= high, name, value, remedy)


def require_one_of(name: str, value: object, known: Collection[str]) -> None:
    """Raise ValueError unless value is a known name. The message suggests the nearest one."""
    if value not in known:
        remedy = f"it must be one of {', '.join(known)}.{nearest(value, known)}"
        require(False, name, value, remedy)


def near_name(value: object, known: Iterable[str]) -> str:
    """Return the known name that a misspelt one is likely to mean, "" if none is near."""
    text = str(value).lower()
    names = list(known)
    # "dapo_loss" and "DAPO loss" mean "dapo".
    words = [word for word in re.split(r"\W+|_", text.removesuffix("loss")) if word]
    for name in names:
        if name.split("_") == words:
            return name
    has_same_letters = [name for name in names if sorted(name) == sorted(text)]
    is_word_of_it = [name for name in names if name in text.split("_")]
    near = has_same_letters or difflib.get_close_matches(text, names, 1) or is_word_of_it
    return near[0] if near else ""


def nearest(value: object, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest known name, "" if none is near."""
    name = near_name(value, known)
    return f" Did you mean {name}?" if name else ""


def refuse_unknown(
    owner: str, given: Iterable[str], known: Collection[str], remedy: str = ""
) -> None:
    """Raise TypeError for the first of the keywords `given` that `owner` does not know.

    The message suggests the nearest known keyword.
    """
    for name in given:
        if name not in known:
            remedy = remedy or f"It has {', '.join(known) or 'none'}."
            raise TypeError(f"{name!r} is no argument of {owner}.{nearest(name, known)} {remedy}")


class Checked:
    """The base of dataclasses that check their fields.

    The constructor suggests a field for a misspelt keyword. It checks fields that are numbers in a
    range (`ranges`), unless they have their default, and turns numbers of NumPy into Python's.
    """

    #: For numbers: (names of fields, what to pass, lowest, highest).
    ranges: ClassVar[tuple[tuple[Any, ...], ...]] = ()

    def __new__(cls: type[C], *values: Any, **named: Any) -> C:
        # The constructor of a user's subclass may take other names than the fields.
        code: Any = getattr(cls.__init__, "__code__", None)
        if named and code is not None and not code.co_flags & inspect.CO_VARKEYWORDS:
            refuse_unknown(
                cls.__name__,
                named,
                list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]),
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for names, remedy, *bounds in self.ranges:
            for name in names.split():
                value = getattr(self, name)
                if value is not getattr(type(self), name, self):
                    require_number(name, value, remedy, *bounds)
                    object.__setattr__(self, name, as_number(value))


def warn_once(message: str, key: str = "") -> None:
    """Issue a RuntimeWarning once per process and message, at the line that called this package.
    `key` stands for the message where that contains numbers that differ from call to call.
    """
    key = key or message
    if key not in _warned:
        _warned.add(key)
        inside, frame, level = (__name__.partition(".")[0], "torch"), sys._getframe(1), 2
        while (
            frame.f_back is not None
            and str(frame.f_globals.get("__name__", "")).partition(".")[0] in inside
        ):
            frame, level = frame.f_back, level + 1
        warnings.warn(message, RuntimeWarning, stacklevel=level)


def as_number(value: Any) -> Any:
    """Return a number of NumPy as one of Python, and anything else unchanged."""
    return value.item() if isinstance(value, numbers.Real) and hasattr(value, "item") else value


def require_whole(name: str, value: object, remedy: str, low: int = 1) -> None:
    """Raise ValueError unless value is a whole number, not a bool, of at least `low`."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(is_whole and value >= low, name, value, remedy)  # type: ignore[operator]


def check_temperature(t: Any) -> None:
    """Raise ValueError unless t can be a temperature:

    a finite number above 0, or a tensor of floats without gradient.
    """
    if not isinstance(t, torch.Tensor):
        require_number(
            "temperature",
            t,
            "it divides the logits and must be a finite number above 0.",
            SMALLEST,
            LARGEST,
        )
        return
    if not t.is_floating_point():
        raise ValueError(f"temperature has dtype {t.dtype}: pass a floating-point tensor.")
    if t.requires_grad:
        raise ValueError(
            "temperature requires grad, but no gradient flows to it: pass temperature.detach()."
        )


def describe(spec: Any) -> str:
    """The repr of a dataclass or named tuple that holds tensors: their dtypes and shapes, not their
    values; fields of None are left out.
    """
    names = getattr(spec, "_fields", None) or [f.name for f in fields(spec) if f.repr]
    given = {name: getattr(spec, name) for name in names if getattr(spec, name) is not None}

    def text(x: Any) -> str:
        if isinstance(x, dict):
            return f"{{{', '.join(f'{name}: {text(value)}' for name, value in x.items())}}}"
        return (
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            if isinstance(x, torch.Tensor)
            else repr(x)
        )

    return f"{type(spec).__name__}({', '.join(f'{name}={text(x)}' for name, x in given.items())})"


#: What to do with a target outside of its set: put it in, take the whole vocabulary, mask the row,
#: or refuse.
MISSING = ("include", "full", "mask", "raise")


def check_missing(missing: object, more: str = "") -> None:
    require(
        missing in MISSING,
        "missing",
        missing,
        f"it must be one of {', '.join(map(repr, MISSING))}.{more}",
    )


# ---- tensors of a batch

#: Places of rows that `overlap` looks at before it takes two tensors for overlapping.
MOST_PLACES = 4000


#: Dtypes of ids and numbers of rows, of what goes into a product, all, those of floats, and those
#: of whole numbers and bools.
INTEGERS = (torch.int32, torch.int64)
OF_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = frozenset(x for x in vars(torch).values() if isinstance(x, torch.dtype))
FLOATING = frozenset(x for x in DTYPES if x.is_floating_point)
INTEGRAL = frozenset(x for x in DTYPES if not (x.is_floating_point or x.is_complex))


def require_tensor(
    name: str, x: Any, dtypes: Collection[torch.dtype], remedy: str, verb: str = "is"
) -> None:
    """Raise ValueError unless x is a tensor of one of these dtypes."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        given, logps = (
            x.dtype if isinstance(x, Tensor) else f"a {type(x).__name__}",
            ", .logps of it" * hasattr(x, "logps"),
        )
        raise ValueError(f"{name} {verb} {given}: pass {remedy}{logps}.")


def require_shape(name: str, x: Tensor, shape: torch.Size, of: str) -> None:
    """Raise ValueError unless x has the shape of `of`."""
    if x.shape != shape:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, but {of} has {list(shape)}: they must be the same."
        )


def require_device(name: str, x: Tensor, device: torch.device, of: str) -> None:
    """Raise ValueError unless x is on the device of `of`."""
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but {of} is on {device}: move it there.")


def refuse_where(bad: Tensor, name: str, x: Tensor, remedy: str) -> None:
    """Raise ValueError for the first element of x that `bad` marks."""
    if bad.any():
        at = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{at}={x[tuple(at)].item()}{remedy}")


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
    """Return whether the current stream of a device is being captured into a graph."""
    if device.type == "meta":  # which has no module
        return False
    asked = getattr(
        torch.get_device_module(device), "is_current_stream_capturing", None
    )  # xpu: not in every torch
    return asked is not None and bool(asked())


def check_targets(targets: Tensor, mask: Tensor | None, vocab: int, logits: bool = False) -> None:
    """Raise ValueError naming the first target outside [0, vocab) that is not masked.

    logits   whether `vocab` is the width of given logits, which may be hidden states by mistake
    """
    if not values_are_checked(targets) or targets.numel() == 0:
        return
    low, high = targets.aminmax()
    if int(low) < 0 or int(high) >= vocab:
        wrong = (targets < 0) | (targets >= vocab)
        remedy = (
            f" is outside the vocabulary [0, {vocab}). Mask the position (mask=False) if it is"
            " padding; its id may then be anything."
            + (
                " If the logits are hidden states: those go to linear_grpo_loss or linear_logprobs."
                if logits
                else ""
            )
        )
        refuse_where(wrong if mask is None else wrong & mask, "targets", targets, remedy)


def check_rows(rows: Any, targets: Tensor) -> None:
    """Raise ValueError unless `rows` can name the row of logits that predicts each target."""
    remedy = (
        "int64 numbers of rows of the logits or hidden states, one for each target, in their shape"
    )
    require_tensor("rows", rows, INTEGERS, remedy)
    require_shape("rows", rows, targets.shape, "targets")
    require_device("rows", rows, targets.device, "targets")


def check_named(rows: Tensor, mask: Tensor | None, n: int) -> None:
    """Raise ValueError naming the first token that is not masked and whose row is none of n."""
    if values_are_checked(rows):
        wrong = (rows < 0) | (rows >= n)
        remedy = (
            f" is none of the {n} rows of the logits or hidden states, which count from 0 in the"
            " order in which they lie: pass the row that predicts the"
            f" token{', or mask the token' if n else ''}."
        )
        refuse_where(wrong if mask is None or n == 0 else wrong & mask, "rows", rows, remedy)


def leading_shape(x: Any, targets: Tensor) -> torch.Size:
    """The shape in front of logits or hidden states x of which tokens name rows; that of targets
    where x is no such thing.
    """
    return x.shape[:-1] if isinstance(x, Tensor) and x.dim() > 1 else targets.shape


def flat(x: Tensor) -> Tensor:
    """Return x as a contiguous vector, as kernels read it."""
    return x.flatten().contiguous()


def as_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """Return a mask as bool of `shape`. Integers 0 and 1, as tokenizers return them, are accepted.

    Raises ValueError for other numbers.
    """
    require_tensor(name, mask, DTYPES, "a bool tensor, the shape of targets")
    require_shape(name, mask, shape, "targets")
    require_tensor(
        name, mask, INTEGRAL, f"a bool (or 0/1 integer) tensor, for example {name}.bool()"
    )
    if mask.dtype == torch.bool:
        return mask
    marked = mask != 0
    if values_are_checked(mask):
        remedy = (
            ": pass a bool (or 0/1 integer) tensor, for example labels != -100 or segments > 0."
        )
        refuse_where(marked & (mask != 1), name, mask, remedy)
    return marked


def mask_of_rows(mask: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """Return the mask of rows on `device` as bool of `shape`, None if there is none."""
    if mask is not None:
        mask = as_mask("mask", mask, shape)
        require_device("mask", mask, device, "the rows")
    return mask


def check_offsets(name: str, packed: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless cu_seqlens cuts the tokens of `packed` [N] into sequences."""
    if packed.dim() != 1:
        one = (
            f" Pass {name}[0], and the same of what goes with it."
            if packed.dim() == 2 and packed.shape[0] == 1
            else ""
        )
        raise ValueError(
            f"cu_seqlens goes with packed tokens [N], but {name} has shape"
            f" {list(packed.shape)}.{one}"
        )
    remedy = "int32 [B + 1], starting at 0"
    require_tensor("cu_seqlens", cu_seqlens, INTEGERS, remedy)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}: pass {remedy}.")
    if values_are_checked(cu_seqlens):
        offsets, n = cu_seqlens.tolist(), packed.numel()
        if offsets[0] != 0 or offsets[-1] != n or any(a > b for a, b in pairwise(offsets)):
            raise ValueError(
                f"cu_seqlens={offsets}: it must rise from 0 to the number of rows, {n}."
            )


def sequence_ids(cu_seqlens: Tensor, n: int) -> Tensor:
    """[n] int64:

    the sequence that each packed row belongs to. Computed on the device, without a host sync.
    """
    rows = torch.arange(n, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long().contiguous(), rows, right=True)


def per_token(
    name: str, value: Tensor, shape: torch.Size, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Flat fp32 [N]:

    `value` given per token (the shape of targets), per sequence ([B] or [B, 1]) or as a 0-d tensor.
    """
    check_width(name, value.shape, shape, cu_seqlens)
    return as_wide(value, shape, cu_seqlens).flatten()


def check_width(
    name: str, given: torch.Size, shape: torch.Size, cu_seqlens: Tensor | None = None
) -> None:
    """Raise ValueError unless a tensor of the shape `given` has one value per token of targets of
    `shape`, one per sequence, or one for all.
    """
    sequences = shape[:1] if cu_seqlens is None else (cu_seqlens.numel() - 1,)
    column = (*sequences, *(1,) * max(1, len(shape) - 1))
    known = cu_seqlens is not None or len(shape) > 1
    if given == shape or len(given) == 0 or (known and given in (sequences, column)):
        return
    more = f", {list(sequences)} or {list(column)}: one per token, or per sequence."
    more = (
        more
        if known
        else ". (Packed sequences take one per sequence in a TokenBatch with cu_seqlens.)"
    )
    raise ValueError(
        f"{name} has shape {list(given)}, but targets of shape {list(shape)} want"
        f" {list(shape)}{more}"
    )


def as_wide(value: Tensor, shape: torch.Size, cu_seqlens: Tensor | None) -> Tensor:
    """Values that `check_width` has let pass, fp32 one for each token, a view where possible."""
    value = value.detach() if value.requires_grad else value
    value = value if value.dtype == torch.float32 else value.float()
    if value.shape == shape:
        return value
    if cu_seqlens is not None and value.dim() > 0:
        return value.flatten()[sequence_ids(cu_seqlens, shape.numel())]
    return value.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)


def inverse_temperatures(
    t: float | Tensor,
    shape: torch.Size,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    device: torch.device,
) -> float | Tensor:
    """1 / t of flat rows of targets of `shape` on `device`:

    a number, or of a tensor fp32 [n], checked where mask is set.
    """
    if not isinstance(t, Tensor):
        return 1.0 / float(t)
    require_device("temperature", t, device, "the tensor of logits")
    t = per_token("temperature", t, shape, cu_seqlens)
    if values_are_checked(t):
        bad = ~((t > 0) & torch.isfinite(t))
        bad = bad if mask is None else bad & mask.flatten()
        refuse_where(bad, "temperature", t, ": it must be finite and above 0.")
    return t.reciprocal().contiguous()


def of_a_leaf(logits: Tensor) -> bool:
    """Whether logits are a leaf that requires grad, or a view of one. Written in place, its values
    and its .grad would share memory; torch refuses in-place operations on a leaf, too.
    """
    owner = logits if logits._base is None else logits._base
    return torch.is_grad_enabled() and owner.is_leaf and owner.requires_grad


def whole_rows(x: Tensor) -> Tensor:
    """x with unit stride in its last dimension, as kernels take it:

    itself where it has that, else a copy.
    """
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return x.clone(
        memory_format=torch.contiguous_format
    )  # contiguous() does not change the strides of an empty tensor


def logit_rows(
    logits: Tensor, shape: torch.Size, device: torch.device, inplace: bool, whole: bool = True
) -> Tensor:
    """Logits as [A, T, V] with unit stride in V, in the order of targets of `shape`; a view where
    possible. One rank's part of a cut vocabulary (`whole` False) may have no column.
    """
    require_tensor("logits", logits, OF_PRODUCTS, "a float32, bfloat16 or float16 tensor")
    if logits.shape[:-1] != shape:
        raise ValueError(
            f"logits has shape {list(logits.shape)}, but targets has {list(shape)}: logits must be"
            " targets' shape plus the vocabulary, row i predicting targets[i] (for a model's"
            " output usually logits[:, :-1] against ids[:, 1:])."
        )
    if logits.shape[-1] == 0 and whole:
        raise ValueError(f"logits has shape {list(logits.shape)}: the vocabulary is empty.")
    require_device("logits", logits, device, "targets")
    if inplace and of_a_leaf(logits):
        raise ValueError(
            f"inplace=True, but logits of shape {list(logits.shape)} is a leaf that requires grad,"
            " or a view of one: its values would be overwritten. Pass the output of a computation"
            " (a model's logits), or inplace=False."
        )
    if inplace and (logits.stride(-1) != 1 or overlaps_itself(logits)):
        raise ValueError(
            f"inplace=True, but logits of shape {list(logits.shape)} has strides"
            f" {list(logits.stride())}: it must have unit stride in the vocabulary and no rows that"
            " share memory, as in an expanded dimension. Pass logits.contiguous() or"
            " inplace=False."
        )
    logits = whole_rows(logits)
    if logits.dim() <= 3:
        return logits if logits.dim() == 3 else logits.reshape(1, shape.numel(), logits.shape[-1])
    rows = logits.flatten(0, -3)
    if inplace and rows.data_ptr() != logits.data_ptr():
        raise ValueError(
            f"inplace=True, but logits of shape {list(logits.shape)} has strides that no [.., T, V]"
            " view has."
        )
    return rows


# ---- memory that a call writes: logits in place, and `weight_grad`


def plain(x: Tensor) -> Tensor:
    """x without the wrappers of torch.func: for numbers that have no gradient."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """The version counters of the tensors; a tensor made in inference mode has none."""
    return [x._version for x in tensors if x is not None and not x.is_inference()]


def refuse_overlap(
    name: str, written: Tensor, remedy: str, read: dict[str, Any], row_by_row: dict[str, Any]
) -> None:
    """Raise ValueError where `written` shares memory with a tensor that the same call reads, before
    or after it writes.

    read        the other arguments by name: tensors, and specs, tuples and lists of tensors.
    row_by_row  likewise, of which an element is read only for the element of `written` at the same
                index, and before that is written: these may be all of the same memory, of the same
                dtype, shape and strides. A shifted view may not.

    What counts are the bytes of the elements, not the storage: other columns, rows or halves of one
    block are other memory. That is exact, but for views of different row strides that lie between
    each other in more than MOST_PLACES ways, which are refused.
    """
    ((_, written),) = _tensors(name, written)
    for arguments, same_place in ((read, False), (row_by_row, True)):
        for argument, given in arguments.items():
            for other, x in _tensors(argument, given):
                if overlap(written, x) and not (same_place and _same_place(written, x)):
                    raise ValueError(f"{name} shares memory with {other}: {remedy}")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether an element of x and one of y have a byte in common."""
    first, of_other = x.data_ptr(), y.data_ptr()
    if of_other >= first + _extent(x) or first >= of_other + _extent(y):
        return False
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device or x.is_meta:
        return False
    # The addresses of the bytes of both are first + sum(step * i), 0 <= i <= last. Two are equal
    # where the sum over the steps of both is `apart`, with the indices of y counted from the end.
    steps: Counter[int] = Counter()
    apart, tried = of_other + _extent(y) - 1 - first, 0
    for tensor in (x, y):
        size = tensor.element_size()
        steps[1] += size - 1
        for step, n in zip(tensor.stride(), tensor.shape, strict=True):
            steps[size * step] += n - 1
    del steps[0]

    def is_reached(apart: int, steps: list[tuple[int, int]]) -> bool:
        nonlocal tried
        if not steps:
            return apart == 0
        (step, last), *rest = steps
        reach = sum(step * last for step, last in rest)
        ways = range(max(0, -((reach - apart) // step)), min(last, apart // step) + 1)
        tried += len(ways)
        return tried > MOST_PLACES or any(is_reached(apart - step * i, rest) for i in ways)

    return is_reached(apart, sorted(steps.items(), reverse=True))


def _extent(x: Tensor) -> int:
    """Bytes from the first of x to behind the last."""
    if x.is_contiguous():
        return x.nbytes
    return x.element_size() * (
        1 + sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True))
    )


def overlaps_itself(x: Tensor) -> bool:
    """Whether elements of x may share memory:

    some dimension steps by less than the smaller ones extend.
    """
    extent = 1
    for step, size in sorted(
        (step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1
    ):
        if step < extent:
            return True
        extent += step * (size - 1)
    return False


def _same_place(x: Tensor, y: Tensor) -> bool:
    if (x.data_ptr(), x.dtype, x.shape) != (y.data_ptr(), y.dtype, y.shape):
        return False
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), y.stride(), strict=True))


def _tensors(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a caller gave, as they lie in memory, each with its name."""
    if isinstance(x, Tensor):
        x = plain(x)
        if type(x) is Tensor or not hasattr(x, "__tensor_flatten__"):
            yield name, x
            return
        for inner in x.__tensor_flatten__()[0]:  # of a DTensor the local tensor
            yield from _tensors(name, getattr(x, inner))
    elif isinstance(x, (tuple, list)):
        for i, part in enumerate(x):
            yield from _tensors(f"{name}[{i}]", part)
    else:
        for field in getattr(x, "__dataclass_fields__", ()):
            part = getattr(x, field)
            if part is not None:
                yield from _tensors(f"{name}.{field}", part)
