"""Words about weights that cross process borders: controller, actor and vLLM's workers all know them. No torch."""

from typing import Literal

Transfer = Literal["gloo", "nccl", "file"]

# Begins the message of a member whose group broke under it through another's fault. vLLM's routes pass an exception on as text,
# and by this text the controller tells such a member, which can be filled again, from one that must be restarted.
GROUP_BROKEN = "the weight group broke"
