"""Records as msgpack bytes and back: what `/batch` and a snapshot carry.

Every array in `records.py` is one-dimensional, so it travels as its raw bytes, little-endian; its dtype comes from the
record's annotation. Nothing here can run code: unlike pickle, decoding only builds the type that was asked for.
"""

from typing import Any

import msgspec
import numpy as np


def encode(record: Any) -> bytes:
    """Return `record` (a dataclass, struct, dict, list or plain value) as msgpack."""
    return msgspec.msgpack.encode(record, enc_hook=_array_to_bytes)


def decode[T](body: bytes, record_type: type[T]) -> T:
    """Return the `record_type` in `body`.

    Raises msgspec.ValidationError, whose text names the field, if a field is missing or of another type.
    """
    return msgspec.msgpack.decode(body, type=record_type, dec_hook=_bytes_to_array)


def _array_to_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    raise NotImplementedError(f"cannot send a {type(value).__name__}: {value!r}")


def _bytes_to_array(annotation: Any, value: Any) -> Any:
    """`annotation` is `NDArray[x]`, that is `ndarray[shape, dtype[x]]`."""
    if getattr(annotation, "__origin__", None) is not np.ndarray:
        raise NotImplementedError(f"cannot receive a {annotation}")
    (scalar_type,) = annotation.__args__[1].__args__
    return np.frombuffer(value, dtype=np.dtype(scalar_type).newbyteorder("<"))
