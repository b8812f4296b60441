"""How much memory a piece of work in this process took, measured by the kernel."""

import resource
from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The highest resident set of this process since construction, above what it was then: what the imports take is left out.

    Where the kernel does not let its peak be set back, it is that above the highest one until then, which may be too little.
    """

    def __init__(self) -> None:
        try:
            CLEAR_REFS.write_text("5")  # the peak becomes what is resident now (proc_pid_clear_refs(5))
            self._before = _status_bytes("VmRSS")
            self._peak = _status_peak
            self._peak()
        except (OSError, StopIteration):
            # Not permitted, or no such file or line: sandboxes, and kernels built without it.
            self._peak = _usage_peak
            self._before = self._peak()

    def bytes_above_start(self) -> int:
        """Return the peak so far."""
        return max(0, self._peak() - self._before)


def _status_peak() -> int:
    return _status_bytes("VmHWM")


def _usage_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
