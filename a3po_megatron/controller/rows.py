"""What a run leaves to read: metrics.jsonl (one row a step), evals.jsonl, samples/step_NNNNNN.jsonl, samples/eval_NNNNNN.jsonl.

A row has the `eval/...` columns of the evaluation that ended since the row before, if one did; `eval/version` and
`eval/newest_version` say which weights answered. That of the last weights is in evals.jsonl only, with all the others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from a3po_megatron.batching.staleness import is_overdue, staleness
from a3po_megatron.errors import UserError
from a3po_megatron.evaluate.loop import Answers
from a3po_megatron.evaluate.report import sample_lines, version_spans
from a3po_megatron.records import Batch
from a3po_megatron.reward.base import Decoder


def sampled_metrics(batch: Batch, version: int, max_staleness: int, samples_per_prompt: int) -> dict[str, float]:
    """Return what the controller knows about a batch that is about to be trained at `version`."""
    ages = np.concatenate([staleness(sample, version) for sample in batch.samples])
    overdue = [is_overdue(sample, version, max_staleness) for sample in batch.samples]
    groups = batch.advantages.reshape(-1, samples_per_prompt)
    return {
        "reward/mean": float(batch.rewards.mean()),
        "reward/groups_without_signal": float((groups == 0).all(axis=1).mean()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": int(ages.max()),
        "staleness/overdue_tokens": int(np.concatenate(overdue).sum()),
        "rollout/samples_of_several_versions": sum(len(set(s.versions.tolist())) > 1 for s in batch.samples),
        "rollout/truncated": float(np.mean([s.finish_reason == "length" for s in batch.samples])),
        "rollout/response_tokens_mean": float(np.mean([len(s.response_ids) for s in batch.samples])),
    }


def progress_line(row: dict[str, Any], num_steps: int, elapsed_s: float) -> str:
    """Return one row as people follow it; the time left is that of the steps so far, on average."""
    done = row["version"] + 1
    left_s = round(elapsed_s / done * (num_steps - done))
    return (
        f"step {done}/{num_steps}  reward {row['reward/mean']:.3f}  staleness {row['staleness/mean']:.2f} "
        f"(max {row['staleness/max']})  {row['rollout/tokens_per_s']:.0f} tokens/s  "
        f"{left_s // 60} min {left_s % 60:02d} s left"
    )


class RunFiles:
    """Appends to the files of one run. Lines are complete JSON; numbers that are not finite become null."""

    def __init__(self, run_dir: Path, decode: Decoder, *, resume: bool) -> None:
        """Raises UserError if the folder holds rows already and `resume` does not say that they are this run's."""
        rows = run_dir / "metrics.jsonl"
        if not resume and rows.exists() and rows.stat().st_size:
            raise UserError(f"run.dir={run_dir} already holds a run; name another or remove it")
        self._dir = run_dir
        self._decode = decode
        (run_dir / "samples").mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "evals.jsonl"):
            (run_dir / name).open("ab" if resume else "wb").close()  # what a run without a step left is overwritten

    def write_row(self, row: dict[str, Any]) -> None:
        """Append one training step."""
        self._append("metrics.jsonl", row)

    def write_evaluation(self, row: dict[str, Any], answers: Sequence[Answers]) -> None:
        """Append one evaluation, and write its answers as people read them."""
        with (self._dir / "samples" / f"eval_{row['version']:06d}.jsonl").open("wb") as file:
            file.writelines(sample_lines(answers, self._decode))
        self._append("evals.jsonl", row)

    def write_samples(self, batch: Batch, step: int, reasons: Sequence[str]) -> None:
        """Write every sample of a batch as people read it, in batch order; `reasons` [samples] say why each reward."""
        lines = [
            msgspec.json.encode(
                {
                    "problem": sample.problem_id,
                    "prompt": self._decode(sample.prompt_ids.tolist()),
                    "response": self._decode(sample.response_ids.tolist()),
                    "reward": float(reward),
                    "reason": reason,
                    "advantage": float(advantage),
                    "finish_reason": sample.finish_reason,
                    "versions": version_spans(sample.versions.tolist()),
                }
            )
            for sample, reward, reason, advantage in zip(
                batch.samples, batch.rewards, reasons, batch.advantages, strict=True
            )
        ]
        (self._dir / "samples" / f"step_{step:06d}.jsonl").write_bytes(b"\n".join([*lines, b""]))

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self._dir / name).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


class StepMetrics:
    """The controller's part of a row: what it knows of the batch, and what the fleet did since the last row.

    Every call carries `now`, in seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._batch: dict[str, float] = {}
        self._tokens = 0
        self._row_began = now
        self._generating, self._generating_since, self._generating_s = False, now, 0.0
        self._training_began: tuple[float, float] | None = None  # (now, generating_s) when the batch was handed out
        self._overlap: float | None = None
        self._first_batch_at: float | None = None

    def generation(self, now: float, running: bool, new_tokens: int = 0) -> None:
        """A group started or finished: whether any runs from `now` on, and the response tokens that it added."""
        if self._generating:
            self._generating_s += now - self._generating_since
        self._generating, self._generating_since = running, now
        self._tokens += new_tokens

    def handed_out(self, now: float, batch: dict[str, float]) -> None:
        """The actor got a batch and starts to train."""
        self.generation(now, self._generating)
        self._batch = batch
        if self._first_batch_at is None:
            self._first_batch_at = now
        self._training_began, self._overlap = (now, self._generating_s), None

    def training_ended(self, now: float) -> None:
        """The actor asked for a publication."""
        if self._training_began is not None:
            self.generation(now, self._generating)
            began, generating_s = self._training_began
            self._overlap = (self._generating_s - generating_s) / max(now - began, 1e-9)
            self._training_began = None

    def elapsed_s(self, now: float) -> float:
        """Return the seconds since the actor got its first batch."""
        assert self._first_batch_at is not None, "no batch was handed out"
        return now - self._first_batch_at

    def row(self, now: float) -> dict[str, Any]:
        """Return the metrics of the step that is reported now, and begin the next row."""
        self.training_ended(now)
        time_s = max(now - self._row_began, 1e-9)
        row = {
            **self._batch,
            "rollout/tokens_per_s": self._tokens / time_s,
            "rollout/generating_while_training": self._overlap,  # share of the training time
            "time/row_s": time_s,  # since the last row
        }
        self._tokens, self._row_began = 0, now
        return row
