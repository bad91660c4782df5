"""The projection to logits of a Hugging Face causal language model, taken apart: backbone, weight, bias, transform."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import LogitTransform
from .sampling import Completions, positions

Tensor = torch.Tensor


def logit_transform(model: Any, temperature: float) -> LogitTransform:
    """What the model's own forward does to its logits, followed by the temperature. Of a model that is not known plain logits are
    assumed, which `check_projection` compares with its own."""
    try:
        return LogitTransform.of(model, temperature=temperature)
    except ValueError:
        return LogitTransform(temperature)


def completion_hidden(model: Any, completions: Completions) -> Tensor:
    """Last hidden states [B, T, H] whose row t predicts completion token t."""
    ids, attention = completions.ids[:, :-1], completions.attention[:, :-1]
    out = model.get_decoder()(
        input_ids=ids, attention_mask=attention.long(), position_ids=positions(attention), use_cache=False
    )
    return out.last_hidden_state[:, -completions.targets.shape[1] :]


def head_parameters(model: Any) -> tuple[Tensor, Tensor | None]:
    """(weight [V, H], bias [V] or None)"""
    head = model.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


@torch.no_grad()
def check_projection(model: Any) -> None:
    """Raise ValueError unless backbone, head and transform give the logits that the model itself gives."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or type(head).forward is not torch.nn.Linear.forward:
            raise ValueError(f"the head is a {type(head).__name__}, not a plain linear layer")
        ids = torch.arange(4, device=device)[None] % head.weight.shape[0]
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        transform = logit_transform(model, 1.0)
        projected = torch.nn.functional.linear(hidden, *head_parameters(model)).float() * transform.scale
        if transform.softcap is not None:
            projected = transform.softcap * torch.tanh(projected / transform.softcap)
        if not torch.allclose(projected, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
            raise ValueError(
                f"its logits differ by up to {float((projected - expected).abs().max()):.2g} from those of its own forward"
            )
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"loss='linear' does not know how {type(model).__name__} makes its logits ({error}): use loss='logits'."
        ) from error
    finally:
        model.train(training)
