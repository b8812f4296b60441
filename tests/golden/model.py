"""The weights that the golden runs start from, as a folder for vLLM: python -m tests.golden.model FOLDER"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.golden.settings import CONFIG, MODEL, RANDOM_MODEL, ROOT

DEADLINE_S = 300  # a process that imports megatron, on a busy machine


def write_random_model(folder: Path) -> Path:
    """Write the folder in a process of its own, which alone imports the actor; return it."""
    subprocess.run([sys.executable, "-m", "tests.golden.model", str(folder)], cwd=ROOT, check=True, timeout=DEADLINE_S)
    return folder


def _write(folder: Path) -> None:
    from safetensors.torch import save_file

    from a3po_megatron.actor.hf_mapping import hf_shapes
    from a3po_megatron.actor.hf_weights import random_source
    from a3po_megatron.config.load import load_config
    from a3po_megatron.config.model_shape import read_model_shape
    from a3po_megatron.config.schema import TrainConfig

    model = load_config(TrainConfig, str(ROOT / CONFIG), RANDOM_MODEL).model
    shape = read_model_shape(str(ROOT / MODEL))
    draw = random_source(shape, model.init_seed, model.init_std)
    shutil.copytree(ROOT / MODEL, folder)
    save_file({name: draw(name) for name in hf_shapes(shape)}, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
