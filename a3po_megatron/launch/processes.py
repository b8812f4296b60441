"""The roles of a run as processes of this machine: start them, watch them, end them with all that they started.

Each role leads a session of its own: Ctrl-C at the terminal reaches the launcher alone, which ends the roles in order.
What a role starts may leave its process group (torchrun's ranks and vLLM's servers do), so this process asks Linux to
become the parent of every orphan below it: nothing that the roles started escapes, and nothing else is touched.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from a3po_megatron.rollout.process_group import shared_memory_of

POLL_S = 0.05
SWEEP_S = 8.0  # for processes that outlive their role, between SIGTERM and SIGKILL
UNKILLABLE_S = 30.0  # after SIGKILL, for a process that waits in the kernel
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Role:
    """A started role. `stop_s`: what it may take to end after SIGTERM before it is killed."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_s: float

    @property
    def exit_code(self) -> int | None:
        """None while it lives; minus the signal's number when one killed it."""
        return self.process.poll()

    def ending(self) -> str:
        """Return how the role ended, as people read it."""
        code = self.exit_code
        if code is None:
            return f"the {self.name} is running"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} {how}"

    def last_lines(self, count: int) -> list[str]:
        """Return the end of the role's log, empty lines left out."""
        lines = [line.rstrip() for line in self.log.read_text(errors="replace").splitlines()]
        return [line for line in lines if line][-count:]


class Roles:
    """Every role of one run, in the order of their start."""

    def __init__(self, log_dir: Path, environment: Mapping[str, str]) -> None:
        """`environment` is that of each role."""
        self._log_dir = log_dir
        self._environment = dict(environment)
        self._roles: dict[str, Role] = {}
        self._shared_memory: set[Path] = set()
        self._not_ours = {child.pid for child in psutil.Process().children(recursive=True)}
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot become the parent of orphaned processes")

    def start(self, name: str, arguments: Sequence[str], stop_s: float) -> Role:
        """Run `python ARGUMENTS` as role `name`; its output goes to `log_dir/NAME.log`."""
        log = self._log_dir / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._roles[name] = Role(name, process, log, stop_s)
        return self._roles[name]

    def ended(self) -> list[Role]:
        """Return the roles that have ended; one that a signal killed first, since its end is why others fail."""
        ended = [role for role in self._roles.values() if role.exit_code is not None]
        return sorted(ended, key=lambda role: role.exit_code or 0)

    def stop(self, order: Sequence[str], hurry: Callable[[], bool] = lambda: False) -> None:
        """End the named roles one after the other, then whatever any role left behind: processes and shared memory.

        A role gets SIGTERM, and SIGKILL after its `stop_s`, or as soon as `hurry` says that nobody wants to wait.
        """
        self._shared_memory |= shared_memory_of(process.pid for process in self._family())
        for name in order:
            if name in self._roles:
                self._stop_role(self._roles[name], hurry)
        self._sweep(hurry)
        for path in self._shared_memory:
            path.unlink(missing_ok=True)

    def _stop_role(self, role: Role, hurry: Callable[[], bool]) -> None:
        if role.exit_code is None:
            role.process.terminate()
        deadline = time.monotonic() + role.stop_s
        while role.exit_code is None:
            if time.monotonic() > deadline + UNKILLABLE_S:
                return  # waits in the kernel; named when the sweep gives up
            if time.monotonic() > deadline or hurry():
                self._shared_memory |= shared_memory_of(process.pid for process in self._family())
                role.process.kill()
            time.sleep(POLL_S)

    def _sweep(self, hurry: Callable[[], bool]) -> None:
        """End what is left of the roles' descendants."""
        deadline = time.monotonic() + SWEEP_S
        asked: set[int] = set()
        while family := self._family():
            if time.monotonic() > deadline + UNKILLABLE_S:
                pids = ", ".join(str(process.pid) for process in family)
                raise RuntimeError(f"processes {pids} cannot be ended, not even by SIGKILL")
            self._shared_memory |= shared_memory_of(process.pid for process in family)
            out_of_patience = time.monotonic() > deadline or hurry()
            for process in family:
                if out_of_patience or process.pid not in asked:
                    asked.add(process.pid)
                    _send(process, signal.SIGKILL if out_of_patience else signal.SIGTERM)
            time.sleep(POLL_S)

    def _family(self) -> list[psutil.Process]:
        """Return the living descendants that the roles brought about, themselves included; buries dead orphans."""
        roles = {role.process.pid for role in self._roles.values()}
        family = []
        for process in psutil.Process().children(recursive=True):
            if process.pid in self._not_ours:
                continue
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    family.append(process)
                elif process.pid not in roles and process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
            except psutil.NoSuchProcess:
                continue
        return family


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it ended meanwhile
