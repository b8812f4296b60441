"""Throughput of the reward pool: judged answers per second with one and two workers, for plain and symbolic answers."""

import argparse
import json
import sys
import time

from a3po_megatron.config.reward import RewardPoolConfig
from a3po_megatron.reward.judge import MathSettings
from a3po_megatron.reward.pool import WorkerPool
from a3po_megatron.reward.worker import Request

THOUGHT = "Let us see. We add the numbers and divide by two, then we check the result once more.\n" * 20


def requests(kind: str, count: int) -> list[Request]:
    """Return `count` requests with right answers: integers, fractions against decimals, or expressions."""
    forms = {
        "integer": ("{i}", "Answer: {i}"),
        "fraction": (r"\frac{{{i}}}{{7}}", r"So it is $\boxed{{{i}/7}}$."),
        "expression": ("x^2+{i}x", r"So it is $\boxed{{x(x+{i})}}$."),
    }
    gold, response = forms[kind]
    settings = MathSettings()
    return [
        Request("math", gold.format(i=i), THOUGHT + response.format(i=i), settings) for i in range(1000, 1000 + count)
    ]


def measure(pool: WorkerPool, kind: str, count: int) -> dict[str, float | int | str]:
    """Return one row: answers per second of workers that run already."""
    start = time.perf_counter()
    verdicts = pool.judge_now(requests(kind, count))
    time_s = time.perf_counter() - start
    assert all(verdict.reward == 1.0 for verdict in verdicts)
    return {"answers": kind, "workers": pool.config.num_workers, "count": count, "per_s": round(count / time_s, 1)}


def main(argv: list[str]) -> int:
    """Print a table, or JSON lines with --json."""
    parser = argparse.ArgumentParser(prog="bench_rewards.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON row a measurement")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of answers; default: 1")
    arguments = parser.parse_args(argv)
    for workers in (1, 2):
        with WorkerPool(RewardPoolConfig(num_workers=workers, timeout_s=60)) as pool:
            pool.judge_now(requests("fraction", 4 * workers))
            for kind, count in (("integer", 10000), ("fraction", 2000), ("expression", 300)):
                row = measure(pool, kind, max(1, int(count * arguments.scale)))
                line = f"{kind:12} {workers} workers {row['per_s']:10.1f} answers/s"
                print(json.dumps(row) if arguments.json else line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
