"""New weights into a running vLLM server: exact per version, whatever was in flight, and refused when damaged."""

import asyncio
import copy
import signal
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from a3po_megatron.rollout.client import Generation, PartialGeneration
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.publication import PublicationError
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.transfer_messages import FILES_UNUSABLE
from a3po_megatron.rollout.weight_sender import WeightSender
from tests.engine.conftest import TOKEN, LiveServer, rollout_config, tensors_of
from tests.engine.paced_scheduler import slow_from
from tests.engine.tiny_model import VOCABULARY, make_model, reference_logprobs
from tests.fakes.replica_processes import ReplicaProcess, Sender
from tools.replica_stand_in import Fault

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


async def span_two_publications(live: LiveServer, **policy: str) -> tuple[list[Generation], list[list[int]]]:
    """Generate from PROMPTS, publish two models meanwhile; return the results and the labels the partial tokens had."""
    models = [make_model(live.version + 101), make_model(live.version + 102)]
    ready = await live.fleet(**policy)
    partials = [PartialGeneration() for _ in PROMPTS]
    calls = [
        asyncio.create_task(ready.fleet.generate(prompt, SAMPLING, f"span-{i}", partial))
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


def check_each_version(live: LiveServer, prompt: Sequence[int], result: Generation) -> None:
    for version in set(result.versions.tolist()):
        here = result.versions == version
        expected = reference_logprobs(live.models[version], prompt, result.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(result.logprobs[here], expected[here], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
def test_spans_of_a_response_over_two_publications_are_each_exact_for_their_version(live, in_flight):
    first = live.version
    results, early_labels = asyncio.run(span_two_publications(live, in_flight=in_flight))
    for prompt, result, labels in zip(PROMPTS, results, early_labels, strict=True):
        assert len(result.versions) == len(result.token_ids) == SAMPLING.max_tokens
        assert sorted(set(result.versions)) == [first, first + 1, first + 2]
        assert (np.diff(result.versions) >= 0).all()
        check_each_version(live, prompt, result)
        # What a snapshot would have held: read at once, so not newer than the truth; at most a piece behind at each publication.
        truth = result.versions[: len(labels)]
        assert (np.array(labels) <= truth).all()
        assert (np.array(labels) < truth).sum() <= 2 * 4


def test_drained_responses_have_one_version_and_the_rest_is_exact_for_each(live):
    """The short one ends while the fleet drains; the long one is aborted at the deadline and asked again."""
    partials, lengths = [PartialGeneration(), PartialGeneration()], [60, 1000]

    async def run() -> tuple[list[Generation], dict]:
        ready = await live.fleet(in_flight="drain", drain_timeout_s=6.0)
        calls = [
            asyncio.create_task(ready.fleet.generate(prompt, replace(SAMPLING, max_tokens=n), f"drain-{n}", partial))
            for prompt, n, partial in zip(PROMPTS, lengths, partials, strict=False)
        ]
        with slow_from(live.pace_file, 0):
            await tokens_arrive(calls, partials, [40, 40])
            await ready.publish(make_model(live.version + 151))
        results = await asyncio.gather(*calls)
        status = ready.fleet.status()
        await ready.fleet.aclose()
        return results, status

    first = live.version
    (short, long), status = asyncio.run(run())
    assert set(short.versions) == {first}
    assert sorted(set(long.versions)) == [first, first + 1]
    assert status["interrupted"] == 1
    for prompt, result in zip(PROMPTS, (short, long), strict=False):
        check_each_version(live, prompt, result)


def test_keeping_the_kv_cache_goes_on_from_the_old_one(live):
    first = live.version
    results, _ = asyncio.run(span_two_publications(live, kv_on_update="keep"))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert sorted(set(result.versions)) == [first, first + 1, first + 2]
        expected = reference_logprobs(live.models[first], prompt, result.token_ids.tolist(), 1.0)
        here = result.versions == first
        np.testing.assert_allclose(result.logprobs[here], expected[here], atol=TOLERANCE, rtol=0)
        assert np.isfinite(result.logprobs).all()


POLICIES = [("continue", "keep"), ("continue", "rebuild"), ("abort", "rebuild"), ("drain", "rebuild")]


@pytest.mark.parametrize(("in_flight", "kv_on_update"), POLICIES)
def test_new_requests_never_see_a_prompt_that_older_weights_read(live, in_flight, kv_on_update):
    long_prompt = list(range(3, 67))  # four blocks, which the prefix cache would share

    async def before_and_after() -> tuple[Generation, Generation]:
        ready = await live.fleet(in_flight=in_flight, kv_on_update=kv_on_update)
        before = await ready.fleet.generate(long_prompt, SamplingSettings(1.0, 20, ignore_eos=True), "before")
        await ready.publish(make_model(live.version + 201))
        after = await ready.fleet.generate(long_prompt, SamplingSettings(1.0, 20, ignore_eos=True), "after")
        await ready.fleet.aclose()
        return before, after

    for result in asyncio.run(before_and_after()):
        model = live.models[int(result.versions[0])]
        expected = reference_logprobs(model, long_prompt, result.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)


def one_trained_step(model: Qwen3ForCausalLM, learning_rate: float) -> Qwen3ForCausalLM:
    """Return a copy one AdamW step later: the likelihood of some sequences is raised, of others lowered."""
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate)
    ids = torch.randint(2, 96, (8, 64), generator=torch.Generator().manual_seed(1))
    logprobs = trained(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    advantages = torch.tensor([1.0, -1.0] * 4)[:, None]
    (-advantages * logprobs).mean().backward()
    optimizer.step()
    return trained.eval()


def test_the_gap_of_kept_caches_between_consecutive_trained_versions_is_reported(live, capsys):
    """Kept log-probabilities are those the tokens were drawn with; the gap is to those of the version on their label."""
    learning_rate = 1e-4

    async def run() -> list[Generation]:
        ready = await live.fleet(kv_on_update="keep")
        partials = [PartialGeneration() for _ in PROMPTS]
        calls = [
            asyncio.create_task(ready.fleet.generate(prompt, SAMPLING, f"gap-{i}", partial))
            for i, (prompt, partial) in enumerate(zip(PROMPTS, partials, strict=True))
        ]
        with slow_from(live.pace_file, 0):
            await tokens_arrive(calls, partials, [300] * len(PROMPTS))
            await ready.publish(one_trained_step(live.model, learning_rate))
        results = await asyncio.gather(*calls)
        await ready.fleet.aclose()
        return results

    gaps, moves = [], []
    for prompt, result in zip(PROMPTS, asyncio.run(run()), strict=True):
        old, new = sorted(set(result.versions.tolist()))
        here = result.versions == new
        by_old, by_new = (
            reference_logprobs(live.models[version], prompt, result.token_ids.tolist(), 1.0)[here]
            for version in (old, new)
        )
        gaps.append(np.abs(result.logprobs[here] - by_new))
        moves.append(np.abs(by_old - by_new))
    gap, move = np.concatenate(gaps), np.concatenate(moves)
    with capsys.disabled():
        print(
            f"\nkept caches, one AdamW step of {learning_rate:g}: gap to the labelled version mean {gap.mean():.2e}, "
            f"max {gap.max():.2e}; the step itself moves log-probabilities by mean {move.mean():.2e}, max {move.max():.2e}"
        )
    assert gap.max() > TOLERANCE, "the cache was rebuilt: nothing was kept"
    assert gap.mean() < move.mean(), "the label would be as wrong as the version before"


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
        return ready.sender.epoch, results

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
        check_each_version(live, prompt, result)


class DamagingSender(WeightSender):
    """Flips one bit of the first bucket after it was sealed."""

    def send(self, *arguments):
        broadcast, damaged = self._group.broadcast, []

        def damage_once(flat, what):
            if not damaged:
                damaged.append(True)
                flat[0] ^= 1
            return broadcast(flat, what)

        self._group.broadcast = damage_once
        return super().send(*arguments)


class MislabellingSender(WeightSender):
    """Sends the weights as those of another version."""

    def send(self, specs, tensors, version, *arguments):
        return super().send(specs, tensors, version + 7, *arguments)


@pytest.mark.parametrize(
    ("sender_type", "lacks", "reason"),
    [
        (DamagingSender, "nothing", "bucket 1 of version .* arrived damaged"),
        (MislabellingSender, "nothing", "the sender sent version"),
        (WeightSender, "layers.1.self_attn.k_proj", "one fused layer"),
        (WeightSender, "layers.1.post_attention_layernorm", "lacks weights for .*post_attention_layernorm"),
    ],
    ids=["damaged bucket", "wrong version", "part of a fused layer", "missing tensor"],
)
def test_bad_weights_are_refused_and_the_replica_is_dropped(live, sender_type, lacks, reason):
    """Each leaves the server with weights of no version, and a whole publication mends that."""
    model = make_model(live.version + 401)
    tensors = [(name, tensor) for name, tensor in tensors_of(model) if lacks not in name]

    async def run() -> None:
        ready = await live.fleet(startup_timeout_s=0.1)
        fleet, version = ready.fleet, live.version + 1
        with pytest.raises(PublicationError, match=f"version {version} waited 0.1 s for a replica; .*{reason}"):
            await ready.sender.publish(tensors, version, kind=sender_type)
        assert fleet.version == version - 1
        assert "live" in fleet.status()["fenced"]
        assert (await fleet.register("live", live.server.url, 1))["state"] == "fenced"
        await fleet.aclose()
        mended = await live.fleet()
        await mended.publish(model)
        await mended.fleet.aclose()

    asyncio.run(run())


async def check_exact(live: LiveServer, fleet: Fleet, request_id: str) -> None:
    """Generate on the server and compare with the model of the version that the tokens claim."""
    result = await fleet.generate(PROMPTS[0], SamplingSettings(1.0, 30, ignore_eos=True), request_id)
    assert set(result.versions) == {live.version}
    expected = reference_logprobs(live.model, PROMPTS[0], result.token_ids.tolist(), 1.0)
    np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_a_server_that_was_half_loaded_when_another_member_was_killed_is_filled_whole(live):
    """In the middle of a fused layer: q has come, k and v have not."""
    model = make_model(live.version + 501)
    names = [name for name, _ in tensors_of(model)]
    killed_at = names.index("model.layers.1.self_attn.k_proj.weight")

    async def run() -> None:
        ready = await live.fleet(transfer_timeout_s=30.0, bucket_bytes=1)
        with ReplicaProcess(Fault(signal.SIGKILL, live.version + 1, killed_at)) as other:
            assert (await ready.fleet.register("other", other.url, 1))["state"] == "current"
            async with asyncio.timeout(90):  # a hang is a failure: vLLM waits for tensors that it has counted already
                outcome = await ready.sender.publish(tensors_of(model), live.version + 1)
            assert other.was_killed
        assert [result.again for result in ready.sender.outcomes] == [True, False]
        assert outcome.members == ["live"]
        live.models[live.version + 1] = model
        await check_exact(live, ready.fleet, "after a death")
        await ready.fleet.aclose()

    asyncio.run(run())


def test_a_server_that_comes_late_gets_the_current_weights_from_files_before_its_first_request(live):
    model = make_model(live.version + 601)

    async def run() -> None:
        fleet = Fleet(rollout_config(), TOKEN, live.rendezvous_dir, live.version, VOCABULARY)
        with ReplicaProcess() as other:
            await fleet.register("other", other.url, 1)
            await Sender(fleet, timeout_s=30).publish(tensors_of(model), live.version + 1)
            await fleet.deregister("other", "killed")
        live.models[live.version + 1] = model
        assert (await fleet.register("live", live.server.url, 1))["state"] == "behind"
        await check_exact(live, fleet, "late")
        await fleet.aclose()

    asyncio.run(run())


def test_a_server_that_finds_damaged_files_says_so_and_they_are_read_no_more(live):
    """The controller knows by the server's words that the files are to blame; the next publication mends the server."""
    model = make_model(live.version + 701)

    async def run() -> None:
        fleet = Fleet(rollout_config(), TOKEN, live.rendezvous_dir, live.version, VOCABULARY)
        with ReplicaProcess() as other:
            await fleet.register("other", other.url, 1)
            await Sender(fleet, timeout_s=30).publish(tensors_of(model), live.version + 1)
            last = sorted(live.rendezvous_dir.glob("published/version_*/bucket_*.safetensors"))[-1]
            last.write_bytes(last.read_bytes()[:-7])
            assert (await fleet.register("live", live.server.url, 1))["state"] == "behind"
            async with asyncio.timeout(60):
                while "live" not in fleet.status()["fenced"]:
                    await asyncio.sleep(0.01)
        reason = fleet.status()["fenced"]["live"]
        assert FILES_UNUSABLE in reason, reason
        assert "the file was cut off" in reason, reason
        assert not fleet._publications.keeps_current
        await fleet.aclose()
        mended = await live.fleet()
        await mended.publish(model)
        await check_exact(live, mended.fleet, "mended")
        await mended.fleet.aclose()

    asyncio.run(run())
