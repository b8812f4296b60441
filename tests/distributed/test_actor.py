"""What an actor leaves behind: nothing."""

import gc
import os

import pytest

from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, build_actor, random_sequences, save_model


@pytest.mark.parametrize(
    ("model", "layout"), [(Model("qwen3"), Layout(tp=2)), (Model("qwen3_moe"), Layout(ep=2))], ids=str
)
def test_a_closed_actor_takes_the_threads_of_its_process_groups_with_it(model, layout, shared_folder) -> None:
    folder = save_model(model.build(), shared_folder)
    threads = []
    for _ in range(3):
        actor = build_actor(folder, layout.config())
        actor.train_step(random_sequences(), SupervisedLoss())
        actor.close()
        del actor
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[2] == threads[1]
