"""Inside the vLLM server of `routing_mismatch.py`: a worker that remembers which experts its routers chose.

vLLM's own `--enable-return-routed-experts` needs its Model Runner V2, and that needs Triton, which vLLM 0.32 accepts on a CPU only
with a CPU back end that Triton's releases lack (vllm/config/vllm.py, vllm/triton_utils/importing.py). So the hook that this
option puts into every router is put there by hand.
"""

from collections import defaultdict
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from a3po_megatron.rollout.weight_engine import WorkerExtension


class Recorder:
    """Takes the place of vLLM's `RoutedExpertsCapturer`: each router hands it what it chose, in every forward pass."""

    def __init__(self) -> None:
        self._rows: dict[int, list[torch.Tensor]] = defaultdict(list)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Remember the expert ids, [tokens, k], of a pass through a layer."""
        self._rows[layer_id].append(topk_ids.detach().to("cpu", copy=True))

    def take(self) -> list[list[list[int]]]:
        """Return the expert ids, [tokens, layers, k], of all passes since the last call."""
        layers = [torch.cat(self._rows[layer]) for layer in sorted(self._rows)]
        self._rows.clear()
        return torch.stack(layers, dim=1).tolist() if layers else []


class RoutingExtension(WorkerExtension):
    """The workers of rollout, with one call more."""

    def take_routing(self) -> list[list[list[int]]]:
        """Return the expert ids, [tokens, layers, k], of every token read since the last call; the first begins to record."""
        worker: Any = self
        if not hasattr(worker, "routing_recorder"):
            worker.routing_recorder = Recorder()
            bind_routed_experts_capturer(worker.get_model(), worker.routing_recorder)
        return worker.routing_recorder.take()
