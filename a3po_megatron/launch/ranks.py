"""Starts the actor's ranks on this machine through torchrun's own agent, and turns its ending into an exit code."""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from a3po_megatron.errors import USER_ERROR_EXIT_CODE


def is_rank() -> bool:
    """Whether this process was started as a rank, by `run_ranks` or by torchrun itself."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank at all: the one that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def run_ranks(module: str, arguments: Sequence[str], count: int) -> int:
    """Run `python -m module arguments` as `count` ranks; return 0, 2 after a user's mistake in a rank, else 1.

    When one rank fails the others are ended. Ctrl-C and SIGTERM end all of them.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # megatron warns once a rank and module about absent GPU packages
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank has said what is wrong
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return USER_ERROR_EXIT_CODE if USER_ERROR_EXIT_CODE in codes else 1
    except (SignalException, KeyboardInterrupt):
        print(f"{module}: interrupted; its {count} ranks have been ended", file=sys.stderr)
        return 130
    return 0
