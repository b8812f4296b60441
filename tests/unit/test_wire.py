"""Records over msgpack."""

import msgspec
import numpy as np
import pytest

from a3po_megatron import wire
from a3po_megatron.records import Batch, Sample


def batch() -> Batch:
    def sample(name: str, length: int) -> Sample:
        return Sample(
            name,
            np.arange(3, dtype=np.int32),
            np.arange(length, dtype=np.int32),
            np.linspace(-1, 0, length, dtype=np.float32),
            np.full(length, 7, dtype=np.int32),
            "stop",
        )

    return Batch(
        (sample("a", 4), sample("b", 0)),
        np.ones(2, np.float32),
        np.array([-0.5, 0.5], np.float32),
        np.array([True, False]),
    )


def test_a_batch_arrives_bit_for_bit() -> None:
    sent = batch()
    got = wire.decode(wire.encode(sent), Batch)
    for mine, theirs in zip(sent.samples, got.samples, strict=True):
        assert (mine.problem_id, mine.finish_reason) == (theirs.problem_id, theirs.finish_reason)
        for name in ("prompt_ids", "response_ids", "behavior_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), strict=True)
    np.testing.assert_array_equal(sent.rewards, got.rewards, strict=True)
    np.testing.assert_array_equal(sent.advantages, got.advantages, strict=True)
    np.testing.assert_array_equal(sent.kept, got.kept, strict=True)


def test_a_message_of_another_shape_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(msgspec.ValidationError, match="advantages"):
        wire.decode(wire.encode({"samples": [], "rewards": b""}), Batch)


def test_only_one_dimensional_arrays_travel() -> None:
    with pytest.raises(NotImplementedError):
        wire.encode(np.zeros((2, 2), dtype=np.float32))
