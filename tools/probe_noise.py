"""What the probe's bounds in `rollout/probe.py` rest on: by how many nats its answer moves for good and for bad reasons.

Trains a small Qwen3 until it is sure of a repeated pattern, as any language model is, and then changes it: by the rounding of a
precision, by AdamW steps, by damage. Prints the mean absolute change of the log-probabilities of the probe's prompt.
"""

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from a3po_megatron.rollout.probe import PATTERN, REPEATS, distance, probe_ids

VOCABULARY = 512


def main() -> int:
    """Print one line a cause, or one JSON object."""
    parser = argparse.ArgumentParser(prog="probe_noise.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=400, help="of training beforehand; default: %(default)s")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model()
    train(model, arguments.steps, 1e-3)
    answer = probe(model)
    changes = {name: distance(probe(changed), answer) for name, changed in changed_models(model).items()}
    rounded = copy.deepcopy(model).bfloat16()
    changes["bfloat16 arithmetic, same weights"] = distance(probe(rounded), probe(copy.deepcopy(rounded).float()))
    if arguments.json:
        print(json.dumps({"mean_logprob": sum(answer) / len(answer), "changes": changes}))
        return 0
    mean, uniform = sum(answer) / len(answer), -math.log(VOCABULARY)
    print(f"the trained model's mean log-probability of the probe: {mean:.3f}; uniform: {uniform:.2f}")
    for name, change in changes.items():
        print(f"{name:40} {change:10.2e} nats")
    return 0


def make_model() -> Qwen3ForCausalLM:
    """Return a random model of 4 layers."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).float()


def train(model: Qwen3ForCausalLM, steps: int, learning_rate: float) -> Qwen3ForCausalLM:
    """Train `model` on random patterns, each repeated like the probe's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (16, PATTERN)).repeat(1, REPEATS)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def changed_models(model: Qwen3ForCausalLM) -> dict[str, Qwen3ForCausalLM]:
    """Return what became of `model` for each reason."""

    def damaged(change: Callable[[torch.Tensor], torch.Tensor]) -> Qwen3ForCausalLM:
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.copy_(change(parameter))
        return other

    changed = {"float64 arithmetic, same weights": copy.deepcopy(model).double()}
    with torch.enable_grad():
        for rate in (1e-6, 1e-5, 1e-4, 1e-3):
            changed[f"one AdamW step of {rate:g}"] = train(copy.deepcopy(model), 1, rate)
    changed["all tensors x 1.01"] = damaged(lambda tensor: tensor * 1.01)
    changed["all tensors x 3"] = damaged(lambda tensor: tensor * 3)
    changed["all tensors rolled by a third"] = damaged(lambda t: t.flatten().roll(t.numel() // 3 + 1).view(t.shape))
    changed["all tensors random of the same size"] = damaged(lambda t: torch.randn_like(t) * t.std() + t.mean())
    return changed


@torch.no_grad()
def probe(model: Qwen3ForCausalLM) -> list[float]:
    """Return the answer to the probe."""
    ids = torch.tensor(probe_ids(VOCABULARY))
    logits = model(ids[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].tolist()


if __name__ == "__main__":
    sys.exit(main())
