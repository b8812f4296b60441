"""What a test cluster that was killed left behind is found and removed; a living one's is not."""

import os
import subprocess

import pytest

from tests.slurm.cluster import cluster_names, left_behind, remove

CABLE = ["ip", "link", "add", "a30v1", "type", "veth", "peer", "name", "eth0", "netns", "a30n1"]
BRIDGE = ["ip", "link", "add", "a30br", "type", "bridge"]
CAN_MAKE = os.geteuid() == 0 and not subprocess.run(["unshare", "--net", *BRIDGE], capture_output=True).returncode


def test_only_what_belongs_to_no_living_process_is_left_behind() -> None:
    names = ["lo", "eth0", "a3br", "a312br", "a312v1", "a312n4", "a3345678br", "a3345678n1", "a3x1br", "a312br0"]
    assert left_behind(names, [1, 2, 5_345_678]) == ["a312br", "a312v1", "a312n4"]  # the last six digits of a long pid
    assert left_behind(names, [12, 345_678]) == []


@pytest.mark.skipif(not CAN_MAKE, reason="needs root and network namespaces")
def test_interfaces_and_namespaces_are_found_and_removed() -> None:
    """Of process 0, which no program is."""
    names = {"a30br", "a30v1", "a30n1"}
    for command in (BRIDGE, ["ip", "netns", "add", "a30n1"], CABLE):
        subprocess.run(command, check=True)
    try:
        assert names <= set(cluster_names())
    finally:
        remove(names)
    assert not names & set(cluster_names())
