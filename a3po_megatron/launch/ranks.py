"""Starts the actor's ranks of this node through torchrun's own agent, and turns its ending into an exit code."""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from a3po_megatron.errors import INTERRUPTED_EXIT_CODE, USER_ERROR_EXIT_CODE, UserError, exit_on_user_error

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LAUNCHED = "A3PO_LAUNCHED"  # set in ranks that `run_ranks` started
MEETING_S = 300  # that the nodes wait for each other
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun names it to each rank; the agent reads it when the rank fails


@dataclass(frozen=True)
class Nodes:
    """The nodes that share the ranks: how many, which one this is, and where the first one listens (empty: alone)."""

    count: int = 1
    rank: int = 0
    master: str = ""  # host:port of node 0

    def check(self, world_size: int) -> None:
        """Raise UserError when `world_size` ranks cannot be spread evenly over the nodes, or nobody says where to meet."""
        if not 0 <= self.rank < self.count:
            raise UserError(f"--node-rank {self.rank}: the {self.count} nodes are 0 to {self.count - 1}")
        if world_size % self.count:
            raise UserError(
                f"--nodes {self.count} does not divide the {world_size} ranks of actor.tensor_parallel x context_parallel "
                "x pipeline_parallel x data_parallel; use as many ranks on every node"
            )
        if self.count > 1 and not self.master.rpartition(":")[2].isdigit():
            raise UserError(f"--master {self.master or '(empty)'}: with --nodes above 1, name host:port of node 0")


ALONE = Nodes()


def is_rank() -> bool:
    """Whether this process is a rank, started by `run_ranks` or by torchrun itself."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def speaks_for_all() -> bool:
    """Whether this process makes the checks that one makes for all ranks: the launcher, or rank 0 under torchrun itself."""
    return not is_rank() or (LAUNCHED not in os.environ and os.environ["RANK"] == "0")


def exit_code_of(main: Callable[[], int]) -> int:
    """Run a recipe's `main`; a `UserError` becomes exit code 2 and one line, printed by the launcher where there is one."""
    if not (is_rank() and LAUNCHED in os.environ):
        return exit_on_user_error(main)
    try:
        return main()
    except UserError as error:
        Path(os.environ[ERROR_FILE]).write_text(json.dumps({"message": str(error)}))
        return USER_ERROR_EXIT_CODE


def become_only_rank() -> None:
    """Set torchrun's environment for an actor that is alone, in this process: for benchmarks and tools."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    os.environ.update({name: str(value) for name, value in alone.items()})


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_ranks(module: str, arguments: Sequence[str], count: int, nodes: Nodes = ALONE) -> int:
    """Run `python -m module arguments` as `count` ranks over `nodes`; return 0, 2 after a user's mistake in a rank, else 1.

    When one rank fails, the others of this node are ended. Ctrl-C and SIGTERM end all of them.
    """
    nodes.check(count)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # megatron warns once a rank and module about absent GPU packages
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank has said what is wrong
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        config = LaunchConfig(
            min_nodes=nodes.count,
            max_nodes=nodes.count,
            nproc_per_node=count // nodes.count,
            run_id=nodes.master or uuid.uuid4().hex,
            # static: nothing is pickled, and every rank is known beforehand
            rdzv_backend="static",
            rdzv_endpoint=nodes.master or f"127.0.0.1:{_free_port()}",
            rdzv_configs={"rank": nodes.rank, "timeout": MEETING_S},
            local_addr=None if nodes.master else "127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            mistakes = [failure for failure in error.failures.values() if failure.exitcode == USER_ERROR_EXIT_CODE]
            if not mistakes:
                _name_killed(error.failures)
                return 1
            print(f"error: {mistakes[0].message}", file=sys.stderr, flush=True)
            return USER_ERROR_EXIT_CODE
        except (SignalException, KeyboardInterrupt):
            print(f"{module}: interrupted; its {count // nodes.count} ranks have been ended", file=sys.stderr)
            return INTERRUPTED_EXIT_CODE
    return 0


def _name_killed(failures: "Mapping[int, ProcessFailure]") -> None:
    """Say which ranks a signal ended: they could not say it themselves. SIGKILL often means that memory ran out."""
    for rank, failure in failures.items():
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(
                f"error: rank {rank} (process {failure.pid}) was killed by {name}",
                file=sys.stderr,
                flush=True,
            )
