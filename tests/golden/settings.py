"""Which runs are golden: the demo, small, on weights that a seed gives. No warm start, whose weights differ by machine.

Random weights answer nothing right, so responses are also judged by their length, and learn to be short.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = "configs/demo.yaml"
METHODS = ("sync", "recompute", "loglinear", "behavior", "metrics")
NUM_STEPS = 10
# One rank repeats a run to the bit; four, which add in another order, differed by 2e-6 of a loss and 1e-6 of a norm at most.
# Kernels of another CPU pass too: ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE DNNL_MAX_CPU_ISA=SSE41 before the test.
TOLERANCE = {"rel": 1e-5, "abs": 1e-6}
MODEL = "configs/models/arithmetic_qwen3"
RANDOM_MODEL = (f"model.path={MODEL}", "model.init=random", "model.init_std=0.05")  # init_std of the warm start
SIZE = (
    f"run.num_steps={NUM_STEPS}",
    "controller.prompts_per_batch=8",
    "controller.samples_per_prompt=4",
    "controller.max_concurrent_groups=16",
    "controller.max_eval_problems=0",
    "algorithm.num_minibatches=2",
)
TASK = (
    "reward.overlong.weight=1",
    "reward.overlong.buffer_tokens=4",
    "optimizer.lr=3e-4",  # ten steps then move the policy far enough for some ratios to be clipped
)


def overrides(method: str) -> tuple[str, ...]:
    """Return what differs from the demo, all but `run.dir` and the model.

    At a lag of 2, A-3PO's alpha is 1/2; at 1 its proximal policy would be the behaviour policy itself.
    """
    lag = 0 if method == "sync" else 2
    schedule = ("controller.schedule=lockstep", f"controller.max_staleness={lag}")
    return (*SIZE, *TASK, *schedule, f"algorithm.method={method}")
