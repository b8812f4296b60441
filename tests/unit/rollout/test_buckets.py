"""The packing rule of weights, against the plain reading of its contract."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.buckets import TensorSpec

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
MODELS = st.lists(st.tuples(st.sampled_from(sorted(buckets.DTYPES)), SHAPES), min_size=1, max_size=12).map(
    lambda tensors: tuple(TensorSpec(f"layer.{i}.weight", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
)


def random_tensors(specs: tuple[TensorSpec, ...]) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, torch.randn(spec.shape).to(buckets.DTYPES[spec.dtype])) for spec in specs]


@given(MODELS, st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_every_tensor_travels_exactly_once_in_order_and_bit_for_bit(specs, bucket_bytes):
    sent = random_tensors(specs)
    stream = iter(sent)
    buffer = torch.full((10_000,), 255, dtype=torch.uint8)  # what was there before must not count
    received = []
    for number, bucket in enumerate(buckets.plan(specs, bucket_bytes)):
        flat = buckets.pack(bucket, stream, buffer)
        buckets.seal(bucket, flat, 3, number)
        flat = flat.clone()
        buffer.fill_(77)
        assert flat.numel() == bucket.wire_bytes < bucket.num_bytes + buckets.ALIGNMENT + buckets.SEAL_BYTES
        buckets.check_seal(bucket, flat, 3, number)
        assert bucket.num_bytes <= bucket_bytes or len(bucket.specs) == 1
        received += list(buckets.unpack(bucket, flat))
    assert [name for name, _ in received] == [spec.name for spec in specs]
    for (_, before), (_, after) in zip(sent, received, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


def test_the_example_in_the_docstring():
    specs = (TensorSpec("a", "float32", (4,)), TensorSpec("b", "float32", (5,)), TensorSpec("c", "float32", (20,)))
    first, second = buckets.plan(specs, 64)
    assert (first.offsets, first.num_bytes) == ((0, 16), 36)
    assert (second.specs, second.offsets, second.num_bytes) == ((specs[2],), (0,), 80)


def test_the_manifest_survives_the_message():
    specs = (TensorSpec("a", "bfloat16", (4, 2)), TensorSpec("b", "float32", ()))
    assert buckets.read_manifest(buckets.manifest_of(specs)) == specs


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "reason"),
    [
        ([], [], [], "no tensor is named"),
        (["a"], ["float32"], [], "0 shapes"),
        (["a", "a"], ["float32"] * 2, [[1], [1]], r"named twice: \['a'\]"),
        (["a"], ["int8"], [[1]], "a has dtype int8"),
        (["a"], ["float32"], [[-1]], "negative"),
    ],
)
def test_a_manifest_that_describes_no_model_is_refused(names, dtypes, shapes, reason):
    with pytest.raises(ValueError, match=reason):
        buckets.read_manifest({"names": names, "dtypes": dtypes, "shapes": shapes})


@pytest.mark.parametrize(
    "given_tensor",
    [("b", torch.zeros(3)), ("a", torch.zeros(4)), ("a", torch.zeros(3, dtype=torch.bfloat16)), None],
    ids=["name", "shape", "dtype", "end"],
)
def test_a_tensor_other_than_the_announced_one_is_refused(given_tensor):
    (bucket,) = buckets.plan([TensorSpec("a", "float32", (3,))], 100)
    stream = iter([given_tensor] if given_tensor else [])
    with pytest.raises(ValueError, match=r"\ba\b.*manifest"):
        buckets.pack(bucket, stream, torch.empty(100, dtype=torch.uint8))


def sealed(num_words: int) -> tuple[buckets.Bucket, torch.Tensor]:
    spec = TensorSpec("a", "float32", (num_words,))
    (bucket,) = buckets.plan([spec], 1)
    flat = buckets.pack(bucket, iter(random_tensors((spec,))), torch.empty(bucket.wire_bytes, dtype=torch.uint8))
    buckets.seal(bucket, flat, version=3, number=0)
    return bucket, flat


@pytest.mark.parametrize("num_words", [1, 100, 5000, 4 * 2048])  # the last: whole rows of the checksum and nothing else
def test_a_flipped_bit_a_shift_or_a_hole_is_noticed(num_words):
    bucket, flat = sealed(num_words)
    buckets.check_seal(bucket, flat, 3, 0)
    places = range(0, 4 * num_words, max(1, num_words // 30) | 1)  # an odd stride: every bit of a word has its turn
    for place in places:
        flat[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match="bucket 1 of version 3 arrived damaged"):
            buckets.check_seal(bucket, flat, 3, 0)
        flat[place] ^= 1 << place % 8
    if num_words > 1:
        body = flat[: bucket.num_bytes].clone()
        for damaged in (body.roll(8), body.roll(8192), torch.cat([body[:160], torch.zeros_like(body[160:])])):
            flat[: bucket.num_bytes] = damaged
            if not torch.equal(damaged, body):
                with pytest.raises(ValueError, match="damaged"):
                    buckets.check_seal(bucket, flat, 3, 0)


@pytest.mark.parametrize("num_words", [2, 2048, 5000])
def test_the_checksum_is_the_sum_of_all_words_by_the_odd_factors_of_their_places(num_words):
    """Modulo 2^64, where an odd factor has an inverse: no change of one word can be lost."""
    flat = torch.randint(0, 256, (8 * num_words,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    words = flat.view(torch.int64).tolist()
    assert (buckets.checksum(flat) - sum((2 * i + 1) * word for i, word in enumerate(words))) % 2**64 == 0
    swapped = flat.view(num_words, 8).clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    assert buckets.checksum(swapped.flatten()) != buckets.checksum(flat)


def test_another_version_or_another_bucket_is_noticed():
    bucket, flat = sealed(10)
    with pytest.raises(ValueError, match="expected weights of version 4, the sender sent version 3"):
        buckets.check_seal(bucket, flat, 4, 0)
    with pytest.raises(ValueError, match="expected bucket 3 of version 3, bucket 1 came"):
        buckets.check_seal(bucket, flat, 3, 2)
