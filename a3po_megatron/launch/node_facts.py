"""What each node of a job says about itself before any GPU time is spent, and whether the nodes fit together.

Every node writes its facts as JSON into a folder on the shared file system; one process reads all of them. That the files
arrive, and that each node could read what the first one wrote, is the proof that the file system is shared.
"""

import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from a3po_megatron.config.load import engine_versions
from a3po_megatron.errors import UserError

CANARY = "canary"  # file that the batch script writes and every node reads
LOWEST_PORT = 10000
PORTS_PER_JOB = 40
CANDIDATES = 25  # places for a job's ports that are looked at
SHARED_FILES_S = 60.0  # that a file may take to be seen on another node
# Oldest driver of each CUDA major version (CUDA release notes, minor compatibility).
DRIVER_OF_CUDA = {13: 580, 12: 525}
NVIDIA_SMI_S = 60.0
POLL_S = 0.1


class NodeFacts(msgspec.Struct, frozen=True):
    """One node. `free_ports`: first ports of the candidate places in which all ports are free."""

    node: str
    address: str  # at which the other nodes reach it
    versions: dict[str, str]
    gpus: list[str]
    driver: str  # empty: no GPU driver
    cuda: str  # that torch was built for; empty: none
    has_cuda_compat: bool  # a driver library that goes before the system's
    sees_model: bool
    free_run_dir_bytes: int
    free_ports: list[int]


def look_around(model_path: str, run_dir: Path, job_id: int, num_ports: int) -> NodeFacts:
    """Return the facts of this node. Raises UserError when the GPU driver does not answer."""
    gpus, driver = _gpus()
    return NodeFacts(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        address=os.environ.get("A3PO_ADDRESS", "127.0.0.1"),  # node.sh finds it
        versions={**engine_versions(), "glibc": platform.libc_ver()[1]},
        gpus=gpus,
        driver=driver,
        cuda=_cuda_of_torch(),
        has_cuda_compat=any(
            (Path(folder) / "libcuda.so.1").exists()
            for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")
            if folder
        ),
        sees_model=(Path(model_path) / "config.json").is_file(),
        free_run_dir_bytes=shutil.disk_usage(run_dir).free,
        free_ports=[first for first in candidate_ports(job_id, num_ports) if _all_free(first, num_ports)],
    )


def candidate_ports(job_id: int, num_ports: int) -> list[int]:
    """Return first ports of places for a job's ports, best first: from the job's id, below the ports that Linux gives out."""
    if num_ports > PORTS_PER_JOB:
        raise UserError(f"REPLICAS_PER_NODE: a job has {PORTS_PER_JOB} ports a node, {num_ports} are needed")
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    places = (ephemeral - LOWEST_PORT) // PORTS_PER_JOB
    if places < CANDIDATES:
        raise UserError(
            f"{socket.gethostname()}: Linux gives out ports from {ephemeral} on (net.ipv4.ip_local_port_range), which leaves too "
            f"few above {LOWEST_PORT} for jobs; let it start at {LOWEST_PORT + CANDIDATES * PORTS_PER_JOB} or higher"
        )
    return [LOWEST_PORT + (job_id + offset) % places * PORTS_PER_JOB for offset in range(CANDIDATES)]


def wait_for_canary(folder: Path, text: str) -> None:
    """Return once this node sees `text` in the canary file. Raises UserError when it never does."""
    deadline = time.monotonic() + SHARED_FILES_S
    while time.monotonic() < deadline:
        path = folder / CANARY
        if path.is_file() and path.read_text().strip() == text:
            return
        time.sleep(POLL_S)
    raise UserError(
        f"{socket.gethostname()} does not see {folder / CANARY}, which the first node wrote {SHARED_FILES_S:g} s ago: "
        "RUN_DIR must lie on a file system that all nodes share"
    )


def write_facts(folder: Path, facts: NodeFacts) -> None:
    """Put the facts beside the canary, whole or not at all."""
    temporary = folder / f".{facts.node}.tmp"
    temporary.write_bytes(msgspec.json.encode(facts))
    temporary.rename(folder / f"{facts.node}.json")


def read_facts(folder: Path, nodes: Sequence[str]) -> list[NodeFacts]:
    """Return the facts of `nodes`, waiting until all have arrived. Raises UserError naming those that have not."""
    deadline = time.monotonic() + SHARED_FILES_S
    while missing := [node for node in nodes if not (folder / f"{node}.json").is_file()]:
        if time.monotonic() > deadline:
            raise UserError(
                f"nothing in {folder} from {', '.join(missing)}: is RUN_DIR on a file system all nodes share?"
            )
        time.sleep(POLL_S)
    return [msgspec.json.decode((folder / f"{node}.json").read_bytes(), type=NodeFacts) for node in nodes]


def check_facts(facts: Sequence[NodeFacts], gpus_per_node: int, model_path: str, min_free_bytes: int) -> int:
    """Return the first of the ports that are free on all nodes. Raises UserError naming the node that does not fit."""
    for node in facts:
        if not node.sees_model:
            raise UserError(f"MODEL_PATH={model_path}: {node.node} sees no config.json there; use a shared file system")
        if node.free_run_dir_bytes < min_free_bytes:
            raise UserError(
                f"RUN_DIR: {node.free_run_dir_bytes / 1e9:.1f} GB free, MIN_FREE_GB={min_free_bytes / 1e9:g} are asked for"
            )
        if len(node.gpus) < gpus_per_node:
            raise UserError(f"{node.node} has {len(node.gpus)} GPUs, GPUS_PER_NODE={gpus_per_node}")
        if gpus_per_node:
            _check_driver(node)
    first = facts[0]
    for node in facts[1:]:
        for name, version in first.versions.items():
            if node.versions.get(name) != version:
                raise UserError(
                    f"{name} is {version} on {first.node} but {node.versions.get(name)} on {node.node}; "
                    "every node needs the same environment"
                )
    common = [port for port in first.free_ports if all(port in node.free_ports for node in facts)]
    if not common:
        raise UserError(
            f"none of {CANDIDATES} places for the job's ports is free on all of {', '.join(n.node for n in facts)}"
        )
    return common[0]


def _check_driver(node: NodeFacts) -> None:
    if not node.cuda:
        raise UserError(f"{node.node}: torch is built without CUDA there; install requirements/gpu.txt")
    version = node.driver.split(".")[0]
    if not version.isdigit():
        raise UserError(f"{node.node}: nvidia-smi names the driver '{node.driver}'; it is not loaded or too old")
    if node.has_cuda_compat:
        return
    if (needed := DRIVER_OF_CUDA.get(int(node.cuda.split(".")[0]))) is None:
        raise UserError(
            f"{node.node}: torch is built for CUDA {node.cuda}, and which driver that needs is not known here; add it to "
            "DRIVER_OF_CUDA in a3po_megatron/launch/node_facts.py"
        )
    if int(version) < needed:
        raise UserError(
            f"{node.node}: driver {node.driver} is too old for CUDA {node.cuda}, which needs {needed} or newer; "
            "put the folder of the cuda-compat package into LD_LIBRARY_PATH, or ask for a newer driver"
        )


def _gpus() -> tuple[list[str], str]:
    """Return names of the visible GPUs and the driver's version."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{socket.gethostname()}: nvidia-smi did not answer within {NVIDIA_SMI_S:g} s") from None
    if done.returncode:
        raise UserError(f"{socket.gethostname()}: nvidia-smi failed: {(done.stdout + done.stderr).strip()[:200]}")
    rows = [line.rsplit(", ", 1) for line in done.stdout.splitlines() if line.strip()]
    return [name for name, _ in rows], rows[0][1].strip() if rows else ""


def _cuda_of_torch() -> str:
    """Return the CUDA version of the installed torch, read from its files: the import would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    found = re.search(r"^cuda[^=\n]*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def _all_free(first: int, count: int) -> bool:
    """Whether nothing on this node listens on any of `count` ports from `first` on."""
    for port in range(first, first + count):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True
