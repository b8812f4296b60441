"""The settings of the reward, `reward.*`. What each part judges: docs/rewards.md."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RewardPoolConfig:
    """The worker processes that judge mathematics and call a user's own reward."""

    num_workers: int = 2
    timeout_s: float = 10.0  # of one answer; the worker is then killed and the answer is worth 0
    memory_bytes: int = 2147483648  # address space of a worker; 0: no limit
    max_response_chars: int = 400000  # a longer response is worth 0 unread


@dataclass(frozen=True)
class FormatRewardConfig:
    """A part of the reward for how a response is written."""

    weight: float = 0.0  # 0: off
    # boxed: closes a \boxed{...}; answer_line: has a line `Answer: x`; think: one <think>...</think>, then an answer;
    # regex: `pattern` matches somewhere (Python's re, with DOTALL)
    style: Literal["boxed", "answer_line", "think", "regex"] = "boxed"
    pattern: str = ""  # of `style: regex`


@dataclass(frozen=True)
class OverlongRewardConfig:
    """DAPO's soft overlong punishment: 0 up to `rollout.max_response_tokens - buffer_tokens`, then linear down to -weight."""

    weight: float = 0.0  # 0: off
    buffer_tokens: int = 0


@dataclass(frozen=True)
class PythonRewardConfig:
    """A part of the reward that is a user's function, called in a worker of the pool. See docs/rewards.md."""

    weight: float = 0.0  # 0: off
    path: str = ""  # package.module:function


@dataclass(frozen=True)
class HttpRewardConfig:
    """A part of the reward that an HTTP endpoint computes. See docs/rewards.md."""

    weight: float = 0.0  # 0: off
    url: str = ""
    timeout_s: float = 30.0  # of one try
    max_tries: int = 3  # of one group; then the run ends
    max_concurrent: int = 16  # requests in flight


@dataclass(frozen=True)
class RewardConfig:
    """What a response is worth: the answer's weight, and those of the other parts, added up."""

    # exact: 1 where the token ids are the answer and the end token, else 0 (arithmetic)
    # numeric: 1 where the final number of the text is the answer, else 0 (gsm8k)
    # math: 1 where the stated answer equals the truth as mathematics, else 0; `convention` says where it is stated
    # none: the answer is not judged; what counts are the parts below
    kind: Literal["exact", "numeric", "math", "none"] = "exact"
    weight: float = 1.0  # of the answer
    convention: Literal["auto", "boxed", "answer_line", "gsm8k"] = "auto"  # of `kind: math`
    # of `kind: math` and `numeric`: judge a response that was cut off at the token limit; else it is worth 0
    accept_truncated: bool = False
    format: FormatRewardConfig = field(default_factory=FormatRewardConfig)
    overlong: OverlongRewardConfig = field(default_factory=OverlongRewardConfig)
    python: PythonRewardConfig = field(default_factory=PythonRewardConfig)
    http: HttpRewardConfig = field(default_factory=HttpRewardConfig)
    pool: RewardPoolConfig = field(default_factory=RewardPoolConfig)
    shuffle: bool = False  # negative control: permute the rewards over the batch, so that they teach nothing
