"""How long new weights take from a Megatron actor to two replicas, pause to resume, beside a raw broadcast of the same bytes.

Two cases: a SmolLM2-135M shape from PP2 ranks, a Qwen3 shape of 100 M parameters from TP2 x PP2 ranks, random float32 weights.
The actor's ranks, its publisher, the fleet and the receivers are the real ones; the replicas are processes without a model
(tools/replica_stand_in.py), which copy each tensor. All on this machine, over gloo. The raw broadcast sends buckets of the same
sizes over the same group, one after the other, with nobody packing, checking or loading. Medians of the repeats.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]  # of this checkout, from whichever folder it is started
sys.path.insert(0, str(ROOT))
HOST = "127.0.0.1"
MEGABYTE = 1e6
AIM = 0.8  # of the raw broadcast's speed
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2_135m": {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "qwen3_100m": {
        "model_type": "qwen3", "num_hidden_layers": 12, "hidden_size": 640, "intermediate_size": 1920, "head_dim": 64,
        "num_attention_heads": 10, "num_key_value_heads": 2, "vocab_size": 49152, "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}


@dataclass(frozen=True)
class Case:
    """One model on one layout."""

    shape: str
    tensor_parallel: int
    pipeline_parallel: int

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.shape} TP{self.tensor_parallel} PP{self.pipeline_parallel}"


CASES = (Case("smollm2_135m", 1, 2), Case("qwen3_100m", 2, 2))


def main() -> int:
    """Measure every case, and print a table or one JSON object."""
    arguments = parse(sys.argv[1:])
    if arguments.rank_of >= 0:
        run_rank(CASES[arguments.rank_of], arguments)
        return 0
    chosen = [index for index, case in enumerate(CASES) if case.shape in arguments.shape]
    results = [measure(index, arguments) for index in chosen]
    print(json.dumps({"cases": results}) if arguments.json else "\n".join(map(table, results)))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench_weights.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="two layers a model and one repeat: shows that it works")
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="default: both")
    parser.add_argument("--repeats", type=int, default=3, help="publications that count; default: %(default)s")
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one case; default: %(default)s")
    parser.add_argument("--rank-of", type=int, default=-1, help=argparse.SUPPRESS)  # the child process of one rank
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replicas", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repeats, arguments.bucket_bytes = 1, min(arguments.bucket_bytes, 16 << 20)
    return arguments


def measure(index: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start two replicas and the ranks of a case; return what rank 0 found."""
    case = CASES[index]
    shape = {**COMMON, **SHAPES[case.shape], **({"num_hidden_layers": 2} if arguments.quick else {})}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        replicas = [start_replica() for _ in range(2)]
        try:
            return run_ranks(index, arguments, folder, [url for _, url in replicas])
        finally:
            for process, _ in replicas:
                process.kill()
                process.join()


def start_replica() -> tuple[Any, str]:
    """Return the process of a stand-in and its url."""
    from tools.replica_stand_in import serve

    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(there,), daemon=True)
    process.start()
    if not here.poll(120):
        raise RuntimeError("a replica did not start within 120 s")
    return process, f"http://{HOST}:{here.recv()}"


def run_ranks(index: int, arguments: argparse.Namespace, folder: str, replicas: list[str]) -> dict[str, Any]:
    """Run the ranks of a case as processes; return the JSON object that rank 0 wrote."""
    case = CASES[index]
    world_size = case.tensor_parallel * case.pipeline_parallel
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", str(index), "--folder", folder]
    command += ["--repeats", str(arguments.repeats), "--bucket-bytes", str(arguments.bucket_bytes)]
    command += ["--replicas", *replicas]
    base = os.environ | {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "LOCAL_WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(command, env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world_size)
    ]
    try:
        deadline = time.monotonic() + arguments.timeout_s
        for rank, process in enumerate(ranks):
            if process.wait(max(0.1, deadline - time.monotonic())) != 0:
                raise RuntimeError(f"{case.name}: rank {rank} ended with code {process.returncode}")
    finally:
        for process in ranks:
            process.kill()
    return json.loads((Path(folder) / "result.json").read_text())


class FleetLink:
    """The controller's part of a publication: a fleet in a thread of this process."""

    def __init__(self, folder: Path, bucket_bytes: int, replicas: list[str]) -> None:
        from a3po_megatron.config.rollout import RolloutConfig
        from a3po_megatron.rollout.fleet import Fleet

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.sent: Any = None
        self.failed: dict[str, str] = {}
        self.config = RolloutConfig(bucket_bytes=bucket_bytes, keep_published=False, probe_max_change=0.0)

        async def make() -> Fleet:
            fleet = Fleet(self.config, "token", folder / "rendezvous")
            for number, url in enumerate(replicas):
                await fleet.register(f"replica {number}", url, 1)
            return fleet

        self.fleet = self._do(make())

    def _do[T](self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def begin_publication(self, manifest: Any) -> Any:
        """Pause the replicas and let them receive."""
        fields = {"names": manifest.names, "dtypes": manifest.dtypes, "shapes": manifest.shapes}
        return self._do(self.fleet.begin_publication(manifest.version, fields, manifest.transfer))

    def finish_publication(self, message: Any) -> Any:
        """Wait for them and let them go on."""
        began = time.perf_counter()
        outcome = self._do(self.fleet.finish_publication(message.version, message.error, message.kept))
        self.finish_s = time.perf_counter() - began
        self.failed |= outcome.failed
        return outcome


def run_rank(case: Case, arguments: argparse.Namespace) -> None:
    """Be one rank: publish some versions; rank 0 measures."""
    from a3po_megatron.actor import device
    from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
    from a3po_megatron.config.schema import ModelConfig

    settings = ActorConfig(device="cpu", tensor_parallel=case.tensor_parallel, pipeline_parallel=case.pipeline_parallel)
    device.start(settings)  # before the import of megatron below
    from a3po_megatron.actor.actor import Actor
    from a3po_megatron.actor.control import ControlGroup
    from a3po_megatron.actor.publish import Publisher
    from a3po_megatron.config.model_shape import read_model_shape

    shape = read_model_shape(arguments.folder)
    actor = Actor(shape, ModelConfig(init="random"), settings, OptimizerConfig(), seed=0, temperature=1.0)
    is_first = os.environ["RANK"] == "0"
    link = FleetLink(arguments.folder, arguments.bucket_bytes, arguments.replicas) if is_first else None
    control = ControlGroup(600.0)
    from a3po_megatron.config.rollout import RolloutConfig

    publisher = Publisher(actor, control, link.config if link else RolloutConfig(), link)
    if link is None:
        for version in range(1, arguments.repeats + 2):
            publisher.publish(version)
    else:
        result = measure_publications(publisher, link, arguments)
        (arguments.folder / "result.json").write_text(json.dumps({"case": case.name, **result}))
    publisher.close()
    control.close()
    actor.close()
    device.stop()


def measure_publications(publisher: Any, link: FleetLink, arguments: argparse.Namespace) -> dict[str, Any]:
    """Publish once to meet, with an eye on memory, then `repeats` times against the clock, each beside a raw broadcast."""
    from a3po_megatron.convert.memory import PeakMemory
    from a3po_megatron.rollout import buckets

    sent: list[Any] = []
    memory = PeakMemory()
    publisher.publish(1)
    peak_extra_bytes = memory.bytes_above_start()
    sender = publisher._sender
    send = sender.send

    def send_and_note(*of: Any) -> Any:  # to look at its times
        sent.append(send(*of))
        return sent[-1]

    sender.send = send_and_note
    plan = buckets.plan(publisher._specs, arguments.bucket_bytes)
    sizes = [bucket.wire_bytes for bucket in plan]
    rows = []
    for version in range(2, arguments.repeats + 2):
        began = time.perf_counter()
        publisher.publish(version)
        whole = time.perf_counter() - began
        row = {"publication": whole, "raw": raw_broadcast(sender._group, sizes, arguments.replicas)}
        loads = [replica_seconds(url)["load"] for url in arguments.replicas]
        rows.append(row | sent[-1].seconds | {"load": max(loads), "finish": link.finish_s})
    if link.failed:
        raise RuntimeError(f"replicas failed: {link.failed}")
    seconds = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "bytes": sum(bucket.num_bytes for bucket in plan),
        "buckets": len(plan),
        "largest_bucket_bytes": max(sizes),
        "seconds": seconds,
        "ratio_to_raw_broadcast": statistics.median(row["raw"] / row["publication"] for row in rows),
        "aim": AIM,
        "peak_extra_bytes": peak_extra_bytes,
        "peak_extra_buckets": peak_extra_bytes / max(sizes),
    }


def raw_broadcast(group: Any, sizes: list[int], replicas: list[str]) -> float:
    """Return the seconds that the wire alone needs for buffers of `sizes`."""
    import httpx
    import torch

    def receive(url: str) -> None:
        httpx.post(f"{url}/receive_raw", json={"sizes": sizes}, timeout=300, trust_env=False).raise_for_status()

    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    began = time.perf_counter()
    with ThreadPoolExecutor(len(replicas)) as pool:
        received = [pool.submit(receive, url) for url in replicas]
        for size in sizes:
            group.broadcast(buffer[:size], "sending raw bytes").wait()
        for result in received:
            result.result()
    return time.perf_counter() - began


def replica_seconds(url: str) -> dict[str, float]:
    """Return how long a replica's last calls took."""
    import httpx

    return httpx.get(f"{url}/weights", timeout=60, trust_env=False).json()["seconds"]


def table(result: dict[str, Any]) -> str:
    """Return one case as lines for a reader."""
    seconds = result["seconds"]
    phases = ", ".join(f"{name} {seconds[name]:.3f}" for name in ("gather", "pack", "wire", "load", "finish"))
    speed = result["bytes"] / seconds["publication"] / MEGABYTE
    return "\n".join(
        [
            f"{result['case']}: {result['bytes'] / MEGABYTE:.0f} MB in {result['buckets']} buckets",
            f"  publication {seconds['publication']:.3f} s ({speed:.0f} MB/s), raw broadcast {seconds['raw']:.3f} s: "
            f"{result['ratio_to_raw_broadcast']:.2f} of its speed (aim {AIM})",
            f"  seconds: {phases} (wire: only what packing did not hide; load: in the slower replica, beside the wire)",
            f"  peak extra memory of rank 0: {result['peak_extra_bytes'] / MEGABYTE:.0f} MB, "
            f"{result['peak_extra_buckets']:.1f} of the largest bucket",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
