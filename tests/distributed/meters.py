"""What a rank's tensors take: those that autograd keeps, and those that a piece of work allocates."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor


class KeptMeter:
    """Bytes of the storages that autograd keeps for backward, each once, at their highest; `ignored` do not count.

    A tensor counts from the forward pass that saves it, also one that backward runs again, until its graph lets go of it.
    """

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        self.now = self.peak = 0
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._uses: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def __enter__(self) -> "KeptMeter":
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _keep(self, tensor: Tensor) -> "_Kept":
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._ignored:
            return _Kept(tensor, lambda: None)
        place, size = storage.data_ptr(), storage.nbytes()
        self._uses[place] += 1
        if self._uses[place] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        return _Kept(tensor, lambda: self._let_go(place, size))

    def _let_go(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            self.now -= size


class _Kept:
    """A saved tensor for as long as the graph holds it."""

    def __init__(self, tensor: Tensor, let_go: Callable[[], None]) -> None:
        self.tensor, self._let_go = tensor, let_go

    def __del__(self) -> None:
        self._let_go()


@contextmanager
def frees_in_this_thread() -> Iterator[None]:
    """Let no thread of gloo be the last to hold what was gathered: `peak_allocated` would not see it being freed."""
    gather = dist.gather

    def gather_alone(tensor: Tensor, received: list[Tensor] | None, *where: object) -> None:
        held = [(one, one._use_count()) for one in (tensor, *(received or ()))]
        gather(tensor, received, *where)
        while any(one._use_count() > count for one, count in held):
            time.sleep(1e-3)

    dist.gather = gather_alone
    try:
        yield
    finally:
        dist.gather = gather


def peak_allocated(work: Callable[[], object]) -> int:
    """Return by how many bytes this thread's tensors in host memory grow at most while `work` is done."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
