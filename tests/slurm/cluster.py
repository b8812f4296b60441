"""A real SLURM of four nodes on this machine: each node a slurmd in network, UTS, PID and mount namespaces of its own.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge; nothing of the system's own SLURM or munge is used or
changed. GPUs are copies of /dev/null that SLURM hands out as if they were GPUs. Nodes share this machine's file system.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]  # jobs are submitted from here
NODES = 4
GPUS = 8
NETWORK = "10.77.0"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
START_S = 60.0
POLL_S = 0.1
PIDS = 10**6  # names of interfaces may have 15 letters, of which six are for the pid of the cluster's process
NAME = re.compile(r"a3(\d{1,6})(br|v\d+|n\d+)")  # a bridge, a node's end of a cable, a node's network namespace
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


def why_not() -> str | None:
    """Return why no cluster can be started here, None when it can."""
    if os.geteuid() != 0:
        return "a test cluster needs root, for namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tests/slurm/install.sh)"
    probe = [
        "unshare",
        "--net",
        "--uts",
        "--pid",
        "--mount",
        "--fork",
        "--mount-proc",
        "ip",
        "link",
        "add",
        "probe",
        "type",
        "bridge",
    ]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return "a test cluster needs network, process and mount namespaces, which this machine does not allow"
    return None


class Cluster:
    """Started by the constructor; `stop` leaves no process, interface or namespace."""

    def __init__(self, root: Path) -> None:
        """`root`: an empty folder with a short path, since a socket lies in it."""
        self.root = root
        self._tag = f"a3{os.getpid() % PIDS}"
        self._bridge = f"{self._tag}br"
        for name in ("etc", "state", "spool", "log", "run", "gpu"):
            (root / name).mkdir(parents=True)
        self.environment = os.environ | {"SLURM_CONF": str(root / "etc" / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._write_configuration()
        try:
            self._start_network()
            self._start_controllers()
            for number in range(1, NODES + 1):
                self.start_node(number)
            self._wait_for_nodes()
        except BaseException:
            self.stop()
            raise

    def start_node(self, number: int) -> None:
        """Start one node; the whole of it dies with the process that holds it."""
        name = f"node{number}"
        (self.root / "spool" / name).mkdir(exist_ok=True)
        hosts = self.root / "etc" / "hosts"
        inside = f"hostname {name}; mount --bind {hosts} /etc/hosts; exec slurmd -D -N {name}"
        spaces = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        self._spawn(name, ["nsenter", f"--net=/run/netns/{self.namespace(number)}", *spaces, "sh", "-c", inside])

    def namespace(self, number: int) -> str:
        """Return the name of a node's network namespace."""
        return f"{self._tag}n{number}"

    def _is_own(self, name: str) -> bool:
        return name.startswith(tuple(f"{self._tag}{kind}" for kind in ("br", "v", "n")))

    def stop(self) -> None:
        """End every job, daemon and namespace of this cluster."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the daemons may not be there yet, or not any more
            self.run("scancel", "--user=root", check=False)
        for name, daemon in reversed(self._daemons.items()):
            daemon.send_signal(signal.SIGKILL if name.startswith("node") else signal.SIGTERM)
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=20)
        remove(name for name in cluster_names() if self._is_own(name))

    def run(self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
        """Run a SLURM command and return what it prints."""
        done = subprocess.run(
            command,
            env=environment or self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def submit(
        self, script: Path, variables: Mapping[str, str], options: Sequence[str], arguments: Sequence[str]
    ) -> str:
        """Submit a job script as a user does, with variables in the environment; return the job's id."""
        environment = {**self.environment, **variables}
        return self.run("sbatch", "--parsable", *options, str(script), *arguments, environment=environment)

    def field(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        for word in self.run("scontrol", "-o", "show", "job", job).split():
            key, _, value = word.partition("=")
            if key == name:
                return value
        raise AssertionError(f"job {job} has no field {name}")

    def wait_for(self, job: str, states: Sequence[str], timeout_s: float) -> str:
        """Return the job's state once it is one of `states`."""
        deadline = time.monotonic() + timeout_s
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < deadline, f"job {job} is still {state} after {timeout_s:g} s, not {states}"
            time.sleep(POLL_S)
        return state

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _start_network(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True)

        remove(left_behind(cluster_names(), psutil.pids()))  # they would answer at the same addresses
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.254/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for number in range(1, NODES + 1):
            space, outer = self.namespace(number), f"{self._tag}v{number}"
            ip("netns", "add", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outer, "master", self._bridge, "up")
            ip("-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")

    def _start_controllers(self) -> None:
        run, log = self.root / "run", self.root / "log"
        key = self.root / "etc" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        places = [f"--key-file={key}", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid"]
        places += [f"--log-file={log}/munged.log", f"--seed-file={run}/munged.seed"]
        self._spawn("munged", ["munged", "--foreground", "--force", *places])
        deadline = time.monotonic() + START_S
        while not (run / "munge.socket").exists():
            assert time.monotonic() < deadline, f"munged does not start: {(log / 'munged.out').read_text()}"
            time.sleep(POLL_S)
        self._spawn("slurmctld", ["slurmctld", "-D", "-i"])

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + START_S
        while self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split() != ["idle"] * NODES:
            others = [name for name in cluster_names() if not self._is_own(name)]
            assert time.monotonic() < deadline, (
                f"nodes do not come up: {self.run('sinfo', '-N', '-l', check=False)}; of other clusters, at the same "
                f"addresses: {', '.join(others) or 'nothing'}"
            )
            time.sleep(POLL_S)

    def _write_configuration(self) -> None:
        etc, log, run = self.root / "etc", self.root / "log", self.root / "run"
        for number in range(GPUS):
            os.mknod(self.root / "gpu" / f"gpu{number}", 0o020666, os.makedev(1, 3))
        nodes = [
            f"NodeName=node{i} NodeHostname=node{i} NodeAddr={NETWORK}.{i} Sockets=2 CoresPerSocket=32 ThreadsPerCore=1 "
            f"RealMemory=1000000 Gres=gpu:{GPUS} State=UNKNOWN"
            for i in range(1, NODES + 1)
        ]
        settings = {
            "ClusterName": "a3potest",
            "SlurmctldHost": f"{os.uname().nodename}({NETWORK}.254)",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={run}/munge.socket",
            "SlurmctldPort": _free_port(),
            "SlurmdPort": 16818,
            "StateSaveLocation": self.root / "state",
            "SlurmdSpoolDir": f"{self.root}/spool/%n",
            "SlurmctldPidFile": run / "slurmctld.pid",
            "SlurmdPidFile": f"{run}/slurmd.%n.pid",
            "SlurmctldLogFile": log / "slurmctld.log",
            "SlurmdLogFile": f"{log}/slurmd.%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "SwitchType": "switch/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "GresTypes": "gpu",
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MinJobAge": 86400,  # a finished job can be asked about for as long as the tests last
            "SlurmdTimeout": 30,
            "SlurmctldTimeout": 30,
            "KillWait": 20,
            "InactiveLimit": 0,
            "Waittime": 0,
            "MessageTimeout": 30,
            "SchedulerParameters": "sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0",
            # Two jobs may share a node although the scripts ask for whole nodes.
            "PartitionName": "gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        (etc / "slurm.conf").write_text("\n".join([*lines, *nodes]) + "\n")
        (etc / "gres.conf").write_text(f"NodeName=node[1-{NODES}] Name=gpu File={self.root}/gpu/gpu[0-{GPUS - 1}]\n")
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded whatever ProctrackType says
        names = [f"{NETWORK}.{i} node{i}" for i in range(1, NODES + 1)]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")


def cluster_names() -> list[str]:
    """Return the names of all test clusters' interfaces and network namespaces."""
    folder = Path("/run/netns")
    spaces = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [name for name in [*(name for _, name in socket.if_nameindex()), *spaces] if NAME.fullmatch(name)]


def left_behind(names: Iterable[str], pids: Iterable[int]) -> list[str]:
    """Return those `names` of test clusters whose process no longer lives: it was killed before it could clean up."""
    alive = {pid % PIDS for pid in pids}
    return [name for name in names if (match := NAME.fullmatch(name)) and int(match[1]) not in alive]


def remove(names: Iterable[str]) -> None:
    """Remove interfaces and namespaces of test clusters."""
    for name in names:
        kind = "netns" if NAME.fullmatch(name)[2].startswith("n") else "link"
        subprocess.run(["ip", kind, "del", name], capture_output=True)


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
