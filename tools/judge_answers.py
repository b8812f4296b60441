"""Judge answers: prints one JSON row for each row of a JSON lines file, in order, with `reward` and `reason`.

A row has `gold` (the truth: an answer, or a solution that ends with one) and `response` (what a model wrote).
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from a3po_megatron.config.reward import RewardPoolConfig
from a3po_megatron.errors import UserError, exit_on_user_error
from a3po_megatron.records import Verdict
from a3po_megatron.reward.base import RewardError
from a3po_megatron.reward.extract import CONVENTIONS
from a3po_megatron.reward.judge import MathSettings
from a3po_megatron.reward.pool import WorkerPool
from a3po_megatron.reward.worker import Request


def read_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, gold, response). Raises UserError naming file and line."""
    try:
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from None
    if lines == [b""]:
        raise UserError(f"{path}: the file is empty; expected a JSON object a line")
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON: {error}") from None
        yield number, _text(row, "gold", where), _text(row, "response", where)


def _text(row: Any, key: str, where: str) -> str:
    if not isinstance(row, dict) or key not in row:
        raise UserError(f"{where}: expected an object with 'gold' and 'response'; '{key}' is missing")
    value = row[key]
    if key == "gold" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{where}: '{key}' is not text but {type(value).__name__}")
    return value


def judge(path: Path, pool: WorkerPool, settings: MathSettings) -> None:
    """Print one row a row, all of them; then raise UserError if a gold could not be judged."""
    rows = list(read_rows(path))  # all of them are looked at before the first is judged
    futures = [pool.submit(Request("math", gold, response, settings)) for _, gold, response in rows]
    bad_truths = []
    for (number, gold, _), future in zip(rows, futures, strict=True):
        verdict = _result(future)
        if verdict is None:
            verdict = Verdict(0.0, "the gold cannot be judged")
            bad_truths.append((number, gold))
        row = {"reward": verdict.reward, "reason": verdict.reason, "extracted": verdict.extracted}
        print(json.dumps(row, ensure_ascii=False))
        if sys.stderr.isatty():
            print(f"\r{number}/{len(rows)}", end="", file=sys.stderr)
    if bad_truths:
        number, gold = bad_truths[0]
        others = f", and {len(bad_truths) - 1} more" if bad_truths[1:] else ""
        raise UserError(
            f"{path}, line {number}: the gold {gold[:80]!r} cannot be judged{others}: no reading as an answer"
        )


def _result(future: Future[Verdict]) -> Verdict | None:
    """Return the verdict; None where the gold is to blame."""
    try:
        return future.result()
    except RewardError:
        return None


def main(argv: list[str]) -> int:
    """Judge the file; the exit code is 2 for a user's mistake."""
    defaults = RewardPoolConfig()
    parser = argparse.ArgumentParser(prog="judge_answers.py", description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help="JSON lines with `gold` and `response`")
    parser.add_argument(
        "--convention", choices=CONVENTIONS, default="auto", help="where the answer stands; default: auto"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=defaults.timeout_s, help="of one answer; default: %(default)g"
    )
    parser.add_argument("--workers", type=int, default=defaults.num_workers, help="processes; default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1 or not arguments.timeout_s > 0:
        raise UserError(f"--workers {arguments.workers} --timeout-s {arguments.timeout_s:g}: both must be above 0")
    with WorkerPool(RewardPoolConfig(num_workers=arguments.workers, timeout_s=arguments.timeout_s)) as pool:
        judge(arguments.rows, pool, MathSettings(arguments.convention))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
