"""The files of the golden runs: recorded/METHOD.jsonl, one line a step, its columns first and then the samples of each group."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a3po_megatron.data.arithmetic import decode_ids, encode_text
from a3po_megatron.records import Batch, Group, Problem, Sample

FOLDER = Path(__file__).parent / "recorded"
COLUMNS = (
    "loss",
    "grad_norm",
    "reward/mean",
    "staleness/trained_mean",
    "policy/ratio_mean",
    "policy/clip_fraction",
    "policy/behavior_weight_mean",
    "policy/behavior_kl_k3",
)
OF_METRICS = ("approximation/logprob_abs", "approximation/kl_true_approximate")


@dataclass(frozen=True)
class Step:
    """One step of a golden run: what it logged and what it was trained on."""

    columns: dict[str, float]
    groups: tuple[Group, ...]

    def texts(self) -> list[tuple[str, str, float]]:
        """Return (problem, response, reward) of each sample, as a run writes them into samples/."""
        return [
            (group.problem.id, decode_ids(sample.response_ids), float(reward))
            for group in self.groups
            for sample, reward in zip(group.samples, group.rewards, strict=True)
        ]


def column_names(method: str) -> tuple[str, ...]:
    return COLUMNS + (OF_METRICS if method == "metrics" else ())


def read(method: str, folder: Path = FOLDER) -> list[Step]:
    lines = (folder / f"{method}.jsonl").read_text().splitlines()
    return [_step(json.loads(line)) for line in lines]


def write(
    method: str, rows: Sequence[Mapping[str, Any]], batches: Sequence[Batch], group_size: int, folder: Path
) -> Path:
    """Store the rows of a run's metrics.jsonl and its batches; return the file."""
    lines = []
    for row, batch in zip(rows, batches, strict=True):
        samples = [_plain(sample, reward) for sample, reward in zip(batch.samples, batch.rewards, strict=True)]
        groups = [
            {"problem": batch.samples[start].problem_id, "samples": samples[start : start + group_size]}
            for start in range(0, len(samples), group_size)
        ]
        lines.append({"columns": {name: row[name] for name in column_names(method)}, "groups": groups})
    folder.mkdir(exist_ok=True)
    file = folder / f"{method}.jsonl"
    file.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    return file


def _plain(sample: Sample, reward: np.float32) -> dict[str, Any]:
    return {
        "response": sample.response_ids.tolist(),
        "logprobs": [float(str(logprob)) for logprob in sample.behavior_logprobs],  # the shortest digits of a float32
        "versions": sample.versions.tolist(),
        "finish": sample.finish_reason,
        "reward": float(str(reward)),
    }


def _step(line: dict[str, Any]) -> Step:
    return Step(line["columns"], tuple(_group(group["problem"], group["samples"]) for group in line["groups"]))


def _group(question: str, members: list[dict[str, Any]]) -> Group:
    prompt_ids = encode_text(f"{question}=")
    samples = tuple(
        Sample(
            question,
            prompt_ids,
            np.array(member["response"], np.int32),
            np.array(member["logprobs"], np.float32),
            np.array(member["versions"], np.int32),
            member["finish"],
        )
        for member in members
    )
    # the answer is only looked at by the reward, which has spoken
    return Group(Problem(question, prompt_ids, ""), samples, np.array([m["reward"] for m in members], np.float32))
