"""New weights into a running vLLM server: exact per version, whatever was in flight, and refused when damaged."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from a3po_megatron.rollout.buckets import TensorSpec, manifest_of
from a3po_megatron.rollout.client import Generation, PartialGeneration
from a3po_megatron.rollout.publication import PublicationError
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.weight_sender import WeightSender
from tests.engine.conftest import LiveServer, specs_of, tensors_of
from tests.engine.paced_scheduler import slow_from
from tests.engine.tiny_model import make_model, reference_logprobs

pytestmark = pytest.mark.timeout(300)  # the first test waits for the server

PROMPTS = [[5, 17, 42, 8], [60, 2, 9], [33, 33, 80, 11, 4]]
SAMPLING = SamplingSettings(temperature=1.0, max_tokens=1500, ignore_eos=True)
TOLERANCE = 1e-4


async def tokens_arrive(
    calls: Sequence[asyncio.Task[Generation]], partials: Sequence[PartialGeneration], lengths: Sequence[int]
) -> None:
    """Wait until each response has its length."""
    while any(len(partial.token_ids) < length for partial, length in zip(partials, lengths, strict=True)):
        assert not any(call.done() for call in calls), "a response ended before it had its publications"
        await asyncio.sleep(0.005)


async def span_two_publications(live: LiveServer, kv_on_update: str) -> tuple[list[Generation], list[list[int]]]:
    """Generate from PROMPTS, publish two models meanwhile; return the results and the labels the partial tokens had."""
    models = [make_model(live.version + 101), make_model(live.version + 102)]
    ready = await live.fleet(kv_on_update=kv_on_update)
    partials = [PartialGeneration() for _ in PROMPTS]
    calls = [
        asyncio.create_task(ready.fleet.generate(prompt, SAMPLING, f"span-{kv_on_update}-{i}", partial))
        for i, (prompt, partial) in enumerate(zip(PROMPTS, partials, strict=True))
    ]
    early_labels: list[list[int]] = []
    with slow_from(live.pace_file, 0):
        for model in models:
            await tokens_arrive(calls, partials, [len(partial.token_ids) + 40 for partial in partials])
            early_labels = [list(partial.versions) for partial in partials]
            await ready.publish(model)
    results = await asyncio.gather(*calls)
    await ready.fleet.aclose()
    return results, early_labels


def test_spans_of_a_response_over_two_publications_are_each_exact_for_their_version(live):
    first = live.version
    results, early_labels = asyncio.run(span_two_publications(live, "rebuild"))
    for prompt, result, labels in zip(PROMPTS, results, early_labels, strict=True):
        assert len(result.versions) == len(result.token_ids) == SAMPLING.max_tokens
        assert sorted(set(result.versions)) == [first, first + 1, first + 2]
        assert (np.diff(result.versions) >= 0).all()
        for version in set(result.versions):
            here = result.versions == version
            expected = reference_logprobs(live.models[version], prompt, result.token_ids.tolist(), 1.0)
            np.testing.assert_allclose(result.logprobs[here], expected[here], atol=TOLERANCE, rtol=0)
        # What a snapshot would have held: never newer than the truth, and at most a piece behind at each publication.
        truth = result.versions[: len(labels)]
        assert (np.array(labels) <= truth).all()
        assert (np.array(labels) < truth).sum() <= 2 * 4


def test_keeping_the_kv_cache_works_and_new_requests_do_not_see_old_prompts(live):
    first = live.version
    results, _ = asyncio.run(span_two_publications(live, "keep"))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert sorted(set(result.versions)) == [first, first + 1, first + 2]
        expected = reference_logprobs(live.models[first], prompt, result.token_ids.tolist(), 1.0)
        here = result.versions == first
        np.testing.assert_allclose(result.logprobs[here], expected[here], atol=TOLERANCE, rtol=0)
        assert np.isfinite(result.logprobs).all()

    long_prompt = list(range(3, 67))  # four blocks, which the prefix cache would share

    async def before_and_after() -> tuple[Generation, Generation]:
        ready = await live.fleet(kv_on_update="keep")
        before = await ready.fleet.generate(long_prompt, SamplingSettings(1.0, 20, ignore_eos=True), "before")
        await ready.publish(make_model(live.version + 201))
        after = await ready.fleet.generate(long_prompt, SamplingSettings(1.0, 20, ignore_eos=True), "after")
        await ready.fleet.aclose()
        return before, after

    for result in asyncio.run(before_and_after()):
        model = live.models[int(result.versions[0])]
        expected = reference_logprobs(model, long_prompt, result.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_one_group_serves_many_publications_and_every_tensor_changes(live):
    async def run() -> tuple[int, list[Generation]]:
        ready, results = await live.fleet(), []
        for _ in range(3):
            model = make_model(live.version + 301)
            for parameter in model.parameters():  # norms and embeddings too, so that one forgotten tensor shows
                parameter.data.add_(0.05 * torch.randn_like(parameter))
            await ready.publish(model)
            results.append(await ready.fleet.generate(PROMPTS[0], SamplingSettings(1.0, 30, ignore_eos=True), "many"))
        await ready.fleet.aclose()
        return ready.epoch, results

    epoch, results = asyncio.run(run())
    assert epoch == 1
    for result in results:
        expected = reference_logprobs(live.models[result.versions[0]], PROMPTS[0], result.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_seeded_responses_longer_together_than_one_engine_step_survive_new_weights(live):
    """Rebuilt, their 4,200 tokens are more than the 4,096 of a step; a seeded one, cut in two, would end the engine."""

    async def run() -> list[Generation]:
        ready = await live.fleet(kv_on_update="rebuild")
        partials = [PartialGeneration() for _ in PROMPTS]
        calls = [
            asyncio.create_task(
                ready.fleet.generate(prompt, replace(SAMPLING, seed=i, max_tokens=2400), f"seeded-{i}", partial)
            )
            for i, (prompt, partial) in enumerate(zip(PROMPTS, partials, strict=True))
        ]
        with slow_from(live.pace_file, 1410):
            await tokens_arrive(calls, partials, [1400] * 3)
            await ready.publish(make_model(live.version + 401))
        results = await asyncio.gather(*calls)
        await ready.fleet.aclose()
        return results

    first = live.version
    for prompt, result in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert sorted(set(result.versions)) == [first, first + 1]
        for version in set(result.versions):
            here = result.versions == version
            expected = reference_logprobs(live.models[version], prompt, result.token_ids.tolist(), 1.0)
            np.testing.assert_allclose(result.logprobs[here], expected[here], atol=TOLERANCE, rtol=0)


class DamagingSender(WeightSender):
    """Flips one bit of the first bucket after its checksum was taken."""

    def send(self, specs, tensors, version, bucket_bytes):
        broadcast, damaged = self._group.broadcast, []

        def damage_once(flat, what):
            if not damaged:
                damaged.append(True)
                flat[0] ^= 1
            broadcast(flat, what)

        self._group.broadcast = damage_once
        return super().send(specs, tensors, version, bucket_bytes)


class MislabellingSender(WeightSender):
    """Sends the weights as those of another version."""

    def send(self, specs, tensors, version, bucket_bytes):
        return super().send(specs, tensors, version + 7, bucket_bytes)


def lacks(name_part: str) -> list[TensorSpec]:
    return [spec for spec in specs_of(make_model(0)) if name_part not in spec.name]


@pytest.mark.parametrize(
    ("sender_type", "specs", "reason"),
    [
        (DamagingSender, specs_of(make_model(0)), "damaged"),
        (MislabellingSender, specs_of(make_model(0)), "the sender sent version"),
        (WeightSender, lacks("layers.1.self_attn.k_proj"), "one fused layer"),
        (WeightSender, lacks("layers.1.post_attention_layernorm"), "lacks weights for .*post_attention_layernorm"),
    ],
    ids=["damaged bucket", "wrong version", "part of a fused layer", "missing tensor"],
)
def test_bad_weights_are_refused_and_the_replica_is_dropped(live, sender_type, specs, reason):
    """Last in the file: each leaves the server with weights of no version, and a whole publication mends that."""
    model = make_model(live.version + 401)
    tensors = [(name, tensor) for name, tensor in tensors_of(model) if name in {spec.name for spec in specs}]

    async def run() -> None:
        ready = await live.fleet()
        fleet, version = ready.fleet, live.version + 1
        begun = await fleet.begin_publication(version, manifest_of(specs))

        def send() -> None:
            rendezvous = begun["rendezvous"]
            sender = sender_type(rendezvous["store"], rendezvous["world_size"], timeout_s=30)
            with contextlib.suppress(RuntimeError):  # the replica may leave before everything is sent
                sender.send(specs, tensors, version, begun["bucket_bytes"])

        await asyncio.to_thread(send)
        with pytest.raises(PublicationError, match=f"version {version} reached no replica: .*{reason}"):
            await fleet.finish_publication(version)
        assert fleet.version == version - 1
        assert "live" in fleet.status()["fenced"]
        assert (await fleet.register("live", live.server.url, 1))["state"] == "fenced"
        await fleet.aclose()
        mended = await live.fleet()
        await mended.publish(model)
        await mended.fleet.aclose()

    asyncio.run(run())
