"""Async client of ONE vLLM server: token ids in; token ids, log-probabilities and weight versions out.

The control calls are in `control.py`. Imports neither torch nor vllm.
Every call has a deadline; an error says which server, what was asked and why it failed.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.records import Float32, Int32
from a3po_megatron.rollout.control import ReplicaError, ServerControl, describe
from a3po_megatron.rollout.messages import Piece, events_of, spread_versions
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.server_args import MODEL_NAME

NO_LOGPROB = -9999.0  # what vLLM reports in place of NaN, -inf, or a log-probability it does not have
MAX_LOGPROB = 1e-3  # 0 and the rounding of a kernel


class RequestOverdue(ReplicaError):
    """The response did not end in time. That alone does not tell whether the server or the request is to blame."""


class Interrupted(RuntimeError):
    """The server was told to abort what it answers, for new weights. The tokens that came are kept: ask again."""


@dataclass(frozen=True)
class Generation:
    """One finished response. Letters: R response tokens."""

    token_ids: Int32  # [R]
    logprobs: Float32  # [R] of the distribution that each token was drawn from (after temperature)
    versions: Int32  # [R] weight version that drew each token, from the server's own spans
    finish_reason: str  # "stop" or "length"


@dataclass
class PartialGeneration:
    """A response on its way, filled by `generate` as tokens arrive. A snapshot may copy it; `generate` can go on.

    A token's version is known exactly only when the response ends or is interrupted. Until then it is the version that was
    current when the piece before was read: at most `stream_interval` tokens a publication too old, and too new only where
    this process read tokens later than the publication after them.

    Only tokens that passed all checks of their piece are in it, and the last piece of an answer only once the whole answer did.
    Arrays, for the controller holds every token of the fleet: twelve bytes each, where Python's numbers take a hundred.
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, or what is there."""
        del self.token_ids[length:], self.logprobs[length:], self.versions[length:]


class ReplicaClient(ServerControl):
    """Talks to the server at `url` with the run's `token`. Close with `aclose`."""

    def __init__(
        self,
        name: str,
        url: str,
        token: str,
        config: RolloutConfig,
        vocab_size: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`vocab_size`: of the model, to refuse prompts outside it, which would end the server. None: unknown."""
        super().__init__(name, url, token, config, transport)
        self._vocab_size = vocab_size

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        current_version: Callable[[], int] = lambda: 0,
        partial: PartialGeneration | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Sample one response to `prompt_ids` and return it once it ends.

        `partial` receives tokens as they arrive; when it holds tokens already, the response goes on after them, and
        they are part of the result. `current_version` tells the fleet's version now (for labels of partial tokens, and
        so that prompts cached under older weights are not reused). `timeout_s`: `request_timeout_s` if None. Raises
        UserError for settings that cannot give a true sample, Interrupted when new weights ended it early, RequestOverdue
        or another ReplicaError when this server cannot finish the response. What an answer that cannot be used brought is
        taken out of `partial` again.
        """
        sampling.check()
        partial = PartialGeneration() if partial is None else partial
        # A full one, whose server broke off before it said how the response ended, gets its last token anew.
        partial.cut(sampling.max_tokens - 1)
        done = len(partial.token_ids)
        self._check_prompt(np.asarray(prompt_ids), sampling, request_id)
        token_ids = [*map(int, prompt_ids), *partial.token_ids]
        body = msgspec.json.encode(self._request_body(token_ids, sampling, done, request_id, current_version()))
        del token_ids  # the body has them
        what = f"a response of up to {sampling.max_tokens} tokens (request {request_id})"
        timeout_s = self._config.request_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ending = await self._read_stream(body, partial, current_version)
            return self._finished(partial, done, ending, sampling)
        except TimeoutError:
            got = len(partial.token_ids) - done
            raise RequestOverdue(f"{self._who()}: waited {timeout_s:g} s for {what}; {got} tokens had come") from None
        except httpx.HTTPError as error:
            raise ReplicaError(f"{self._who()}: connection lost during {what}: {describe(error)}") from error
        except (ValueError, OverflowError) as error:  # not what vLLM sends
            partial.cut(done)
            raise ReplicaError(f"{self._who()}: cannot use the answer to request {request_id}: {error}") from error

    def _check_prompt(self, prompt: NDArray[np.integer], sampling: SamplingSettings, request_id: str) -> None:
        if len(prompt) + sampling.max_tokens > self._config.max_model_len:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and a response of up to {sampling.max_tokens} exceed "
                f"rollout.max_model_len={self._config.max_model_len}; raise it, drop the prompt or shorten the response"
            )
        # Without a tokenizer vLLM does not look at token ids: a bad one would end its engine.
        strangers = prompt[(prompt < 0) | (prompt >= (np.inf if self._vocab_size is None else self._vocab_size))]
        if len(strangers):
            raise UserError(
                f"request {request_id}: token id {strangers[0]} of the prompt is not in the model's vocabulary of "
                f"{self._vocab_size}; use the tokenizer of the model's folder"
            )

    def _request_body(
        self, token_ids: list[int], sampling: SamplingSettings, done: int, request_id: str, version: int
    ) -> dict[str, Any]:
        # A continuation has a stream of its own; the same seed would repeat the random numbers of the first part.
        seed = sampling.seed if sampling.seed is None or not done else (sampling.seed + 1_000_003 * done) % 2**31
        return {
            "model": MODEL_NAME,
            "request_id": request_id,
            "token_ids": token_ids,
            "stream": True,
            "cache_salt": f"version-{version}",
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens - done,
                "seed": seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
                "stream_interval": self._config.stream_interval,
            },
        }

    async def _read_stream(self, body: bytes, partial: PartialGeneration, current_version: Callable[[], int]) -> Piece:
        """Append tokens to `partial` as they come and return the last piece, with the ending and the spans, not appended."""
        version = current_version()
        headers = {"Content-Type": "application/json"}
        timeout = httpx.Timeout(self._config.control_timeout_s, read=None)  # the caller's deadline covers reading
        async with self._http.stream(
            "POST", "/inference/v1/generate", content=body, headers=headers, timeout=timeout
        ) as response:
            if response.status_code != httpx.codes.OK:
                self._raise_for(response, await response.aread(), "generate")
            async for event in events_of(response.aiter_bytes()):
                if event.error is not None:
                    raise ReplicaError(f"{self._who()}: generate failed: {event.error}")
                for piece in event.choices:
                    if piece.finish_reason is not None:
                        return piece
                    self._append(piece, partial, version)
                    version = current_version()
        raise ReplicaError(f"{self._who()}: the stream ended before the response did")

    def _append(self, piece: Piece, partial: PartialGeneration, version: int) -> None:
        """Check the tokens of `piece` and append them. Raises ValueError for what the model cannot have drawn."""
        tokens = piece.token_ids or []
        entries = (piece.logprobs.content if piece.logprobs else None) or []
        if [entry.token_id for entry in entries] != tokens:
            raise ValueError(f"{len(tokens)} tokens came with {len(entries)} log-probabilities")
        logprobs = [entry.logprob for entry in entries]
        vocab_size = self._vocab_size or 2**31
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            stranger = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(f"token id {stranger} is not in the vocabulary of {vocab_size}")
        if logprobs and not NO_LOGPROB < min(logprobs) <= max(logprobs) <= MAX_LOGPROB:
            index = next(i for i, logprob in enumerate(logprobs) if not NO_LOGPROB < logprob <= MAX_LOGPROB)
            position = len(partial.token_ids) + index
            raise ValueError(
                f"no log-probability for token {position} of the response (NaN in the model?): {logprobs[index]:g}"
            )
        partial.token_ids.extend(tokens)
        partial.logprobs.extend(logprobs)
        partial.versions.extend([version] * len(tokens))

    def _finished(self, partial: PartialGeneration, done: int, ending: Piece, sampling: SamplingSettings) -> Generation:
        """Append the last piece and return the whole. Raises Interrupted, and ValueError for an answer not to be trusted."""
        reason = ending.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise ValueError(f"the response ended with '{reason}' instead of 'stop' or 'length'")
        self._append(ending, partial, 0)
        if len(partial.token_ids) > sampling.max_tokens or (
            reason == "length" and len(partial.token_ids) < sampling.max_tokens
        ):
            raise ValueError(
                f"the response ended by '{reason}' with {len(partial.token_ids)} tokens, "
                f"{sampling.max_tokens} were asked for"
            )
        partial.versions[done:] = spread_versions(ending.weight_versions, len(partial.token_ids) - done)
        if reason == "abort":
            raise Interrupted(f"{self._who()}: aborted after {len(partial.token_ids)} tokens")
        return Generation(
            token_ids=np.array(partial.token_ids, dtype=np.int32),
            logprobs=np.array(partial.logprobs, dtype=np.float32),
            versions=np.array(partial.versions, dtype=np.int32),
            finish_reason=reason,
        )
