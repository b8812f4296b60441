"""How a vLLM worker takes new weights: `weight_receiver.py` behind vLLM's weight-transfer routes. Runs inside vLLM only.

vLLM imports this module because `--worker-extension-cls` names `WorkerExtension`; the import registers the engine,
which `--weight-transfer-config` then picks. The order of calls is vLLM's: init (once a membership), then for each
version start, update, finish, with generation paused around them. After a failed update the model may hold a mixture of
versions: the replica stays paused until it is filled again whole, or is dropped and restarted by its supervisor.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.probe_engine import probe_logprobs
from a3po_megatron.rollout.server_args import WEIGHT_BACKEND
from a3po_megatron.rollout.weight_receiver import Incoming, Tensors, WeightReceiver


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Where and as whom the workers of this server join the weight group."""

    transfer: str  # gloo or nccl
    first_rank: int  # rank of this server's first worker; the actor has rank 0
    world_size: int  # actor and all workers of all replicas
    timeout_s: float
    store: str = ""  # gloo: file in which the members meet
    unique_id: str = ""  # nccl: base64 of the actor's ncclUniqueId


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """One version on its way: what will be sent, in which order, and in buckets of what size."""

    version: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket_bytes: int
    folder: str = ""  # where the version lies as files; empty: it comes through the weight group


class BucketWeightEngine(WeightTransferEngine[JoinInfo, VersionInfo]):
    """Receives buckets and loads them layer by layer; at most a few buckets are in memory at a time."""

    init_info_cls = JoinInfo
    update_info_cls = VersionInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        """vLLM makes the engine once the model is loaded."""
        super().__init__(config, vllm_config, device, model)
        self._receiver = WeightReceiver()
        self._is_half_loaded = False
        # Loading leaves no trace of a parameter that was forgotten, so remember what there is to load.
        self._parameters = {name for name, _ in model.named_parameters()}
        self._tied_layers = tied_layers(model)

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the group of a new epoch; the old group is left first."""
        workers = self.parallel_config
        rank = init_info.first_rank + workers.data_parallel_index * workers.world_size + workers.rank
        self._receiver.join(asdict(init_info), rank, init_info.timeout_s, own_host())

    def start_weight_update(self) -> None:
        """Put every layer back into the state in which it can be loaded."""
        if self._is_half_loaded:
            # Else vLLM would add what comes now to what came before the update broke off, and count both.
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_half_loaded = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        """Receive and load one version. On any error leave the group, so that the other members fail at once too."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Receive and load every bucket; each is checked before it is loaded, and in the end that nothing is missing."""
        specs = buckets.read_manifest(
            {"names": update_info.names, "dtypes": update_info.dtypes, "shapes": update_info.shapes}
        )
        incoming = Incoming(update_info.version, specs, update_info.bucket_bytes, update_info.folder)
        loaded = self._receiver.receive(incoming, lambda tensors: self._load(update_info.names, tensors))
        missing = self._parameters - set(loaded)
        if missing:
            raise ValueError(f"version {update_info.version} lacks weights for {', '.join(sorted(missing))}")

    def _load(self, names: Sequence[str], tensors: Tensors) -> set[str]:
        check_fused_parts(names, getattr(self.model, "packed_modules_mapping", {}))
        return self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Bring every layer into the form that the kernels use."""
        finalize_layerwise_reload(self.model, self.model_config)
        # vLLM skips a layer that loads nothing itself. A tied head got its weights through the embedding, but the
        # packed copy that CPU kernels use would stay that of the old version.
        for layer in self._tied_layers:
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)
        self._is_half_loaded = False

    def shutdown(self) -> None:
        """Leave the weight group."""
        self._receiver.leave()


def own_host() -> str:
    """Return the address of this server's node on the interface to use, which its supervisor put into the environment."""
    return os.environ["VLLM_HOST_IP"]


def tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers whose weight is that of an earlier layer, such as a head tied to the embedding."""
    owners: dict[int, torch.nn.Module] = {}
    tied = []
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if owners.setdefault(id(parameter), layer) is not layer:
                tied.append(layer)
    return tied


def check_fused_parts(names: Sequence[str], fused: dict[str, list[str]]) -> None:
    """Raise ValueError when only some parts of a fused layer are named, such as q without k and v.

    vLLM would load what there is and leave the rest of the fused matrix as it happens to be in memory.
    """
    present = set(names)
    for parts in fused.values():
        for name in names:
            segments = name.split(".")
            for part in parts:
                if part not in segments:
                    continue
                position = segments.index(part)
                siblings = [".".join([*segments[:position], other, *segments[position + 1 :]]) for other in parts]
                lacking = [sibling for sibling in siblings if sibling not in present]
                if lacking:
                    raise ValueError(
                        f"the manifest names {name} without {', '.join(lacking)}: they are one fused layer"
                    )


class WorkerExtension:
    """Named on vLLM's command line so that every worker imports this module; adds the probe to the worker."""

    def probe_logprobs(self) -> list[float | None] | None:
        """Answer the controller's probe: see `probe_engine.py`."""
        worker: Any = self
        return probe_logprobs(worker.get_model(), worker.vllm_config, worker.device)


if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, BucketWeightEngine)
