"""Problems that reasoning-gym generates: the same ones for the same generator, count and seed."""

import difflib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

from a3po_megatron.data.rows import PlacedRow
from a3po_megatron.errors import UserError


def generate_rows(generator: str, count: int, seed: int) -> Iterator[PlacedRow]:
    """Yield `count` rows with `question` and `answer`. Raises UserError for a generator that is not known.

    Problem i depends on the generator and seed + i only, so a larger count adds problems behind, and the seeds of two
    sets should be further apart than their counts.
    """
    gym = _reasoning_gym()
    if generator not in gym.factory.DATASETS:
        near = difflib.get_close_matches(generator, gym.factory.DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "see reasoning-gym's list"
        raise UserError(f"generator={generator!r}: reasoning-gym has no generator of this name; {hint}")
    try:
        problems = gym.create_dataset(generator, size=count, seed=seed)
    except (AssertionError, ValueError) as error:  # one that cannot do without settings of its own
        raise UserError(f"generator={generator!r}: reasoning-gym refuses: {error}") from None
    for number, row in enumerate(problems, start=1):
        yield f"reasoning-gym {generator} (seed {seed}), problem {number}", number, row


def _reasoning_gym() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        try:
            return importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise UserError(f"kind=generated needs the package reasoning-gym: {error}") from None
