"""What a step reports, against plain Python over the tokens; sums that add up, and None where there is nothing."""

import json
import math
from dataclasses import replace

import pytest
import torch

from a3po_megatron.objective.buckets import BUCKETS, StalenessBuckets
from a3po_megatron.objective.metrics import add_up, figures
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import LogLinearProximal, RecomputedProximal
from tests.references import policy_loss as reference
from tests.unit.objective.cases import Case, random_case

LOSS = PolicyLoss(LogLinearProximal())


def totals_of(case: Case, loss: PolicyLoss = LOSS) -> dict[str, float]:
    return {name: value.item() for name, value in case.call(loss)[1].items()}


def bucket_of(d: int) -> str:
    if d < 0:
        return "newer"
    return {0: "d0", 1: "d1", 2: "d2", 3: "d3-4", 4: "d3-4"}.get(d, "d5-8" if d <= 8 else "d9+")


def test_tokens_are_sorted_by_age_into_buckets_that_do_not_depend_on_the_data() -> None:
    staleness = torch.tensor([[-5, -1, 0, 1, 2, 3, 4, 5, 8, 9, 1000]], dtype=torch.int32)
    buckets = StalenessBuckets.of(staleness, torch.ones_like(staleness, dtype=torch.bool))
    assert [BUCKETS[i] for i in buckets.index.tolist()] == [bucket_of(d) for d in staleness[0].tolist()]
    assert buckets.counts().tolist() == [2, 1, 1, 1, 2, 2, 2]
    assert buckets.maxima(staleness.double()).tolist() == [-1, 0, 1, 2, 4, 8, 1000]


def test_every_figure_equals_a_loop_over_the_tokens() -> None:
    case = random_case(7, lengths=(40, 30, 50))
    anchor = LOSS.proximal(case.logprobs, case.fields)
    tokens = [(s, t) for s in case.responses(anchor) for t in reference.tokens(s)]
    found = figures(totals_of(case), len(tokens))

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    r, b, w = ([torch.as_tensor(f(s, t)).item() for s, t in tokens] for f in (reference.r, reference.b, reference.w))
    log_w = [math.log(value) for value in w]
    for name, values in (("ratio", r), ("behavior_weight", b), ("weight", w)):
        assert found[f"policy/{name}_mean"] == pytest.approx(mean(values), abs=1e-12)
        assert found[f"policy/{name}_max"] == pytest.approx(max(values), abs=1e-12)
        ess = sum(values) ** 2 / sum(value**2 for value in values) / len(values)
        assert found[f"policy/{name}_ess"] == pytest.approx(ess, abs=1e-12)
    assert found["policy/behavior_kl"] == pytest.approx(-mean(log_w), abs=1e-12)
    assert found["policy/behavior_kl_k3"] == pytest.approx(mean([math.exp(x) - 1 - x for x in log_w]), abs=1e-12)

    def clipped(s: reference.Response, t: int) -> bool:
        ratio, a = float(reference.r(s, t)), s.adv[t].item()
        return (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)

    assert found["policy/clip_fraction"] == pytest.approx(mean([clipped(s, t) for s, t in tokens]))
    for bucket in BUCKETS:
        here = [(s, t) for s, t in tokens if bucket_of(s.d[t]) == bucket]
        assert found[f"tokens/{bucket}"] == len(here) > 0
        assert found[f"policy/clip_fraction/{bucket}"] == pytest.approx(mean([clipped(s, t) for s, t in here]))
    fresh = [s.logp[t].item() - s.behav[t].item() for s, t in tokens if s.d[t] == 0]
    assert found["policy/fresh_logprob_gap_max"] == max(abs(x) for x in fresh)
    assert found["policy/fresh_logprob_gap/d0"] == pytest.approx(mean([abs(x) for x in fresh]), abs=1e-12)
    assert found["policy/fresh_kl/d0"] == pytest.approx(mean([math.exp(x) - 1 - x for x in fresh]), abs=1e-12)


def test_the_mismatch_is_exact_for_gaps_of_float32_rounding() -> None:
    """x^2/2 + x^3/6 at x = 1e-6: 5e-13, far below float32's resolution of e^x near 1."""
    case = random_case(0)
    case.fields["staleness"] = torch.zeros_like(case.fields["staleness"])
    case.fields["behavior_logprobs"] = torch.where(
        case.trainable, case.logprobs.detach() - 1e-6, case.fields["behavior_logprobs"]
    )
    found = figures(totals_of(case), int(case.trainable.sum()))
    assert found["policy/fresh_kl/d0"] == pytest.approx(5e-13, rel=1e-5)


def test_totals_of_microbatches_and_steps_add_up_to_those_of_the_whole() -> None:
    case = random_case(8)
    loss = replace(LOSS, true_proximal=RecomputedProximal())
    cut = int((case.fields["sequence"][0] < 2).sum())
    parts = [case.part(slice(0, cut)), case.part(slice(cut, None), sequence_offset=2)]
    whole, added = totals_of(case, loss), add_up([totals_of(part, loss) for part in parts])
    assert added == pytest.approx(whole, abs=1e-12)


def test_a_bucket_without_tokens_is_none_and_figures_are_plain_json() -> None:
    case = random_case(0)
    case.fields["staleness"] = torch.full_like(case.fields["staleness"], 2)
    found = figures(totals_of(case, replace(LOSS, true_proximal=RecomputedProximal())), int(case.trainable.sum()))
    assert found["policy/clip_fraction/d2"] == found["policy/clip_fraction"]
    assert found["tokens/d0"] == 0
    for name in ("policy/clip_fraction/d0", "policy/fresh_logprob_gap_max", "policy/fresh_kl/d0", "tokens/d0"):
        assert not found[name]
    assert found["policy/fresh_logprob_gap_max"] is None
    assert found["approximation/logprob_abs/d0/max"] is None
    json.dumps(found, allow_nan=False)


def test_the_approximation_error_equals_a_loop_over_the_tokens_of_each_age() -> None:
    case = random_case(9, lengths=(40, 30, 50))
    anchor = LOSS.proximal(case.logprobs, case.fields)
    used = [(s, t) for s in case.responses(anchor) for t in reference.tokens(s)]
    true = [(s, t) for s in case.responses(case.fields["proximal_logprobs"]) for t in reference.tokens(s)]
    found = figures(totals_of(case, replace(LOSS, true_proximal=RecomputedProximal())), len(used))
    for bucket in (*BUCKETS, ""):
        pairs = [(u, v) for u, v in zip(used, true, strict=True) if bucket in ("", bucket_of(u[0].d[u[1]]))]
        error = [(u[0].prox[u[1]] - v[0].prox[v[1]]).item() for u, v in pairs]
        ending = f"/{bucket}" if bucket else ""
        expected = {
            "logprob_abs": [abs(x) for x in error],
            "kl_true_approximate": [math.exp(x) - 1 - x for x in error],
            "kl_approximate_true": [math.exp(-x) - 1 + x for x in error],
            "ratio_abs": [abs(float(reference.r(*u) - reference.r(*v))) for u, v in pairs],
            "behavior_weight_abs": [abs(reference.b(*u) - reference.b(*v)) for u, v in pairs],
        }
        for name, values in expected.items():
            assert found[f"approximation/{name}{ending}"] == pytest.approx(sum(values) / len(values), abs=1e-12)
        largest = f"approximation/logprob_abs{ending}/max" if bucket else "approximation/logprob_abs_max"
        assert found[largest] == pytest.approx(max(expected["logprob_abs"]), abs=1e-14)


def test_the_metrics_mode_trains_as_loglinear_does() -> None:
    case = random_case(3)
    plain, measured = LOSS, replace(LOSS, true_proximal=RecomputedProximal())
    assert measured.needs == {"proximal_logprobs"}
    for one, other in zip(case.value_and_gradients(plain), case.value_and_gradients(measured), strict=True):
        assert torch.equal(one, other)


def test_an_exact_anchor_has_no_approximation_error() -> None:
    case = random_case(3)
    loss = replace(LOSS, proximal=RecomputedProximal(), true_proximal=RecomputedProximal())
    found = figures(totals_of(case, loss), int(case.trainable.sum()))
    assert all(value == 0 for name, value in found.items() if name.startswith("approximation/"))
