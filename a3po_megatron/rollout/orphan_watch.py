"""Ends a vLLM server whose supervisor is gone, so that a killed supervisor leaves no process and no shared memory behind."""

import os
import signal
import threading
import time
from contextlib import suppress

from a3po_megatron.rollout.process_group import group_members, shared_memory_of

SUPERVISOR_VARIABLE = "A3PO_SUPERVISOR_PID"
POLL_S = 1.0
GRACE_S = 10.0


def start_if_asked() -> None:
    """Watch the process that the environment names as this server's parent, in a background thread."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE, "")
    if supervisor:
        threading.Thread(target=_watch, args=(int(supervisor),), name="orphan-watch", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(POLL_S)
    # The supervisor makes a server the leader of its own process group, which holds the engine's processes too.
    assert os.getpgid(0) == os.getpid(), "a supervised server must lead its own process group"
    _remove_shared_memory()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    _remove_shared_memory()  # of what was still starting at the first look
    os.killpg(0, signal.SIGKILL)


def _remove_shared_memory() -> None:
    """Nobody is left to do it afterwards; whoever has mapped a file keeps it until its end. The kill must come, whatever fails."""
    with suppress(OSError):
        for path in shared_memory_of(group_members(os.getpid())):
            with suppress(OSError):
                path.unlink()
