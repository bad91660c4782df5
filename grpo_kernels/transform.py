"""The transform that a model applies to its logits before the softmax."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch

from .architectures import language_model, logits_of
from .checks import LARGEST, SMALLEST, as_number, describe, require, require_number, with_hints
from .layout import per_token, values_are_checked
from .rows.partials import RowTransform

Tensor = torch.Tensor


@with_hints
@dataclass(frozen=True, eq=False, repr=False)
class LogitTransform:
    """What the model does to its logits before the softmax: z = softcap * tanh(x * scale / softcap) / temperature.

    temperature: a number > 0, or a tensor > 0: 0-d, per sequence [B] or per token (the shape of targets).
    softcap: a number > 0, or None. scale: a finite number, not 0. The order is scale, softcap, temperature.
    Logits that come out of a model's own forward already carry its scale and softcap: pass the temperature only. Hidden states
    do not: `LogitTransform.of(model)` knows what its forward does after the head.
    """

    temperature: float | Tensor = 1.0
    softcap: float | None = None
    scale: float = 1.0
    __repr__ = describe

    def __post_init__(self) -> None:
        t = self.temperature
        if isinstance(t, Tensor):
            if not t.is_floating_point():
                raise ValueError(f"temperature has dtype {t.dtype}: pass a floating-point tensor.")
            if t.requires_grad:
                raise ValueError("temperature requires grad, but no gradient flows to it: pass temperature.detach().")
        else:
            require_number("temperature", t, "it divides the logits and must be a finite number above 0.", SMALLEST, LARGEST)
        if self.softcap is not None:
            remedy = "it must be a finite number above 0, or None for no softcap."
            require_number("softcap", self.softcap, remedy, SMALLEST, LARGEST)
        require_number("scale", self.scale, "it multiplies the logits and must be finite and not 0.", -LARGEST, LARGEST)
        for name in ("temperature", "softcap", "scale"):
            object.__setattr__(self, name, as_number(getattr(self, name)))
        require(self.scale != 0, "scale", self.scale, "it multiplies the logits and must be finite and not 0.")

    @classmethod
    def of(cls, model: Any, *, temperature: float | Tensor = 1.0) -> LogitTransform:
        """What the forward of a causal language model of transformers does to head(hidden), followed by the temperature.

            logps, _ = linear_logprobs(hidden, model.lm_head.weight, targets, transform=LogitTransform.of(model))

        model        the language model, also inside PEFT's, DDP's or torch.compile's wrappers; softcap and scale are those of its
                     config: Gemma-2, -3n and -4, Granite, Cohere, HyperCLOVA X, MiniCPM, Falcon-H1 and others have one.
        temperature  as in the fields.

        Raises ValueError for a model that is not known to have plain logits or one of these (see architectures.py)."""
        softcap, scale = logits_of(language_model(model))
        return cls(temperature, softcap, scale)

    def for_rows(self, shape: torch.Size, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> RowTransform:
        """The transform of the flat rows of targets of `shape` (packed: cut by `cu_seqlens`) on `device`; a temperature
        tensor becomes one inverse per row, checked where mask is set."""
        t = self.temperature
        inverse: float | Tensor
        if isinstance(t, Tensor):
            if t.device != device:
                raise ValueError(f"temperature is on {t.device}, but the logits are on {device}: move it there.")
            t = per_token("temperature", t, shape, cu_seqlens)
            if values_are_checked(t):
                bad = ~((t > 0) & torch.isfinite(t))
                if mask is not None:
                    bad &= mask.reshape(-1)
                if bad.any():
                    at = int(bad.nonzero()[0])
                    raise ValueError(f"temperature is {float(t[at])} at row {at}: it must be finite and above 0.")
            inverse = t.reciprocal().contiguous()
        else:
            inverse = 1.0 / float(t)
        return RowTransform(float(self.scale), float(self.softcap or 0.0), inverse)


AS_THEY_ARE = LogitTransform()
IDENTITY = RowTransform(1.0, 0.0, 1.0)  # the same, of rows


def as_transform(transform: LogitTransform | None) -> LogitTransform:
    if transform is not None and not isinstance(transform, LogitTransform):
        given = transform if isinstance(transform, numbers.Real) else f"a {type(transform).__name__}"
        temperature = transform if isinstance(transform, numbers.Real) else 0.7
        raise ValueError(f"transform is {given}: pass a LogitTransform, for example LogitTransform(temperature={temperature}).")
    return transform or AS_THEY_ARE
