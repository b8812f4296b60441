"""Time and memory of the chunked log-probabilities (actor/token_head.py) beside the plain version, which makes all logits.

Both compute the log-probabilities of random tokens and the gradients of hidden states and output weight, in one process with
nothing else of the model. Time: repeats taken in turns, medians; on a CPU also the processor time of all threads, which other
programs on the machine disturb less. Memory: what the peak lies above the inputs, less the weight's gradient, which both must
return; on a CPU the largest resident memory (VmHWM in /proc/self/status) of a process that runs this variant alone, on a GPU
torch's own count. Where there is a GPU, its compiled path is measured too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this checkout, from whichever folder it is started
from a3po_megatron.actor.token_head import TokenHead, VocabularyPart, logprobs_and_entropy

MEGABYTE = 1e6


def main() -> int:
    """Measure, and print a table or one JSON object."""
    arguments = parse(sys.argv[1:])
    if arguments.memory_of:
        print(peak_memory(arguments.memory_of, arguments))
        return 0
    variants = ["plain", "chunked", *(["compiled"] if arguments.device == "cuda" else [])]
    seconds, cpu_seconds = time_in_turns(variants, arguments)
    memory = {name: memory_in_own_process(name, arguments) for name in variants}
    result = {
        "device": torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads",
        **{
            name: getattr(arguments, name)
            for name in ("dtype", "tokens", "vocabulary", "hidden", "chunk_tokens", "entropy")
        },
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "extra_memory_mb": {name: value / MEGABYTE for name, value in memory.items()},
        "time_ratio": {name: seconds[name] / seconds["plain"] for name in variants[1:]},
        "cpu_time_ratio": {name: cpu_seconds[name] / cpu_seconds["plain"] for name in variants[1:]},
        "memory_ratio": {name: memory[name] / memory["plain"] for name in variants[1:]},
    }
    print(json.dumps(result) if arguments.json else table(result, variants))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench_logprobs.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--tokens", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=151936, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds a GPU")
    parser.add_argument("--chunk-tokens", type=int, default=0, help="0 (default): the device's own default")
    parser.add_argument("--entropy", action="store_true", help="the entropy and its gradient too")
    parser.add_argument("--repeats", type=int, default=3, help="of each variant's time; default: %(default)s")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # the child process of one variant
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    return arguments


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> Tensor:
    """Return a loss from the logits of all tokens at once, as autograd has it."""
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    loss = log_p.gather(-1, labels[:, None]).sum()
    return loss - (log_p.exp() * log_p).sum() if entropy else loss


def variant(name: str, arguments: argparse.Namespace) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function (hidden, weight, labels) -> loss of a variant."""
    if name == "plain":
        return lambda hidden, weight, labels: plain(hidden, weight, labels, arguments.entropy)
    head = TokenHead(chunk_tokens=arguments.chunk_tokens, kernel="compiled" if name == "compiled" else "plain")
    part = VocabularyPart(0, arguments.vocabulary)

    def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logprobs, entropy = logprobs_and_entropy(hidden, weight, labels, part, head, arguments.entropy)
        return logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()

    return chunked


def inputs(arguments: argparse.Namespace, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states and weight, with gradient, and labels."""
    torch.manual_seed(0)
    options = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    hidden = torch.randn(tokens, arguments.hidden, **options).requires_grad_()
    weight = torch.randn(arguments.vocabulary, arguments.hidden, **options).mul_(0.05).requires_grad_()
    return hidden, weight, torch.randint(arguments.vocabulary, (tokens,), device=arguments.device)


def time_in_turns(variants: list[str], arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds and processor seconds of forward and backward; a few tokens warm each variant up."""
    warm, whole = inputs(arguments, min(arguments.tokens, 64)), inputs(arguments, arguments.tokens)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for name in variants:
        run(variant(name, arguments), *(whole if name == "compiled" else warm))
    for _ in range(arguments.repeats):
        for name in variants:
            taken[name].append(run(variant(name, arguments), *whole))
    wall, cpu = ({name: statistics.median(run[i] for run in runs) for name, runs in taken.items()} for i in (0, 1))
    return wall, cpu


def run(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[float, float]:
    """Return the seconds and the processor seconds of one forward and backward pass."""
    synchronize(hidden)
    wall, cpu = time.perf_counter(), time.process_time()
    loss(hidden, weight, labels).backward()
    synchronize(hidden)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    hidden.grad = weight.grad = None
    return seconds


def synchronize(tensor: Tensor) -> None:
    """Wait for the GPU, if there is one."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def memory_in_own_process(name: str, arguments: argparse.Namespace) -> int:
    """Return `peak_memory` of a variant from a process of its own, where nothing that ran before has left its peak."""
    options = ["--tokens", arguments.tokens, "--vocabulary", arguments.vocabulary, "--hidden", arguments.hidden]
    options += ["--dtype", arguments.dtype, "--device", arguments.device, "--chunk-tokens", arguments.chunk_tokens]
    options += ["--memory-of", name, *(["--entropy"] if arguments.entropy else [])]
    command = [sys.executable, __file__, *map(str, options)]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(child.stdout.split()[-1])


def peak_memory(name: str, arguments: argparse.Namespace) -> int:
    """Return the bytes by which the peak of one pass lies above the inputs, less the weight's gradient."""
    loss, (hidden, weight, labels) = variant(name, arguments), inputs(arguments, arguments.tokens)
    run(loss, hidden.detach()[:8], weight, labels[:8])  # what libraries set up once is not counted
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(loss, hidden, weight, labels)
        peak = torch.cuda.max_memory_allocated()
    else:
        before = psutil.Process().memory_info().rss
        run(loss, hidden, weight, labels)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = int(status["VmHWM"].split()[0]) * 1024  # getrusage's peak would be the parent's
    return peak - before - weight.numel() * weight.element_size()


def table(result: dict, variants: list[str]) -> str:
    """Return the result as lines for a reader."""
    lines = [
        f"{result['tokens']} tokens, vocabulary {result['vocabulary']}, hidden {result['hidden']}, {result['dtype']}, "
        f"{result['device']}{', with entropy' if result['entropy'] else ''}",
        f"{'':10}{'seconds':>10}{'of plain':>10}{'CPU s':>10}{'of plain':>10}{'extra MB':>10}{'of plain':>10}",
    ]
    for name in variants:
        columns = [("seconds", "time_ratio"), ("cpu_seconds", "cpu_time_ratio"), ("extra_memory_mb", "memory_ratio")]
        figures = [f"{result[value][name]:10.3f}{result[ratio].get(name, 1.0):10.3f}" for value, ratio in columns]
        lines.append(f"{name:10}{''.join(figures)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
