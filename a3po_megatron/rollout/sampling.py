"""How one request is sampled, and why some settings are refused.

The trainer recomputes log-probabilities from logits divided by the temperature. Whatever else reshapes the distribution
before a token is drawn makes the server's log-probabilities those of another policy, and the importance weights wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError

# vLLM's settings that change the distribution, with the value (or values) at which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_tokens": (0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "watermarking": (None, False),
    "trace_decode_token_ids": (None,),
    "extra_args": (None, {}),
}
DEADLINES = tuple(f"{wait}_timeout_s" for wait in ("startup", "request", "control", "transfer", "stall", "controller"))
# Those of them that people ask for: settings of the run, so that the refusal can say why.
REFUSED_SETTINGS = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)


@dataclass(frozen=True)
class SamplingSettings:
    """How the tokens of one response are drawn."""

    temperature: float  # logits are divided by it; 0 is greedy and allowed for evaluation only
    max_tokens: int  # longest response
    seed: int | None = None  # of this request alone; None: the server's own generator
    stop_token_ids: tuple[int, ...] = ()  # besides the end tokens that the model's folder names
    ignore_eos: bool = False  # go on to `max_tokens` whatever is drawn
    evaluation: bool = False  # the response is scored, never trained on
    extra: Mapping[str, Any] = field(default_factory=dict)  # other vLLM settings; refused unless they change nothing

    @staticmethod
    def from_config(config: RolloutConfig, evaluation_temperature: float | None = None) -> "SamplingSettings":
        """Return the settings of the run's requests, or of evaluation at a temperature of its own."""
        return SamplingSettings(
            temperature=config.temperature if evaluation_temperature is None else evaluation_temperature,
            max_tokens=config.max_response_tokens,
            evaluation=evaluation_temperature is not None,
            extra={name: getattr(config, name) for name in REFUSED_SETTINGS},
        )

    def check(self) -> None:
        """Raise UserError when log-probabilities under these settings would not be the policy's."""
        if self.temperature < 0 or (self.temperature == 0 and not self.evaluation):
            raise UserError(
                f"rollout.temperature={self.temperature}: training needs samples, which needs a temperature above 0; "
                "0 (greedy) is for evaluation requests"
            )
        if self.max_tokens < 1:
            raise UserError(f"rollout.max_response_tokens={self.max_tokens}: must be at least 1")
        for name, value in self.extra.items():
            if name not in NEUTRAL:
                raise UserError(f"rollout sampling setting {name}={value}: not a setting of this rollout; remove it")
            if value not in NEUTRAL[name]:
                raise UserError(
                    f"rollout.{name}={value}: it reshapes the distribution, so the log-probabilities would not be the "
                    f"policy's and training would be biased; use {name}={NEUTRAL[name][0]}"
                )


def check_rollout(config: RolloutConfig) -> None:
    """Check every setting of the rollout fleet. Raises UserError naming the first that is wrong."""
    SamplingSettings.from_config(config).check()
    for name in ("num_servers", "tensor_parallel", "max_num_seqs", "cpu_threads", "stream_interval", "bucket_bytes"):
        if getattr(config, name) < 1:
            raise UserError(f"rollout.{name}={getattr(config, name)}: must be at least 1")
    for name in (*DEADLINES, "heartbeat_s"):
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"rollout.{name}={getattr(config, name)}: a time in seconds above 0")
    for name in ("drain_timeout_s", "stop_timeout_s", "restart_window_s", "max_restarts", "probe_max_change"):
        if not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"rollout.{name}={getattr(config, name)}: a number, 0 or more")
    if not 0 <= config.base_port <= 2**16 - config.num_servers:
        raise UserError(f"rollout.base_port={config.base_port}: 0, or the first of num_servers ports below 65536")
    if config.in_flight != "continue" and config.kv_on_update == "keep":
        raise UserError(
            f"rollout.kv_on_update=keep has no meaning with rollout.in_flight={config.in_flight}, which lets no request "
            "go on with its cache; use kv_on_update=rebuild, or in_flight=continue"
        )
    if config.max_model_len <= config.max_response_tokens:
        raise UserError(
            f"rollout.max_model_len={config.max_model_len} leaves no room for a prompt: it must be above "
            f"rollout.max_response_tokens={config.max_response_tokens}"
        )
    if not 0 < config.gpu_memory_utilization <= 1:
        raise UserError(
            f"rollout.gpu_memory_utilization={config.gpu_memory_utilization}: a share above 0 and at most 1"
        )
    if config.host in ("", "0.0.0.0", "::"):
        raise UserError(
            f"rollout.host={config.host or '(empty)'}: it would open the servers to every network; name one address"
        )
