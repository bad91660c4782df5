"""Activations that are computed again in the backward pass, in the network that samples.

The policy stays in eval mode for the whole run: completions, old log-probs, reference and gradient then come from one network,
and before the first step of an update every ratio is 1. Dropout would make a network of its own out of every forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def switch_on(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5
    (enable or model.gradient_checkpointing_enable)()


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Around forward and backward: layers recompute where this was switched on. They do so in training mode alone, which the
    modules inside them, dropout among them, do not get."""
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@torch.no_grad()
def check_recomputing(model: Any) -> None:
    """Raise ValueError if layers that recompute are another network than the one that samples."""
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
    expected = model(input_ids=ids, use_cache=False).logits
    with recomputing(model):
        recomputed = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(recomputed, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise ValueError(
            f"gradient_checkpointing=True switches on the dropout of {type(model).__name__}, and it would train another network "
            "than the one that samples: set the dropout in the model's configuration to 0, or leave gradient_checkpointing off."
        )
