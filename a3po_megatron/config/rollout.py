"""The settings of the rollout fleet, `rollout.*`. Imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout fleet: vLLM servers of each node, how they sample, how they take new weights."""

    num_servers: int = 1  # vLLM servers a node
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where the node has a GPU, else cpu
    dtype: Literal["float32", "bfloat16"] = "float32"
    float32_head: bool = False  # logits in float32 from bfloat16 weights; `actor.float32_head` must agree
    tensor_parallel: int = 1  # GPUs (or CPU ranks) a server
    max_model_len: int = 512  # prompt and response tokens of one sequence; a longer request is refused
    max_num_seqs: int = 64  # sequences a server runs at once; more wait inside the server
    kv_cache_bytes: int = 67108864  # a server; 0: vLLM sizes it from `gpu_memory_utilization` (GPU only)
    gpu_memory_utilization: float = 0.85  # share of a GPU that a server may take
    enforce_eager: bool = True  # False: CUDA graphs
    prefix_caching: bool = True  # prompts of a group are computed once; the cache never crosses a weight version
    cpu_threads: int = 1  # OpenMP threads of a server on a CPU
    host: str = "127.0.0.1"  # address the servers bind and are reached at; a private interface, never a public one
    base_port: int = 0  # server i listens on base_port + i; 0: any free port

    temperature: float = 1.0
    max_response_tokens: int = 64
    # Log-probabilities are exact only for the plain distribution: any other value of the next seven is refused.
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stream_interval: int = 32  # tokens between two partial results of a request; fewer cost the controller more

    # Requests in flight when new weights arrive go on with them, are aborted and asked again for the rest, or may end first.
    in_flight: Literal["continue", "abort", "drain"] = "continue"
    kv_on_update: Literal["rebuild", "keep"] = "rebuild"  # cached keys and values of requests that continue
    drain_timeout_s: float = 60.0  # drain: how long they may take to end; the rest is aborted and asked again
    # How weights travel from the actor. auto: nccl where actor and servers have GPUs, else gloo; file: through `run.dir`, which
    # must be a folder that all nodes see
    weight_transfer: Literal["auto", "gloo", "nccl", "file"] = "auto"
    # True: the newest weights also lie below `run.dir` as files, so that a replica that was restarted gets them at once; False:
    # it waits for the next publication
    keep_published: bool = True
    # Nats by which the mean log-probability of a probe prompt may move from one version to the next; a replica beyond it holds
    # garbage and is dropped. 0: no probe
    probe_max_change: float = 3.0
    bucket_bytes: int = 67108864  # largest piece of weights in one broadcast; a larger tensor travels alone

    startup_timeout_s: float = 300.0  # until a started server has generated its first token
    request_timeout_s: float = 1800.0  # of one response, pauses included; and of its wait for a server with room
    control_timeout_s: float = 60.0  # of one control call (pause, resume, health...)
    # of joining the weight group, of a broadcast, of all of a version into one server
    transfer_timeout_s: float = 300.0
    # a server that does not answer, or has requests and no new token, for so long is hung
    stall_timeout_s: float = 120.0
    controller_timeout_s: float = 120.0  # a supervisor that cannot reach the controller for so long stops
    # between asking a server to end and killing it; one that still starts gets 2 s at most
    stop_timeout_s: float = 15.0
    heartbeat_s: float = 2.0  # between two looks at the servers and the controller
    max_restarts: int = 3  # of one server within `restart_window_s`; one more failure retires it
    restart_window_s: float = 600.0

    @property
    def publication_timeout_s(self) -> float:
        """Longest time that new weights may take to arrive: draining, joining the group, start, transfer."""
        drain_s = self.drain_timeout_s if self.in_flight == "drain" else 0.0
        return drain_s + self.control_timeout_s + 2 * self.transfer_timeout_s
