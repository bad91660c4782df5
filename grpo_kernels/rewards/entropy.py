"""Control the entropy of the policy: a threshold that selects tokens of high entropy, and a
coefficient of the entropy bonus that adapts to a target entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import LARGEST, Checked, require, require_number, require_shape

SHARE = ("the share of tokens to keep is in (0, 1].", math.nextafter(0.0, 1.0), 1)


def entropy_threshold(
    entropy: Tensor, mask: Tensor, share: float, process_group: Any = None
) -> Tensor:
    """Return the quantile 1 - share of the entropy of trained tokens, 0-d fp32.

    Keep the tokens with an entropy of at least this value: they are the `share` of the tokens with
    the highest entropy.

    entropy         float, any shape. Masked values, NaN and inf have no effect.
    mask            bool (or 0/1 integer), the shape of entropy: trained tokens
    share           in (0, 1]: 0.2 in arXiv 2506.01939 (TRL's `top_entropy_quantile`), 1 keeps all
    process_group   None: the tokens of this process. Otherwise the tokens of all ranks of this
                    group (torch.distributed.group.WORLD: all ranks), and all of them must call. A
                    rank may have any number of tokens, also none. The host waits while the ranks
                    exchange these numbers.

    Interpolates linearly between two tokens, as torch.quantile does, but without its limit of 16
    million values. If no rank has a token, the result is the lowest fp32 number, which keeps all.

    Raises ValueError for a share outside of (0, 1] and for shapes that differ.
    """
    require_number("share", share, *SHARE)
    require_shape("mask", mask, entropy.shape, "entropy")
    values = entropy.detach().flatten().float()
    # Ignored values become infinity, which sorts behind the others.
    values = torch.where((mask.flatten() != 0) & values.isfinite(), values, torch.inf)
    if process_group is not None:
        values = _gather(values, process_group)
    # One more infinity, so that position 0 exists without any value.
    values = torch.nn.functional.pad(values, (0, 1), value=torch.inf).sort().values
    count = values.isfinite().sum()
    # The quantile is between the values at two positions, without reading `count` on the host.
    position = (1.0 - share) * (count - 1).clamp(min=0).double()
    neighbours = torch.stack([position.floor(), position.ceil()]).long()
    below, above = values.index_select(0, neighbours).double().unbind()
    threshold = torch.lerp(below, above, position - position.floor()).float()
    return torch.where(count > 0, threshold, torch.finfo(torch.float32).min)


def _gather(values: Tensor, process_group: Any) -> Tensor:
    """Return the flat `values` of all ranks, concatenated.

    values          fp32 [n], where n may differ from rank to rank
    process_group   the ranks; all of them must call

    All ranks pad their values with infinity to the longest tensor, because all_gather needs equal
    shapes.
    """
    longest = torch.tensor(values.numel(), device=values.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=process_group)
    padded = torch.nn.functional.pad(values, (0, int(longest) - values.numel()), value=torch.inf)
    all_values = [torch.empty_like(padded) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(all_values, padded, group=process_group)
    return torch.cat(all_values)


@dataclass(kw_only=True, eq=False)
class AdaptiveEntropyCoef(Checked):
    """A coefficient of the entropy bonus that adapts so that the entropy stays above a target.

    It rises by `step` while the entropy is at or below `target`, and falls while it is above.

    target      the smallest acceptable entropy, in nats per token
    step        change per optimizer step
    low, high   the bounds within which it changes
    initial     the coefficient at the start

    The bonus is switched off after a step with an entropy above the target, and before the first
    `update`.

        coef = AdaptiveEntropyCoef(target=0.2)
        for window in windows:  # one optimizer step each
            objective = dataclasses.replace(objective, entropy_coef=coef.coef)
            ...  # forward, backward, optimizer.step()
            coef.update(mean_entropy)  # over all micro-batches and ranks of the window

    Sources: Skywork-OR1, arXiv 2505.22312, section 4. Rule and defaults are those of TRL's
    `use_adaptive_entropy`. Raises ValueError naming the argument that is wrong.
    """

    target: float = 0.2
    step: float = 0.005
    low: float = 0.0
    high: float = 1.0
    initial: float = 0.0
    ranges = (
        ("target", "the target entropy is a number of nats >= 0.", 0, LARGEST),
        ("step", "the change per optimiser step is a finite number >= 0.", 0, LARGEST),
        ("low", "the lower end of the range is a finite number.", -LARGEST, LARGEST),
    )

    def __post_init__(self) -> None:
        """Check the fields, and start with the coefficient `initial`."""
        super().__post_init__()
        remedy = f"the upper end of the range is a finite number >= low={self.low!r}."
        require_number("high", self.high, remedy, low=self.low, high=LARGEST)
        # An infinite entropy is above the target, so the bonus is off before the first update.
        self._set_state("initial", self.initial, entropy=math.inf)

    def _set_state(self, name: str, coef: float, entropy: float) -> None:
        """Set the coefficient and the last entropy.

        name      the argument or field that the coefficient comes from, for the error
        coef      the coefficient of the entropy bonus
        entropy   the mean entropy of the last step

        Raises ValueError if the coefficient is out of range.
        """
        remedy = f"the coefficient is in the range [{self.low!r}, {self.high!r}]."
        require_number(name, coef, remedy, low=self.low, high=self.high)
        self._coef = float(coef)
        self._entropy = float(entropy)

    @property
    def coef(self) -> float:
        """The coefficient for the next optimizer step: 0 while the entropy is above the target."""
        return self._coef if self._entropy <= self.target else 0.0

    def update(self, entropy: float | Tensor) -> None:
        """Change the coefficient after an optimizer step.

        entropy   the mean over the trained tokens of all micro-batches and ranks of the step: a
                  number, or a 0-d tensor, for which the host waits

        Raises ValueError if the entropy is not a finite number.
        """
        value: Any = entropy
        if isinstance(entropy, Tensor) and entropy.numel() == 1:
            value = float(entropy)
        remedy = "pass the mean entropy of the window's tokens, a finite number."
        require_number("entropy", value, remedy, low=-LARGEST, high=LARGEST)
        if value <= self.target:
            coef = min(self._coef + self.step, self.high)
        else:
            coef = max(self._coef - self.step, self.low)
        self._set_state("coef", coef, entropy=value)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: the coefficient and the last entropy."""
        return {"coef": self._coef, "entropy": self._entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a state that `state_dict` returned.

        Raises ValueError for other keys, and for a coefficient out of range.
        """
        remedy = "pass what state_dict() returned: coef and entropy."
        require(set(state) == {"coef", "entropy"}, "state", state, remedy)
        remedy = "the last entropy is a number, infinite before the first update."
        require_number("entropy", state["entropy"], remedy)
        self._set_state("coef", state["coef"], entropy=state["entropy"])
