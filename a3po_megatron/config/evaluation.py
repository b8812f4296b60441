"""Settings of `recipes/evaluate.py`: what is evaluated, on which problems, with how many samples."""

from dataclasses import dataclass, field
from typing import Literal

from a3po_megatron.config.data import DataConfig
from a3po_megatron.config.reward import RewardConfig
from a3po_megatron.config.rollout import RolloutConfig


@dataclass(frozen=True)
class EvaluateConfig:
    """One evaluation. For a checkpoint or a run, `rollout`, `data` and `reward` begin with what its config.yaml says."""

    recipe: Literal["evaluate"] = "evaluate"
    # A Hugging Face folder; a checkpoint, RUN/checkpoints/step_N; the folder of a run that goes on; the URL of its
    # controller; or URLs of vLLM servers, with commas between them
    target: str = ""
    model: str = ""  # of a URL: the folder with the tokenizer and config.json of what is served
    # Of a URL or a run: its token; empty: A3PO_TOKEN of the environment, or the file in the run's folder
    token_file: str = ""
    dir: str = ""  # where the report goes; empty: runs/evaluations/NAME_TIME
    # Names of sets: those of `data.evaluation`, or known ones (gsm8k, math500, aime24, aime25...); empty: all of
    # `data.evaluation`
    sets: list[str] = field(default_factory=list)
    num_samples: int = 1  # responses to each problem
    temperature: float = 0.0  # 0: greedy, with which `num_samples` is 1
    pass_k: list[int] = field(default_factory=list)  # the k of pass@k; empty: 1 and `num_samples`
    max_problems: int = 0  # of each set, from its front; 0: all
    seed: int = 0  # of the sampling; request i of a problem has the same seed in every evaluation
    max_concurrent: int = 0  # requests in flight; 0: rollout.num_servers x rollout.max_num_seqs
    timeout_s: float = 86400.0  # of all responses together
    # How vLLM is started and asked; of a running fleet only the length limits and deadlines of a request. A model of fewer
    # positions than the default `max_model_len` gets its own as default, half of them for the response
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            max_model_len=2048, max_response_tokens=1024, kv_cache_bytes=1073741824, max_restarts=1
        )
    )
    data: DataConfig = field(default_factory=lambda: DataConfig(task="problems"))
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(kind="math"))  # its answer alone counts
