"""Settings under which the server's log-probabilities would not be the policy's are refused, each in one clear line."""

import dataclasses
import math

import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.sampling import NEUTRAL, SamplingSettings, check_rollout

FALSIFYING = {
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 5,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "structured_outputs": {"regex": "a"},
    "thinking_token_budget": 5,
    "repetition_detection": {"window": 5},
    "watermarking": True,
    "trace_decode_token_ids": [1],
    "extra_args": {"processor": 1},
}


def test_every_falsifying_setting_has_its_case():
    assert set(FALSIFYING) == set(NEUTRAL)


@pytest.mark.parametrize(("name", "value"), FALSIFYING.items())
def test_a_falsifying_setting_is_refused_in_one_line(name, value):
    with pytest.raises(UserError, match=rf"rollout.{name}=.* reshapes the distribution") as error:
        SamplingSettings(temperature=1.0, max_tokens=5, extra={name: value}).check()
    assert "\n" not in str(error.value)
    SamplingSettings(temperature=1.0, max_tokens=5, extra={name: NEUTRAL[name][0]}).check()


def test_an_unknown_setting_is_refused_too():
    with pytest.raises(UserError, match="not a setting of this rollout"):
        SamplingSettings(temperature=1.0, max_tokens=5, extra={"top_q": 1}).check()


def test_greedy_is_for_evaluation_only():
    with pytest.raises(UserError, match="greedy"):
        SamplingSettings(temperature=0.0, max_tokens=5).check()
    SamplingSettings.from_config(RolloutConfig(), evaluation_temperature=0.0).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 5),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("max_response_tokens", 0),
        ("max_model_len", 64),
        ("num_servers", 0),
        ("bucket_bytes", 0),
        ("host", "0.0.0.0"),
        ("control_timeout_s", 0.0),
        ("heartbeat_s", 0.0),
        ("controller_timeout_s", math.nan),
        ("stall_timeout_s", math.inf),
        ("drain_timeout_s", -1.0),
        ("restart_window_s", -1.0),
        ("max_restarts", -1),
        ("probe_max_change", math.nan),
        ("base_port", -1),
        ("base_port", 65536),
        ("gpu_memory_utilization", 1.5),
    ],
)
def test_a_wrong_rollout_setting_is_named(name, value):
    check_rollout(RolloutConfig())
    with pytest.raises(UserError, match=rf"rollout.{name}="):
        check_rollout(dataclasses.replace(RolloutConfig(), **{name: value}))
