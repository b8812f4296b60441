"""Which training problems also stand in an evaluation set: the same text, or too much of it.

Two tests. *Exact*: both have the same letters and digits; LaTeX, signs and white space do not count. *n-grams*: the
training problem holds at least a share s of the evaluation problem's runs of n words (runs that occur in it, as a set).
A single common run would be no test: "m and n are relatively prime positive integers find m n" has eleven words and
stands in hundreds of problems. An evaluation problem of fewer than n words counts as one run of its own length.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from a3po_megatron.data.text import letters_and_digits, words_of

Gram = tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """The evaluation problems that a training problem repeats."""

    exact: bool
    positions: tuple[int, ...]  # of the evaluation problems, in the order given


class EvaluationTexts:
    """The evaluation problems, ready to be looked up."""

    def __init__(self, problems: Sequence[str], n: int, share: float, *, ngrams: bool = True) -> None:
        """`ngrams=False`: only the exact test."""
        self._exact: dict[str, list[int]] = defaultdict(list)
        for position, problem in enumerate(problems):
            self._exact[letters_and_digits(problem)].append(position)
        self._n = n
        self._needed: list[int] = []  # common runs that make a match, by evaluation problem
        self._holders: dict[Gram, list[int]] = defaultdict(list)
        self._short: list[tuple[str, int]] = []
        for position, problem in enumerate(problems if ngrams else ()):
            words = words_of(problem)
            if len(words) < n:
                self._short.append((_spaced(words), position))
            grams = grams_of(words, n)
            self._needed.append(max(1, math.ceil(share * len(grams))))
            for gram in grams:
                self._holders[gram].append(position)

    def find(self, problem: str, *, ngrams: bool = True) -> Match | None:
        """Return the evaluation problems that `problem` repeats, if it does. `ngrams=False`: only by the exact test."""
        same = self._exact.get(letters_and_digits(problem))
        if same is not None:
            return Match(True, tuple(same))
        if not ngrams or not (self._holders or self._short):
            return None
        words = words_of(problem)
        common = Counter(holder for gram in grams_of(words, self._n) for holder in self._holders.get(gram, ()))
        text = _spaced(words)
        near = [position for position, count in common.items() if count >= self._needed[position]]
        near += [position for short, position in self._short if short in text]
        return Match(False, tuple(sorted(near))) if near else None


def grams_of(words: Sequence[str], n: int) -> set[Gram]:
    """Return the different runs of `n` words."""
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


def _spaced(words: Iterable[str]) -> str:
    return f" {' '.join(words)} "
