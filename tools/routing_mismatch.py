"""How often trainer and rollout engine send a token to different experts: the actor's forward pass beside a real vLLM server.

Starts the server that rollout would start on a Hugging Face folder of a mixture of experts, lets it write responses to random
prompts, and reads the same tokens again with the actor, one rank in this process. Prints the routing mismatch, the share of
vLLM's (token, layer, expert) choices that the actor did not make, overall and of each layer, and the difference of the log-
probabilities, also of those tokens alone up to which both chose the same experts. One response at a time is written, so that
what the routers chose is told apart without vLLM's batches.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this checkout, from whichever folder it is started
import numpy as np
from numpy.typing import NDArray

from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.config.schema import ModelConfig
from a3po_megatron.errors import UserError, exit_on_user_error
from a3po_megatron.launch.ranks import become_only_rank
from a3po_megatron.rollout.client import Generation, ReplicaClient
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.server import Server, choose_port
from a3po_megatron.rollout.server_args import server_command, server_device, server_environment

PROMPT_TOKENS = (4, 16)
ACTORS = ("float32/fp32", "bfloat16/fp32", "bfloat16/none")  # actor.dtype/actor.moe_router_dtype


@dataclass(frozen=True)
class Response:
    """What vLLM wrote, and where it sent each token. Letters: n tokens of prompt and response, R of the response."""

    tokens: NDArray[np.int64]  # [n]
    logprobs: NDArray[np.float32]  # [R]
    routing: NDArray[np.bool_]  # [n - 1, layers, experts]: whether the token goes there; nothing reads the last one


class RoutingClient(ReplicaClient):
    """A client of a server whose workers are `routing_capture.RoutingExtension`."""

    async def take_routing(self) -> NDArray[np.int64]:
        """Return the expert ids, [tokens, layers, k], of every token that the server read since the last call."""
        answer = await self._call("POST", "/collective_rpc", "routing", json={"method": "take_routing"})
        return np.array(answer.json()["results"][0], dtype=np.int64)  # every tensor-parallel worker routes every token


async def generate(folder: Path, shape: ModelShape, config: RolloutConfig, count: int, seed: int) -> list[Response]:
    """Start a server on `folder` and let it write `count` responses, one after the other."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, shape.vocab_size, rng.integers(*PROMPT_TOKENS)) for _ in range(count)]
    device, token = server_device(config), secrets.token_hex(32)
    port = choose_port(config, 0)
    command = server_command(config, str(folder), device, port, seed)
    command += ["--worker-extension-cls", "tools.routing_capture.RoutingExtension"]
    with tempfile.TemporaryDirectory() as logs:
        environment = server_environment(config, token, device, tuple(range(config.tensor_parallel)))
        url = f"http://{config.host}:{port}"
        server = Server("routing", url, command, environment, Path(logs) / "vllm.log")
        client = RoutingClient("routing", url, token, config, shape.vocab_size)
        try:
            await server.wait_ready(client, config)
            await client.take_routing()
            return [await _respond(client, shape, config, prompt, seed + i) for i, prompt in enumerate(prompts)]
        finally:
            await client.aclose()
            await server.stop(config.stop_timeout_s)


async def _respond(
    client: RoutingClient, shape: ModelShape, config: RolloutConfig, prompt: NDArray[np.int64], seed: int
) -> Response:
    sampling = SamplingSettings(config.temperature, config.max_response_tokens, seed)
    answer: Generation = await client.generate(prompt.tolist(), sampling, f"routing-{seed}")
    tokens = np.concatenate([prompt, answer.token_ids]).astype(np.int64)
    experts = await client.take_routing()
    if len(experts) < len(tokens) - 1:
        raise RuntimeError(f"vLLM's routers saw {len(experts)} of the {len(tokens) - 1} tokens that were read")
    experts = experts[: len(tokens) - 1]  # vLLM may have begun to read a token that ended the response
    routing = np.zeros((*experts.shape[:2], shape.num_experts), dtype=np.bool_)
    np.put_along_axis(routing, experts, True, axis=-1)
    return Response(tokens, answer.logprobs, routing)


def compare(folder: Path, shape: ModelShape, settings: ActorConfig, responses: Sequence[Response]) -> dict[str, Any]:
    """Return how the actor under `settings` differs from `responses`. Needs the default process group."""
    from a3po_megatron.actor.actor import Actor
    from a3po_megatron.actor.routing import routing_mismatch
    from a3po_megatron.batching.packing import TokenSequence

    sequences = [
        TokenSequence(r.tokens, np.arange(len(r.tokens)) >= len(r.tokens) - len(r.logprobs)) for r in responses
    ]
    actor = Actor(shape, ModelConfig(path=str(folder)), settings, OptimizerConfig(), seed=0)
    routing, logprobs = actor.routing(sequences), actor.logprobs(sequences)
    actor.close()
    reference = {index: response.routing for index, response in enumerate(responses)}

    def of_layer(chosen: Mapping[int, NDArray[np.bool_]], layer: int) -> dict[int, NDArray[np.bool_]]:
        return {index: values[:, layer : layer + 1] for index, values in chosen.items()}

    differences = np.concatenate([abs(logprobs[i][-len(r.logprobs) :] - r.logprobs) for i, r in enumerate(responses)])
    alike = np.concatenate([routed_alike(routing[i], r.routing)[-len(r.logprobs) :] for i, r in enumerate(responses)])
    return {
        "mismatch": routing_mismatch(routing, reference),
        "of_layers": [
            routing_mismatch(of_layer(routing, layer), of_layer(reference, layer)) for layer in range(shape.num_layers)
        ],
        "logprob_mean_abs": float(differences.mean()),
        "logprob_max_abs": float(differences.max()),
        "logprob_max_abs_alike": float(differences[alike].max(initial=0.0)),
        "alike": float(alike.mean()),
    }


def routed_alike(routing: NDArray[np.bool_], reference: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return, [n - 1], whether a token and all before it, to which it attends, go to the same experts in every layer."""
    return np.logical_and.accumulate((routing == reference).all(axis=(1, 2)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each of `options.actors`."""
    shape = read_model_shape(options.folder)
    if not shape.num_experts:
        raise UserError(f"{options.folder}: a dense model routes nothing; name the folder of a mixture of experts")
    longest = PROMPT_TOKENS[1] + options.max_tokens
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"--max-tokens {options.max_tokens}: after prompts of up to {PROMPT_TOKENS[1]} tokens {longest} positions are needed; "
            f"{options.folder} is made for {shape.max_position_embeddings} (max_position_embeddings)"
        )
    rollout = RolloutConfig(
        device=options.device,
        dtype=options.rollout_dtype,
        max_num_seqs=1,
        prefix_caching=False,  # a cached token is not read, and so not routed
        max_response_tokens=options.max_tokens,
        max_model_len=longest,
    )
    responses = asyncio.run(generate(options.folder, shape, rollout, options.responses, options.seed))
    found: dict[str, Any] = {
        "rollout_dtype": options.rollout_dtype,
        "tokens": sum(len(response.routing) for response in responses),
        "choices": sum(int(response.routing.sum()) for response in responses),
        "actors": {},
    }
    become_only_rank()
    from a3po_megatron.actor import device as devices

    devices.start(ActorConfig(device=options.device))
    for name in options.actors:
        dtype, router = name.split("/")
        settings = ActorConfig(device=options.device, dtype=dtype, moe_router_dtype=router)
        found["actors"][name] = compare(options.folder, shape, settings, responses)
    devices.stop()
    return found


def report(found: Mapping[str, Any]) -> str:
    """Return a line for each actor."""
    lines = [f"vLLM {found['rollout_dtype']}: {found['tokens']} tokens, {found['choices']} choices of experts"]
    for name, figures in found["actors"].items():
        of_layers = " ".join(f"{share:.2%}" for share in figures["of_layers"])
        lines += [
            f"actor {name}: mismatch {figures['mismatch']:.3%} (by layer {of_layers}), log-probabilities differ by "
            f"{figures['logprob_mean_abs']:.1e} in the mean, {figures['logprob_max_abs']:.1e} at most, and "
            f"{figures['logprob_max_abs_alike']:.1e} at most where all went alike so far ({figures['alike']:.0%} of the tokens)"
        ]
    return "\n".join(lines)


def main() -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder of a mixture of experts")
    parser.add_argument("--responses", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a response; default: %(default)s")
    parser.add_argument("--rollout-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="%(default)s")
    parser.add_argument(
        "--actors", nargs="+", choices=ACTORS, default=["bfloat16/fp32"], help="actor.dtype/actor.moe_router_dtype"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = measure(options)
    print(json.dumps(found) if options.json else report(found))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
