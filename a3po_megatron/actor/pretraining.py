"""The supervised warm start: questions with answers -> optimizer steps -> a Hugging Face folder.

Every rank runs this; rank 0 also draws the progress bar and writes files.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from a3po_megatron.actor.actor import Actor, StepResult
from a3po_megatron.actor.checkpoint import load_checkpoint
from a3po_megatron.actor.checkpoint_writer import CheckpointWriter
from a3po_megatron.actor.export import export_hf_folder
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.checkpoint_folder import newest_complete
from a3po_megatron.config.load import save_run_record
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import PretrainConfig
from a3po_megatron.data.arithmetic import ArithmeticTask, Question
from a3po_megatron.objective.supervised import SupervisedLoss

if TYPE_CHECKING:
    from rich.progress import Progress


def pretrain(config: PretrainConfig, shape: ModelShape) -> float:
    """Train until `run.num_steps` or `stop_at_accuracy`; return the last held-out accuracy. Collective."""
    actor = Actor(shape, config.model, config.actor, config.optimizer, config.run.seed)
    folder = Path(config.run.dir)
    log = RunLog(config) if dist.get_rank() == 0 else None
    task = ArithmeticTask(config.task)
    heldout = [to_sequence(task, question) for question in task.heldout_questions]
    train = [to_sequence(task, question) for question in task.train_questions[: config.num_questions]]
    first = _resume(actor, folder) if config.run.resume else 0
    writer = CheckpointWriter(actor, folder / "checkpoints", config.run)
    loss, accuracy, done = SupervisedLoss(), None, first
    if log:
        print(f"actor: {actor.kernels.describe()}", flush=True)
        log.open(first)
    for step in range(first, config.run.num_steps):
        with writer.finished_before(NonFiniteError):
            result = actor.train_step(draw_batch(train, config.batch_size, config.run.seed, step), loss)
        done = step + 1
        writer.poll()
        evaluate_now = config.eval_every and done % config.eval_every == 0
        accuracy = greedy_accuracy(actor, heldout) if evaluate_now or done == config.run.num_steps else None
        if log:
            log.row(done, result, accuracy)
        if config.run.checkpoint_every and done % config.run.checkpoint_every == 0:
            writer.save(done)
        if accuracy is not None and accuracy >= config.stop_at_accuracy:
            break
    if accuracy is None:  # nothing was left to train
        accuracy = greedy_accuracy(actor, heldout)
    elif writer.last_step != done:
        writer.save(done)
    writer.finish()
    export_hf_folder(actor, Path(config.model.path), folder / "model")
    if log:
        log.close(f"held-out accuracy {accuracy:.3f} after {done} steps; model in {folder / 'model'}")
    actor.close()
    return accuracy


def to_sequence(task: ArithmeticTask, question: Question) -> TokenSequence:
    """Return prompt and answer as one sequence of which the answer is trainable."""
    prompt, answer = task.encode(question)
    tokens = np.concatenate([prompt, answer]).astype(np.int64)
    return TokenSequence(tokens, np.arange(len(tokens)) >= len(prompt))


def draw_batch(sequences: Sequence[TokenSequence], size: int, seed: int, step: int) -> list[TokenSequence]:
    """Return the batch of one step; it depends on seed and step only, so a resumed run draws what it would have."""
    chosen = np.random.default_rng([seed, step]).integers(0, len(sequences), size)
    return [sequences[i] for i in chosen]


def greedy_accuracy(actor: Actor, sequences: Sequence[TokenSequence]) -> float:
    """Return the fraction of sequences whose trainable tokens greedy decoding would produce. Collective.

    Greedy decoding gives exactly these tokens if and only if each is the most probable after those before it, so one forward
    pass over question and answer decides it.
    """
    matches = actor.is_greedy(sequences)
    right = sum(bool(match[sequences[index].trainable[1:]].all()) for index, match in matches.items())
    return actor.add_up(right) / len(sequences)


def _resume(actor: Actor, folder: Path) -> int:
    newest, _ = newest_complete(folder / "checkpoints")
    assert newest is not None, "recipes/pretrain.py has checked it"
    return load_checkpoint(actor, newest)


class RunLog:
    """Progress bar and metrics.jsonl of rank 0."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config, self.folder = config, Path(config.run.dir)
        self.progress: Progress | None = None

    def open(self, first: int) -> None:
        """Write the run's record, drop rows after the step resumed from, and start the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        save_run_record(self.config, self.folder)
        self.rows = self.folder / "metrics.jsonl"
        kept = self.rows.read_text().splitlines()[:first] if first else []  # a row a step; a torn last one is beyond it
        self.rows.write_text("".join(line + "\n" for line in kept))
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, TimeRemainingColumn(), transient=True)
        self.bar = self.progress.add_task("", total=self.config.run.num_steps, completed=first)
        self.progress.start()
        self.began = time.monotonic()

    def row(self, step: int, result: StepResult, accuracy: float | None) -> None:
        """Append one step's row and move the bar."""
        assert self.progress is not None
        row = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.num_tokens,
            "time/elapsed_s": round(time.monotonic() - self.began, 3),
            "eval/accuracy": accuracy,
        }
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if accuracy is not None:
            self.progress.console.print(f"step {step:4d}  loss {result.loss:.3f}  held-out accuracy {accuracy:.3f}")
        self.progress.update(self.bar, completed=step, description=f"loss {result.loss:.3f}")

    def close(self, summary: str) -> None:
        """End the bar and print the result."""
        assert self.progress is not None
        self.progress.stop()
        self.progress.console.print(summary)
