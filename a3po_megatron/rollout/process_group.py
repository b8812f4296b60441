"""What Linux knows of a server's processes: who is in the group, and which shared memory they have mapped."""

import os
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def group_members(group: int) -> list[int]:
    """Return the living processes (zombies left out) of a process group, from /proc."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, its_group = stat.rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                members.append(int(entry))
    return members


def shared_memory_of(processes: Iterable[int]) -> set[Path]:
    """Return the files in shared memory that these processes have mapped, still there, and nobody removes when they are killed."""
    paths = set()
    for process in processes:
        try:
            lines = Path("/proc", str(process), "maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        mapped = (line.split(maxsplit=5)[5] for line in lines if line.count("/") and len(line.split(maxsplit=5)) == 6)
        paths |= {
            Path(path) for path in mapped if Path(path).parent == SHARED_MEMORY and not path.endswith(" (deleted)")
        }
    return paths
