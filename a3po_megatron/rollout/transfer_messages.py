"""Words about weights that cross process borders: controller, actor and vLLM's workers all know them. No torch."""

from pathlib import Path
from typing import Literal

Transfer = Literal["gloo", "nccl", "file"]

# Begins the message of a member whose group broke under it through another's fault. vLLM's routes pass an exception on as text,
# and by this text the controller tells such a member, which can be filled again, from one that must be restarted.
GROUP_BROKEN = "the weight group broke"

# Begins the message of one that cannot read a version's files, which then are of no use to others either.
FILES_UNUSABLE = "weight files cannot be used"


def version_folder(root: Path, version: int) -> Path:
    """Return where `version` lies below `root` once all of it is there."""
    return root / f"version_{version:06d}"
