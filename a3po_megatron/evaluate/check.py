"""Refuses samples, temperature and k that do not fit each other: of the command and of a run's own evaluations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from a3po_megatron.errors import UserError


@dataclass(frozen=True)
class Names:
    """What three settings are called where they stand."""

    num_samples: str
    temperature: str
    pass_k: str


OF_COMMAND = Names("num_samples", "temperature", "pass_k")
OF_RUN = Names("controller.eval_samples", "controller.eval_temperature", "controller.eval_pass_k")


def check_samples(num_samples: int, temperature: float, pass_k: Sequence[int], names: Names) -> None:
    """Raise UserError for settings with which no figure is right."""
    if num_samples < 1:
        raise UserError(f"{names.num_samples}={num_samples}: must be at least 1")
    if not 0 <= temperature < math.inf:
        raise UserError(f"{names.temperature}={temperature}: 0 (greedy) or a number above it")
    if num_samples > 1 and temperature == 0:
        raise UserError(
            f"{names.num_samples}={num_samples} with {names.temperature}=0: greedy responses to one problem are all the "
            f"same; use {names.num_samples}=1, or a temperature above 0"
        )
    for k in pass_k:
        if not 1 <= k <= num_samples:
            raise UserError(
                f"{names.pass_k}={list(pass_k)}: pass@{k} needs k between 1 and {names.num_samples}={num_samples}"
            )


def ks_of(pass_k: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """Return the k of pass@k: those that are named, or 1 and n."""
    return tuple(sorted(set(pass_k or (1, num_samples))))
