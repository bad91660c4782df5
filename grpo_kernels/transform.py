"""`LogitTransform`: scale, softcap and temperature of the logits before the softmax."""

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
    """What is applied to the logits x of a head before the softmax.

        z = softcap * tanh(x * scale / softcap) / temperature
        z = x * scale / temperature                              without a softcap

    temperature   a number above 0, or a float tensor above 0: 0-d, [num_sequences], or one per
                  token in the shape of targets
    softcap       a finite number above 0; None: no softcap
    scale         a finite number other than 0

    Logits that the forward of a model returns already have its scale and softcap, so pass the
    temperature only. For hidden states pass all three: `LogitTransform.of(model)` reads softcap and
    scale from the config of the model.

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
        """Raise ValueError naming the field that is wrong."""
        super().__post_init__()
        check_temperature(self.temperature)
        object.__setattr__(self, "temperature", as_number(self.temperature))
        remedy = "it multiplies the logits and must be finite and not 0."
        require(self.scale != 0, "scale", self.scale, remedy)

    @classmethod
    def of(cls, model: Any, *, temperature: float | Tensor = 1.0) -> LogitTransform:
        """Return the transform that a causal language model of transformers applies to its logits.

            transform = LogitTransform.of(model, temperature=0.7)
            logps, _ = linear_logprobs(hidden, model.lm_head.weight, targets, transform=transform)

        model         the language model, also inside of a wrapper of PEFT, DDP or torch.compile.
                      Softcap and scale come from its config: Gemma-2, -3n and -4, Granite,
                      Cohere, HyperCLOVA X, MiniCPM, Falcon-H1 and others have one.
        temperature   temperature of the transform, see the fields

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
        """Return the transform as kernels receive it, with one temperature for each row.

        shape        shape of targets. A row is one of its elements, in row-major order.
        mask         bool of this shape: only the temperatures of these rows are checked; None: all
        cu_seqlens   int [num_sequences + 1], offsets of the sequences of packed targets; None if
                     targets is [num_sequences, length]
        device       device of the result

        Raises ValueError for a temperature that has the wrong shape or is not above 0.
        """
        inverse = inverse_temperatures(self.temperature, shape, mask, cu_seqlens, device)
        softcap = 0.0 if self.softcap is None else float(self.softcap)  # kernels: 0 is no softcap
        return RowTransform(scale=float(self.scale), softcap=softcap, inverse_temperature=inverse)


NO_TRANSFORM = LogitTransform()


def as_transform(transform: LogitTransform | None) -> LogitTransform:
    """Return the argument `transform=` of a call, or the identity for None.

    Raises ValueError for anything else.
    """
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
