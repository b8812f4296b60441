"""What nodes say about themselves, and whether they fit together."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from a3po_megatron.errors import UserError
from a3po_megatron.launch import node_facts
from a3po_megatron.launch.node_facts import NodeFacts, candidate_ports, check_facts

GPU = NodeFacts(
    node="n1",
    address="10.0.0.1",
    versions={"python": "3.12.1", "vllm": "0.32.0", "glibc": "2.36"},
    gpus=["NVIDIA H100 80GB HBM3"] * 8,
    driver="580.65.06",
    cuda="13.0",
    has_cuda_compat=False,
    sees_model=True,
    free_run_dir_bytes=10**12,
    free_ports=[10040, 10080],
)


def other(**changes: object) -> NodeFacts:
    return msgspec.structs.replace(GPU, node="n2", **changes)


def test_the_first_ports_that_are_free_on_all_nodes_are_chosen() -> None:
    assert check_facts([GPU, other(free_ports=[10080, 10120])], 8, "m", 10**9) == 10080


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sees_model": False}, "MODEL_PATH=m: n2 sees no config.json there"),
        ({"free_run_dir_bytes": 5 * 10**8}, "RUN_DIR: 0.5 GB free, MIN_FREE_GB=1 are asked for"),
        ({"gpus": ["NVIDIA H100 80GB HBM3"] * 7}, "n2 has 7 GPUs, GPUS_PER_NODE=8"),
        (
            {"driver": "570.1"},
            "n2: driver 570.1 is too old for CUDA 13.0, which needs 580 or newer; put the folder of the cuda-compat",
        ),
        ({"driver": "[N/A]"}, "n2: nvidia-smi names the driver '[N/A]'; it is not loaded or too old"),
        ({"cuda": ""}, "n2: torch is built without CUDA there"),
        (
            {"cuda": "99.0"},
            "n2: torch is built for CUDA 99.0, and which driver that needs is not known here; add it to",
        ),
        ({"versions": {**GPU.versions, "vllm": "0.31.0"}}, "vllm is 0.32.0 on n1 but 0.31.0 on n2"),
        ({"versions": {**GPU.versions, "glibc": "2.31"}}, "glibc is 2.36 on n1 but 2.31 on n2"),
        ({"free_ports": []}, "none of 25 places for the job's ports is free on all of n1, n2"),
    ],
)
def test_a_node_that_does_not_fit_is_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as error:
        check_facts([GPU, other(**changes)], 8, "m", 10**9)
    assert says in str(error.value)


def test_an_old_driver_with_cuda_compat_passes() -> None:
    assert check_facts([GPU, other(driver="570.1", has_cuda_compat=True)], 8, "m", 10**9) == 10040
    assert check_facts([GPU, other(cuda="14.0", has_cuda_compat=True)], 8, "m", 10**9) == 10040


def test_without_gpus_neither_driver_nor_cuda_is_asked_for() -> None:
    assert check_facts([GPU, other(driver="", cuda="", gpus=[])], 0, "m", 10**9) == 10040


def test_jobs_that_follow_each_other_have_ports_of_their_own() -> None:
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, second = candidate_ports(4711, 10), candidate_ports(4712, 10)
    assert abs(first[0] - second[0]) >= 10
    assert len(set(first)) == node_facts.CANDIDATES
    assert all(
        port > 1024 and port + 10 <= ephemeral for job in range(0, 5000, 97) for port in candidate_ports(job, 10)
    )


def test_more_ports_than_a_job_has_are_refused() -> None:
    with pytest.raises(UserError, match="REPLICAS_PER_NODE: a job has 40 ports a node, 41 are needed"):
        candidate_ports(1, 41)


@dataclass
class Place:
    """Ports of one candidate place, one of which is in use."""

    first: int
    taken: socket.socket


@pytest.fixture
def busy_place() -> Place:
    job = os.getpid()
    for first in candidate_ports(job, 3):
        try:
            taken = socket.create_server(("", first + 2))
        except OSError:
            continue
        yield Place(first, taken)
        taken.close()
        return


def test_a_place_with_a_port_in_use_is_not_offered(busy_place: Place, tmp_path: Path) -> None:
    facts = node_facts.look_around(str(tmp_path), tmp_path, os.getpid(), num_ports=3)
    assert busy_place.first not in facts.free_ports
    assert facts.free_ports
    assert not facts.sees_model
    assert facts.versions["glibc"]


def test_gpus_and_driver_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06'\necho 'NVIDIA H200, 580.65.06'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = node_facts.look_around(str(tmp_path), tmp_path, 1, 1)
    assert facts.gpus == ["NVIDIA H200"] * 2
    assert facts.driver == "580.65.06"
    program.write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    with pytest.raises(UserError, match="nvidia-smi failed: Driver/library version mismatch"):
        node_facts.look_around(str(tmp_path), tmp_path, 1, 1)


def test_a_hung_nvidia_smi_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(node_facts, "NVIDIA_SMI_S", 0.2)
    with pytest.raises(UserError, match="nvidia-smi did not answer"):
        node_facts.look_around(str(tmp_path), tmp_path, 1, 1)


def test_cuda_compat_is_a_driver_library_in_the_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/compat:{tmp_path}")
    assert not node_facts.look_around(str(tmp_path), tmp_path, 1, 1).has_cuda_compat
    (tmp_path / "libcuda.so.1").touch()
    assert node_facts.look_around(str(tmp_path), tmp_path, 1, 1).has_cuda_compat


def test_facts_travel_whole(tmp_path: Path) -> None:
    node_facts.write_facts(tmp_path, GPU)
    node_facts.write_facts(tmp_path, other())
    assert node_facts.read_facts(tmp_path, ["n1", "n2"]) == [GPU, other()]


def test_a_file_system_that_is_not_shared_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "SHARED_FILES_S", 0.3)
    with pytest.raises(UserError, match="must lie on a file system that all nodes share"):
        node_facts.wait_for_canary(tmp_path, "sing")
    with pytest.raises(UserError, match="from n1, n2: is RUN_DIR on a file system all nodes share"):
        node_facts.read_facts(tmp_path, ["n1", "n2"])
    (tmp_path / node_facts.CANARY).write_text("sing\n")
    node_facts.wait_for_canary(tmp_path, "sing")
