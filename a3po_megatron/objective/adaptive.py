"""The adaptive alpha schedule between batches: one number, steered so that a measured quantity meets its target.

A larger strength means a larger alpha (alpha.py), an anchor nearer to the behaviour policy, a narrower clip band in w
and so more clipping. Hence the two directions:

    clip_fraction   too much clipping      -> less strength
    behavior_kl     too far from behaviour -> more strength

Once a batch:  strength <- strength * exp(+-gain * clamp(measured / target - 1, -1, 1)), kept within its bounds.
The state is one plain number, the same on every rank, and belongs into the checkpoint. Imports no torch.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AdaptiveState:
    """What a checkpoint keeps: `dataclasses.asdict` writes it, `AdaptiveState(**values)` reads it."""

    strength: float = 1.0


@dataclass(frozen=True)
class AdaptiveControl:
    """The rule that moves the strength; it has no memory of its own."""

    measure: Literal["clip_fraction", "behavior_kl"] = "clip_fraction"
    target: float = 0.02
    gain: float = 0.2  # the strength changes by a factor of at most e^gain a batch
    min_strength: float = 0.25
    max_strength: float = 16.0

    def next(self, state: AdaptiveState, measured: float | None) -> AdaptiveState:
        """Return the state for the next batch. `measured`: the figure of the last one, None where it took no step.

        A measurement that is not finite moves nothing. A KL estimate may be slightly negative: it counts as far below target.
        """
        if measured is None or not math.isfinite(measured):
            return state
        error = min(max(measured / self.target - 1, -1.0), 1.0)
        sign = -1 if self.measure == "clip_fraction" else 1
        moved = state.strength * math.exp(sign * self.gain * error)
        return AdaptiveState(min(max(moved, self.min_strength), self.max_strength))

    @property
    def figure(self) -> str:
        """Name of the figure that is steered, as `metrics.figures` returns it."""
        return f"policy/{self.measure}"
