"""Whether a replica that took new weights still is the same model: log-probabilities of one short prompt, compared.

Catches gross corruption only: weights that are not finite, scaled, swapped or scrambled so that a language model would not be one.
A replica passes when its answer is finite, moved by at most `rollout.probe_max_change` from the previous version's, and agrees
with the other replicas of its version to the noise of the precision. docs/rollout.md has the measurements behind the bounds.
Imports neither torch nor vllm.
"""

import math
from collections.abc import Mapping, Sequence

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.replicas import Replica

Logprobs = Sequence[float]
PATTERN = 8  # different tokens
REPEATS = 4  # of them: whatever its vocabulary, a language model is sure of the second time
COMMON = 4096  # ids below are frequent tokens in every usual vocabulary
# Mean difference in nats that two replicas with the same weights may show.
AGREEMENT = {"float32": 1e-3, "bfloat16": 0.05}


class Probe:
    """Asks replicas and judges their answers; remembers what the newest version that passed answers."""

    def __init__(self, config: RolloutConfig) -> None:
        self._max_change = config.probe_max_change
        self._agreement = AGREEMENT[config.dtype]
        self._answers: dict[str, Logprobs] = {}
        self._reference: tuple[int, Logprobs] | None = None

    async def ask(self, replica: Replica) -> None:
        """Let a paused, filled replica answer the probe. Raises ReplicaError."""
        if self._max_change:
            self._answers[replica.client.name] = await replica.client.probe_logprobs()

    def judge(self, version: int, answers: Mapping[str, Logprobs] | None = None) -> dict[str, str]:
        """Return name -> reason of those that failed among `answers`, or among all that were asked since the last call."""
        if answers is None:
            answers, self._answers = self._answers, {}
        failed = {name: "its log-probabilities are not finite" for name in answers if not _is_finite(answers[name])}
        if self._reference is not None:
            known, before = self._reference
            bound = self._agreement if known == version else self._max_change
            for name in answers.keys() - failed.keys():
                if (change := distance(answers[name], before)) > bound:
                    failed[name] = (
                        f"its log-probabilities are {change:.3g} nats from version {known}'s, at most {bound:g}"
                    )
        candidates = {name: answer for name, answer in answers.items() if name not in failed}
        failed |= self._disagreeing(candidates)
        passed = [answer for name, answer in candidates.items() if name not in failed]
        if passed and (self._reference is None or version >= self._reference[0]):  # files may be of the version before
            self._reference = version, passed[0]
        return {name: f"replica {name} failed the probe of version {version}: {why}" for name, why in failed.items()}

    async def check(self, replica: Replica, version: int) -> None:
        """Raise ReplicaError unless one replica, filled from files, passes. A publication may go on meanwhile."""
        if self._max_change:
            answers = {replica.client.name: await replica.client.probe_logprobs()}
            for reason in self.judge(version, answers).values():
                raise ReplicaError(reason)

    def _disagreeing(self, answers: Mapping[str, Logprobs]) -> dict[str, str]:
        """Return those that are not with the majority, or, where there is none, with the one next to the last version."""
        if not answers:
            return {}
        near = {
            name: {other for other in answers if distance(answers[name], answers[other]) <= self._agreement}
            for name in answers
        }
        right = max(near.values(), key=len)
        if 2 * len(right) <= len(answers):
            if self._reference is None:
                return dict.fromkeys(
                    answers, "no majority of the replicas agrees, and no earlier version says who is right"
                )
            before = self._reference[1]
            right = near[min(answers, key=lambda name: distance(answers[name], before))]
        why = f"its log-probabilities differ from the other replicas' by more than {self._agreement:g} nats"
        return {name: why for name in answers if name not in right}


def probe_ids(vocab_size: int) -> list[int]:
    """Return the prompt, 32 ids."""
    limit = min(vocab_size, COMMON)
    return [(1 + position * limit // (PATTERN + 1)) % limit for position in range(PATTERN)] * REPEATS


def distance(one: Logprobs, other: Logprobs) -> float:
    """Return the mean absolute difference in nats; infinite where the lengths differ."""
    if len(one) != len(other) or not one:
        return math.inf
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def _is_finite(answer: Logprobs) -> bool:
    return bool(answer) and all(map(math.isfinite, answer))
