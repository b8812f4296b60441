"""One worker process: reads requests from stdin, answers on stdout; `python -m a3po_megatron.reward.worker` by the pool.

A frame is a length (4 bytes, big endian) and that many bytes of msgpack. The first frame out says that the imports are done;
then one `Request` in, one `Answer` out. It ends when stdin ends, and the kernel kills it when its parent dies, which it
could not notice in the middle of a computation.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, BinaryIO

import msgspec

from a3po_megatron.records import Verdict
from a3po_megatron.reward.judge import MathSettings, gold_answer, judge_math

LENGTH = struct.Struct(">I")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Request(msgspec.Struct, array_like=True):
    """What a worker is asked. `task` is `math`, `gold` (can answers be compared with it?), `python` or `load`."""

    task: str
    answer: str  # the truth
    response: str
    settings: MathSettings | None = None  # of `math`
    path: str = ""  # of `python` and `load`: `package.module:function`
    problem_id: str = ""  # of `python`


class Answer(msgspec.Struct, array_like=True):
    """What a worker says: a verdict, or an `error`, which is the fault of the truth or of the user's function."""

    verdict: Verdict | None = None
    error: str = ""
    ends: bool = False  # the worker ends after this answer: it ran out of memory


def handle(request: Request) -> Answer:
    """Answer one request; whatever the response does to the libraries becomes a verdict of 0."""
    from a3po_megatron.reward.compare import BadTruth, check_gold

    if request.task == "python":
        return _call_user(request)
    if request.task == "load":
        return _load_user(request)
    try:
        if request.task == "gold":
            return Answer(error=check_gold(gold_answer(request.answer)))
        assert request.settings is not None
        return Answer(judge_math(request.answer, request.response, request.settings))
    except BadTruth as error:
        return Answer(error=str(error))
    except MemoryError:
        return Answer(Verdict(0.0, "judging needed more memory than a worker may take"), ends=True)
    except Exception as error:  # sympy raises whatever it likes for text that is no mathematics
        return Answer(Verdict(0.0, f"the answer could not be judged: {type(error).__name__}"))


def load_function(path: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names. Raises ValueError with what is wrong."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path}: expected package.module:function")
    try:
        function = getattr(import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{path}: cannot import: {error}") from None
    except AttributeError:
        raise ValueError(f"{path}: module {module} has no {name}") from None
    if not callable(function):
        raise ValueError(f"{path}: not a function")
    return function


_load_once = lru_cache(maxsize=8)(load_function)


def _load_user(request: Request) -> Answer:
    try:
        _load_once(request.path)
    except Exception as error:  # importing runs the user's code
        return Answer(
            error=str(error) if isinstance(error, ValueError) else f"{request.path}: {type(error).__name__}: {error}"
        )
    return Answer()


def _call_user(request: Request) -> Answer:
    try:
        function = _load_once(request.path)
        value = function(response=request.response, answer=request.answer, problem_id=request.problem_id)
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    reward, reason = value if isinstance(value, tuple) and len(value) == 2 else (value, request.path)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < float("inf"):
        return Answer(error=f"returned {value!r:.100}: expected a finite number, or a pair (number, reason)")
    return Answer(Verdict(float(reward), str(reason)[:300] or request.path))


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Write one frame."""
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame's body; None where the stream ends."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def main(parent: int, memory_bytes: int, user_path: str) -> int:
    """Serve until stdin ends.

    `parent` is the pool's process, `memory_bytes` the limit of the address space (0: none). `user_path`: the user's function,
    empty for none; it is imported before the first deadline, and what is wrong with it is said when it is first asked for.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool's process, which ends its workers
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a user's function prints must not end up between the frames
    from a3po_megatron.reward.compare import Comparison, compare, quiet

    quiet()
    sys.setrecursionlimit(3000)
    compare("x^2+1", "1+x^2", Comparison())  # sympy and its caches, before the first deadline
    if user_path:
        _load_user(Request("load", "", "", path=user_path))
    decoder, encoder = msgspec.msgpack.Decoder(Request), msgspec.msgpack.Encoder()
    write_frame(frames, b"ready")
    while (body := read_frame(sys.stdin.buffer)) is not None:
        answer = handle(decoder.decode(body))
        write_frame(frames, encoder.encode(answer))
        if answer.ends:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
