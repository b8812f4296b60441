"""vLLM takes the setting that `rollout.float32_head` becomes; the server is not started for it."""

from pathlib import Path

import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.server_args import server_command

MODEL = Path(__file__).parents[2] / "configs/models/arithmetic_qwen3"


@pytest.mark.parametrize("float32_head", [False, True])
def test_vllm_multiplies_hidden_states_and_output_weight_in_float32(float32_head: bool) -> None:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = RolloutConfig(dtype="bfloat16", float32_head=float32_head, max_model_len=64)
    options = server_command(config, str(MODEL), "cpu", 1, seed=0)[3:]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    model_config = AsyncEngineArgs.from_cli_args(arguments).create_model_config()
    with set_current_vllm_config(VllmConfig(model_config=model_config)):
        processor = LogitsProcessor(vocab_size=16)
    assert model_config.dtype == torch.bfloat16
    assert processor.head_dtype == (torch.float32 if float32_head else torch.bfloat16)
