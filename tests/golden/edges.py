"""How near a token's ratio comes to an edge of the clip in a golden run: python -m tests.golden.edges METHOD FOLDER

Across an edge a token is clipped or not, and with it a whole term of the loss: on a CPU that rounds otherwise, a token on an edge
would give other numbers than were recorded.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from a3po_megatron.actor import objective
from a3po_megatron.errors import UserError
from a3po_megatron.objective.surrogate import ClippedSurrogate
from tests.golden.settings import ROOT

MARGIN = 5e-5  # relative; kernels of another CPU (settings.py) moved a ratio by 4e-7
DEADLINE_S = 300  # ten steps of a tiny model, on a busy machine


def distance_to_edge(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> float:
    """Return how near a ratio is to the edge that counts for it, relative to the edge: the upper one for what is to be learned.

    A token without an advantage has no edge. Without any that has, the distance is infinite.
    """
    edge = torch.where(advantages > 0, 1 + clip_high, 1 - clip_low)
    distances = torch.where(advantages != 0, (ratio.double() / edge - 1).abs(), torch.inf)
    return float(distances.min())


def check(method: str, distance: float) -> None:
    """Raise UserError for a recording that another CPU may not repeat."""
    if distance < MARGIN:
        raise UserError(
            f"{method}: a token's ratio is only {distance:.1e} (relative) from an edge of the clip, less than {MARGIN:g}: another "
            "CPU's rounding may clip it; not stored: add another run.seed to SIZE in tests/golden/settings.py and record all"
        )


def nearest(method: str, folder: Path) -> float:
    """Return the smallest distance in a recording of `folder`, in a process of its own, which alone starts the actor."""
    command = [sys.executable, "-m", "tests.golden.edges", method, str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    return float(done.stdout.splitlines()[-1])


def _main(method: str, folder: Path) -> None:
    from a3po_megatron.actor import device
    from a3po_megatron.config.actor import ActorConfig
    from a3po_megatron.launch.ranks import become_only_rank
    from tests.golden.replay import replay

    distances: list[float] = []

    @dataclass(frozen=True)
    class Watched(ClippedSurrogate):
        def __call__(
            self, logprobs: Tensor, ratio: Tensor, weight: Tensor, advantages: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            distances.append(distance_to_edge(ratio.detach(), advantages, self.clip_low, self.clip_high))
            return super().__call__(logprobs, ratio, weight, advantages)

    objective.ClippedSurrogate = Watched  # type: ignore[misc]
    become_only_rank()
    device.start(ActorConfig())
    replay(method, folder=folder)
    device.stop()
    print(min(distances))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
