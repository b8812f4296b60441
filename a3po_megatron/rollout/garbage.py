"""How often the process that reads all tokens of the fleet looks for cyclic garbage."""

import gc


def collect_rarely() -> None:
    """Let Python's collector run seldom: with thousands of requests under way it walks over millions of living objects.

    Left alone it took a third of the CPU time of 5,000 requests at once (`tools/bench_fleet.py`).
    """
    gc.set_threshold(100_000, 20, 20)
