"""`recipes/controller.py`, which also keeps each batch: `run.dir`/batches/NNNNNN.msgpack."""

import sys
from collections.abc import Sequence

import recipes.controller
from a3po_megatron import wire
from a3po_megatron.controller import build
from a3po_megatron.controller.rows import RunFiles
from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.records import Batch


class KeptBatches(RunFiles):
    """The files of a run and its batches."""

    def write_samples(self, batch: Batch, step: int, reasons: Sequence[str]) -> None:
        super().write_samples(batch, step, reasons)
        folder = self._dir / "batches"
        folder.mkdir(exist_ok=True)
        (folder / f"{step:06d}.msgpack").write_bytes(wire.encode(batch))


if __name__ == "__main__":
    build.RunFiles = KeptBatches
    sys.exit(exit_on_user_error(lambda: recipes.controller.main(sys.argv[1:])))
