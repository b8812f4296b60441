"""What a vLLM server says, decoded and checked: pieces of a response, weight version spans, its load.

Typed decoding leaves out what is not asked for: a token arrives as some 200 bytes of JSON, of which two numbers are needed.
Whatever does not have the expected form raises ValueError. Imports neither torch nor vllm.
"""

from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


class TokenLogprob(msgspec.Struct, gc=False):
    """A drawn token and the log-probability it was drawn with."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """One entry a token."""

    content: list[TokenLogprob] | None = None


class VersionSpan(msgspec.Struct, gc=False):
    """Tokens start..end-1 of a response were drawn by the weights of `version`."""

    version: str
    start: int
    end: int


class Piece(msgspec.Struct, gc=False):
    """The tokens since the last piece; the last one says why the response ended and which weights drew it."""

    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class Event(msgspec.Struct, gc=False):
    """One server-sent event."""

    choices: list[Piece] = []
    error: Any = None


_events = msgspec.json.Decoder(Event)
_DATA, _DONE = b"data: ", b"data: [DONE]"


async def events_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """Yield the events of a stream that arrives in chunks of any size. Raises ValueError for anything else."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            if event == _DONE:
                continue
            if not event.startswith(_DATA):
                raise ValueError(f"not an event: {event[:80]!r}")
            yield _events.decode(memoryview(event)[len(_DATA) :])
    if rest.strip():
        raise ValueError(f"not an event: {rest[:80]!r}")


def spread_versions(spans: Sequence[VersionSpan] | None, num_tokens: int) -> array[int]:
    """Return one version a token from vLLM's spans. Raises ValueError unless they cover the response end to end.

    Example: [VersionSpan("7", 0, 2), VersionSpan("8", 2, 3)] -> array of 7, 7, 8
    """
    versions = array("i")
    for span in spans or []:
        fits = span.start == len(versions) and span.start <= span.end <= num_tokens
        if not fits or not span.version.isdecimal() or len(span.version) > 9:  # nine digits fit int32
            raise ValueError(f"weight version spans are not usable: {list(spans or [])}")
        versions.extend([int(span.version)] * (span.end - span.start))
    if len(versions) != num_tokens:
        raise ValueError(f"weight version spans cover {len(versions)} of {num_tokens} tokens")
    return versions


@dataclass(frozen=True)
class Load:
    """What a server has to do, and what it has done since it started."""

    running: int  # sequences in its batch
    waiting: int  # requests that its batch has no room for
    preemptions: int  # sequences that it threw out because the cache was full, to read them again later
    tokens: int  # read and written


_LOAD = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "preemptions": ("vllm:num_preemptions_total",),
    "tokens": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
}


def read_load(text: str) -> Load:
    """Return the load that a server's `/metrics` tells, summed over its engines. Raises ValueError if it tells none."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            labelled, _, value = line.rpartition(" ")
            name = labelled.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    missing = [name for names in _LOAD.values() for name in names if name not in values]
    if missing:
        raise ValueError(f"its metrics lack {', '.join(missing)}")
    return Load(**{field: int(sum(values[name] for name in names)) for field, names in _LOAD.items()})
