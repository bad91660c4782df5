"""What a model does to its logits before the softmax."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .architectures import language_model, logits_of
from .checks import (
    LARGEST,
    SMALLEST,
    Checked,
    as_number,
    check_temperature,
    describe,
    inverse_temperatures,
    require,
)
from .core.softmax import RowTransform


@dataclass(frozen=True, eq=False, repr=False)
class LogitTransform(Checked):
    """Scale, softcap and temperature of logits: z = softcap * tanh(x * scale / softcap) /
    temperature.

    temperature   a number > 0, or a tensor > 0: 0-d, per sequence [B] or per token (the shape of
                  targets)
    softcap       a number > 0, or None for no softcap
    scale         a finite number, not 0

    The order is scale, softcap, temperature. Logits that a model's own forward returns already have
    its scale and softcap: pass the temperature only. Hidden states do not:
    `LogitTransform.of(model)` reads what the model does after its head.

    Raises ValueError naming the field that is wrong.
    """

    temperature: float | Tensor = 1.0
    softcap: float | None = None
    scale: float = 1.0
    __repr__ = describe
    ranges = (
        (
            "softcap",
            "it must be a finite number above 0, or None for no softcap.",
            SMALLEST,
            LARGEST,
        ),
        ("scale", "it multiplies the logits and must be finite and not 0.", -LARGEST, LARGEST),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)
        object.__setattr__(self, "temperature", as_number(self.temperature))
        remedy = "it multiplies the logits and must be finite and not 0."
        require(self.scale != 0, "scale", self.scale, remedy)

    @classmethod
    def of(cls, model: Any, *, temperature: float | Tensor = 1.0) -> LogitTransform:
        """Return what a causal language model of transformers does to head(hidden).

            transform = LogitTransform.of(model, temperature=0.7)
            logps, _ = linear_logprobs(hidden, model.lm_head.weight, targets, transform=transform)

        model         the language model, also inside wrappers of PEFT, DDP or torch.compile.
                      Softcap and scale come from its config: Gemma-2, -3n and -4, Granite,
                      Cohere, HyperCLOVA X, MiniCPM, Falcon-H1 and others have one.
        temperature   as in the fields

        Raises ValueError for a model class that is not listed in architectures.py.
        """
        softcap, scale = logits_of(language_model(model))
        return cls(temperature, softcap, scale)

    def for_rows(
        self,
        shape: torch.Size,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        device: torch.device,
    ) -> RowTransform:
        """Return the transform of the flat rows of targets of `shape`.

        A temperature tensor becomes one inverse per row, which is checked where mask is set.
        Packed targets are cut into sequences by `cu_seqlens`.
        """
        inverse = inverse_temperatures(self.temperature, shape, mask, cu_seqlens, device)
        return RowTransform(float(self.scale), float(self.softcap or 0.0), inverse)


NO_TRANSFORM = LogitTransform()


def as_transform(transform: LogitTransform | None) -> LogitTransform:
    """Return a transform, or the identity for None. Raises ValueError for anything else."""
    if transform is None:
        return NO_TRANSFORM
    if not isinstance(transform, LogitTransform):
        is_number = isinstance(transform, numbers.Real)
        actual = transform if is_number else f"a {type(transform).__name__}"
        temperature = transform if is_number else 0.7
        raise ValueError(
            f"transform is {actual}: pass a LogitTransform, for example"
            f" LogitTransform(temperature={temperature})."
        )
    return transform
