"""What a model does to its logits before the softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backends import RowTransform
from .checks import LARGEST, SMALLEST, require, require_number, values_are_checked
from .layout import per_token

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class LogitTransform:
    """What the model does to its logits before the softmax: z = softcap * tanh(x * scale / softcap) / temperature.

    temperature: a number > 0, or a tensor > 0: 0-d, per sequence [B] or per token (the shape of targets).
    softcap: a number > 0, or None. scale: a finite number, not 0. The order is scale, softcap, temperature.
    Logits that come out of a model's own forward already carry its scale and softcap: pass the temperature only.
    """

    temperature: float | Tensor = 1.0
    softcap: float | None = None
    scale: float = 1.0

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
        require(self.scale != 0, "scale", self.scale, "it multiplies the logits and must be finite and not 0.")

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


def as_transform(transform: LogitTransform | None) -> LogitTransform:
    if transform is not None and not isinstance(transform, LogitTransform):
        raise ValueError(f"transform={transform!r}: pass a LogitTransform, for example LogitTransform(temperature=0.7).")
    return transform or LogitTransform()
