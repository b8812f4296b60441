"""What a token costs the controller: many concurrent requests through the fleet, against servers that only send.

    python tools/bench_fleet.py [--requests 2000] [--servers 4] [--stream-interval N] [--tokens-per-s N] [--sweep] [--json]

Response lengths are log-normal (median 600 tokens, a tenth above 2,000, at most 8,000); the servers run in their own processes.
Reported are tokens per second, this process's CPU time and received bytes a token, its peak memory, and how much of that came
with the requests. A sweep takes some two minutes and starts servers and a process of its own for each row.
"""

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.client import PartialGeneration
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.garbage import collect_rarely
from a3po_megatron.rollout.sampling import SamplingSettings

SERVER = Path(__file__).parents[1] / "tests/fakes/token_server.py"
PROMPT_TOKENS = 200
START_S = 60.0


def response_lengths(count: int) -> list[int]:
    """Return the tokens of each response."""
    return np.clip(np.random.default_rng(0).lognormal(6.4, 0.95, count), 1, 8000).astype(int).tolist()


@contextmanager
def servers(count: int, tokens_per_s: float) -> Iterator[list[str]]:
    """Start the servers, yield their urls, end them."""
    ports = []
    for _ in range(count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    each = str(tokens_per_s / count)
    started = [subprocess.Popen([sys.executable, str(SERVER), str(port), str(port), each]) for port in ports]
    try:
        for port in ports:
            wait_for(port)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for(port: int) -> None:
    """Wait until somebody listens on `port`."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server on port {port} within {START_S:g} s") from None
        time.sleep(0.05)


def sent_bytes(urls: list[str]) -> int:
    """Return how many bytes of responses the servers have sent."""
    return sum(int(httpx.get(f"{url}/sent", trust_env=False).text) for url in urls)


async def measure(urls: list[str], num_requests: int, stream_interval: int | None) -> dict[str, float | int]:
    """Send all requests at once and return the figures."""
    interval = {} if stream_interval is None else {"stream_interval": stream_interval}
    per_server = -(-num_requests // len(urls))
    config = RolloutConfig(max_model_len=16384, max_num_seqs=per_server, **interval)
    lengths = response_lengths(num_requests)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(config, "secret", Path(folder))
        for index, url in enumerate(urls):
            await fleet.register(f"s{index}", url, 1)
        empty_mb = peak_memory_mb()
        prompts = np.random.default_rng(1).integers(0, 151_000, (num_requests // 8 + 1, PROMPT_TOKENS), dtype=np.int32)
        partials = [PartialGeneration() for _ in lengths]
        one_token = SamplingSettings(1.0, 1)  # opens the connections, which a run opens once
        await asyncio.gather(*[fleet.generate([1], one_token, f"w{i}") for i in range(num_requests)])
        before, started, cpu = sent_bytes(urls), time.perf_counter(), time.process_time()
        results = await asyncio.gather(
            *[
                fleet.generate(prompts[i // 8], SamplingSettings(1.0, length, seed=i), f"r{i}", partials[i])
                for i, length in enumerate(lengths)
            ]
        )
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        received = sent_bytes(urls) - before
        await fleet.aclose()
    num_tokens = sum(len(result.token_ids) for result in results)
    assert [len(result.token_ids) for result in results] == lengths
    return {
        "requests": num_requests,
        "servers": len(urls),
        "stream_interval": config.stream_interval,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / wall_s),
        "cpu_us_per_token": round(1e6 * cpu_s / num_tokens, 2),
        "bytes_per_token": round(received / num_tokens, 1),
        "wall_s": round(wall_s, 2),
        "peak_memory_mb": peak_memory_mb(),
        "mb_per_1000_requests": round(1000 * (peak_memory_mb() - empty_mb) / num_requests),
    }


def peak_memory_mb() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def sweep(argv: list[str], stream_interval: int | None) -> int:
    """Measure numbers of requests and stream intervals, each by this program anew; return the first bad exit code."""
    plan: list[tuple[int, int | None]] = [(count, stream_interval) for count in (500, 2000, 5000, 10_000)]
    plan += [(500, interval) for interval in (1, 8, 32, 128)]
    for num_requests, interval in plan:
        row = ["--requests", str(num_requests), *([] if interval is None else ["--stream-interval", str(interval)])]
        code = subprocess.run([sys.executable, __file__, *argv, *row], check=False).returncode
        if code:
            return code
    return 0


def main(argv: list[str]) -> int:
    """Print one line a measurement, or a JSON row with --json; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_fleet.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON row a measurement")
    parser.add_argument("--requests", type=int, default=2000, help="at once; default: %(default)s")
    parser.add_argument("--servers", type=int, default=4, help="processes that send; default: %(default)s")
    parser.add_argument("--stream-interval", type=int, help="tokens a message; default: that of the settings")
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="of all servers; default: as fast as is read")
    parser.add_argument(
        "--sweep", action="store_true", help="500 to 10,000 requests, then stream intervals 1 to 128 with 500"
    )
    options = parser.parse_args(argv)
    if options.sweep:
        return sweep([argument for argument in argv if argument != "--sweep"], options.stream_interval)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    collect_rarely()  # like the controller
    with servers(options.servers, options.tokens_per_s) as urls:
        row = asyncio.run(measure(urls, options.requests, options.stream_interval))
    print(json.dumps(row) if options.json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
