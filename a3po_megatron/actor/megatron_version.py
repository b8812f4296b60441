"""The megatron-core version whose internals we reach into."""

from importlib import metadata

MEGATRON_VERSION = "0.19.2"


def require_megatron_version(module: str) -> None:
    """Raise RuntimeError unless the installed megatron-core is the one that `module` was written against."""
    found = metadata.version("megatron-core")
    if found != MEGATRON_VERSION:
        raise RuntimeError(
            f"{module} reaches into megatron-core {MEGATRON_VERSION}, found {found}: "
            "check it line by line against the new version, then raise MEGATRON_VERSION"
        )
