"""The order in which problems are asked: shuffled anew every epoch, without end, resumable from a small cursor."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from a3po_megatron.errors import UserError
from a3po_megatron.records import Problem


@dataclass(frozen=True)
class Draw:
    """One problem to ask. Made by the prompt source, read by the controller."""

    index: int  # how many draws came before it, over all epochs
    epoch: int
    problem: Problem


class PromptSource:
    """Draws every problem once an epoch, in an order that depends on (seed, epoch) only."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        """Raises UserError if there are no problems or two have the same id."""
        if not problems:
            raise UserError("data: there are no training problems")
        ids = [problem.id for problem in problems]
        if len(set(ids)) != len(ids):
            twice = next(problem_id for position, problem_id in enumerate(ids) if problem_id in ids[:position])
            raise UserError(f"data: problem id {twice!r} occurs twice; ids seed the sampling, so they must be unique")
        self._problems = problems
        self._seed = seed
        self._index = 0
        self._order_epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def draw(self) -> Draw:
        """Return the next problem; the end of an epoch begins the next one."""
        draw = self.at(self._index)
        self._index += 1
        return draw

    def at(self, index: int) -> Draw:
        """Return draw number `index`, past or future, without moving the cursor."""
        epoch, position = divmod(index, len(self._problems))
        if epoch != self._order_epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._problems))
            self._order_epoch = epoch
        return Draw(index, epoch, self._problems[self._order[position]])

    def state(self) -> dict[str, Any]:
        """Return the cursor: plain values, for a snapshot."""
        return {"index": self._index, "seed": self._seed, "fingerprint": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises UserError if the problems or the seed are not those of the state: the cursor would then point elsewhere.
        """
        expected = {"seed": self._seed, "fingerprint": self._fingerprint}
        for name, value in expected.items():
            if state[name] != value:
                raise UserError(
                    f"resume: the data's {name} is {value}, the saved cursor's is {state[name]}; "
                    "resume with the data and seed of the saved run, or start a new one"
                )
        self._index = int(state["index"])

    @cached_property
    def _fingerprint(self) -> str:
        """Of everything that a training step can see of the data: ids, prompts as token ids, answers, and their order."""
        digest = hashlib.blake2b(digest_size=8)
        for problem in self._problems:
            digest.update(repr((problem.id, problem.answer, problem.prompt_ids.tolist())).encode())
        return digest.hexdigest()
