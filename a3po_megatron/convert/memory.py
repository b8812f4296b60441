"""How much memory a conversion took, measured by the kernel."""

from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The highest resident set of this process since construction, above what it was then: what the imports take is left out."""

    def __init__(self) -> None:
        CLEAR_REFS.write_text("5")  # the peak becomes what is resident now (proc_pid_clear_refs(5))
        self._before = _status_bytes("VmRSS")

    def bytes_above_start(self) -> int:
        """Return the peak so far."""
        return max(0, _status_bytes("VmHWM") - self._before)


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
