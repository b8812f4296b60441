"""A vLLM server that does nothing but send tokens: python tests/fakes/token_server.py PORT SEED TOKENS_PER_S.

One process, plain asyncio, messages made beforehand in vLLM's own form, so that whoever asks is the bottleneck. Answers
/inference/v1/generate with `max_tokens` tokens in pieces of `stream_interval`, the calls that a fleet makes, and /sent: how
many bytes it has sent. TOKENS_PER_S is shared by all responses; 0: as fast as they are read.
"""

import asyncio
import json
import random
import sys

import uvloop

VOCABULARY = 151_936
NUM_PIECES = 64  # made beforehand for each length; they are sent again and again
METRICS = "".join(
    f'vllm:{name}{{engine="0",model_name="policy"}} 0.0\n'
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    )
)


def event(tokens: list[int], logprobs: list[float], ending: dict | None = None) -> bytes:
    """Return one server-sent event as vLLM 0.32 writes it, in a chunk of HTTP/1.1."""
    entries = [
        {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}]}
        for t, p in zip(tokens, logprobs, strict=True)
    ]
    choice = {"index": 0, "finish_reason": None, "stop_reason": None, "token_ids": tokens, "routed_experts": None}
    choice |= {"sampling_mask": None, "weight_versions": None, "logprobs": {"content": entries}} | (ending or {})
    message = {"request_id": "generate-tokens-" + "0" * 32, "usage": None, "output_mode": "tokens", "choices": [choice]}
    return chunk(f"data: {json.dumps(message, separators=(',', ':'))}\n\n".encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Pieces:
    """Events of each length, made once."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made: dict[int, list[bytes]] = {}
        self.sent_bytes = 0
        self.active = 0  # responses

    def one(self, length: int) -> bytes:
        made = self._made.setdefault(length, [])
        if len(made) < NUM_PIECES:
            made.append(event(*self._draw(length)))
            return made[-1]
        return made[self._random.randrange(NUM_PIECES)]

    def last(self, length: int, total: int) -> bytes:
        spans = [{"version": "0", "start": 0, "end": total}]
        return event(*self._draw(length), {"finish_reason": "length", "weight_versions": spans})

    def _draw(self, length: int) -> tuple[list[int], list[float]]:
        tokens = [self._random.randrange(VOCABULARY) for _ in range(length)]
        return tokens, [-self._random.expovariate(2.0) for _ in range(length)]


async def serve_connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: Pieces, tokens_per_s: float
) -> None:
    """Answer request after request until the other end closes."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.lower().split("\r\n")
            length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            path = head.split(" ")[1]
            if path == "/inference/v1/generate":
                pieces.active += 1
                await send_response(writer, body["sampling_params"], pieces, tokens_per_s)
                pieces.active -= 1
            else:
                text = {"/metrics": METRICS, "/sent": str(pieces.sent_bytes)}.get(path, '{"world_size": 1}')
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def send_response(writer: asyncio.StreamWriter, settings: dict, pieces: Pieces, tokens_per_s: float) -> None:
    """Send the pieces of one response; between two of them all others get their turn."""
    total, interval = settings["max_tokens"], settings["stream_interval"]
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    sent = 0
    while total - sent > interval:
        piece = pieces.one(interval)
        pieces.sent_bytes += len(piece)
        writer.write(piece)
        sent += interval
        await writer.drain()
        await asyncio.sleep(interval * pieces.active / tokens_per_s if tokens_per_s else 0)
    piece = pieces.last(total - sent, total) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    pieces.sent_bytes += len(piece)
    writer.write(piece)


async def main(port: int, seed: int, tokens_per_s: float) -> None:
    """Serve until killed."""
    pieces = Pieces(seed)
    server = await asyncio.start_server(
        lambda reader, writer: serve_connection(reader, writer, pieces, tokens_per_s),
        "127.0.0.1",
        port,
        backlog=4096,
        limit=2**22,
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
