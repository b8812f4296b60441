"""Every random state of a rank: Python's, numpy's, torch's on the CPU and on the GPU, and megatron's tracker."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def collect_random_state() -> dict[str, Any]:
    """Return the states as tensors and plain values, which `torch.load(weights_only=True)` reads."""
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    assert of_numpy["bit_generator"] == "MT19937"
    return {
        "python": (version, list(words), gauss),
        "numpy": {**of_numpy, "state": {**of_numpy["state"], "key": of_numpy["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "torch_cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def restore_random_state(state: dict[str, Any], *, with_tracker: bool) -> None:
    """Set the states as `collect_random_state` returned them.

    Without the tracker, whose states differ from rank to rank and by the kind of device, and so fit one layout only, megatron's
    stays as the seed set it.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    twister = state["numpy"]["state"]
    np.random.set_state({**state["numpy"], "state": {**twister, "key": np.array(twister["key"], np.uint32)}})
    if with_tracker:
        get_cuda_rng_tracker().set_states(state["tracker"])
    if state["torch_cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["torch_cuda"])
    torch.set_rng_state(state["torch"])
