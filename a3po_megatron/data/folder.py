"""Where the published data sets lie on this machine."""

import os
from pathlib import Path

from a3po_megatron.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]


def data_folder() -> Path:
    """Return the folder that holds `gsm8k/`, `dapo/`...: A3PO_DATA, else shared/data beside the checkout.

    Raises UserError when it is not there.
    """
    folder = Path(os.environ.get("A3PO_DATA") or CHECKOUT.parent / "shared" / "data")
    if not folder.is_dir():
        raise UserError(f"data folder {folder} is not there; set A3PO_DATA to the folder that holds gsm8k/")
    return folder
