"""Refuses settings of the objective that mean nothing, or nothing together. Changes nothing."""

import math

from a3po_megatron.config.algorithm import AlgorithmConfig, AlphaConfig
from a3po_megatron.errors import UserError


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Check the objective's settings against each other. Raises UserError."""
    _check_passes(algorithm)
    _check_clip(algorithm)
    _check_weights(algorithm)
    _check_penalties(algorithm)
    if algorithm.method in ("loglinear", "metrics"):
        _check_alpha(algorithm.alpha, algorithm.surrogate)
    _check_m2po(algorithm)
    if algorithm.aggregation == "fixed_length" and algorithm.fixed_length < 1:
        raise UserError(
            f"algorithm.fixed_length={algorithm.fixed_length}: algorithm.aggregation=fixed_length divides by it; "
            "use for example rollout.max_response_tokens"
        )
    if algorithm.aggregation != "fixed_length" and algorithm.fixed_length:
        raise UserError(
            f"algorithm.fixed_length={algorithm.fixed_length} with algorithm.aggregation={algorithm.aggregation}: only "
            "fixed_length divides by it; leave it at 0"
        )


def _check_passes(algorithm: AlgorithmConfig) -> None:
    for name in ("num_minibatches", "num_epochs"):
        value = getattr(algorithm, name)
        _require(value >= 1, f"algorithm.{name}", value, "must be at least 1")
    if algorithm.reuse_first_forward and algorithm.method != "recompute":
        raise UserError(
            f"algorithm.reuse_first_forward=true with algorithm.method={algorithm.method}: only recompute has an extra "
            "forward pass to save"
        )
    if algorithm.reuse_first_forward and algorithm.num_epochs > 1:
        raise UserError(
            f"algorithm.reuse_first_forward=true with algorithm.num_epochs={algorithm.num_epochs}: the second epoch needs the "
            "extra pass of the first minibatch all the same, so nothing is saved; set reuse_first_forward=false"
        )


def _check_clip(algorithm: AlgorithmConfig) -> None:
    low, high, dual = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    _require(0 < low <= 1, "algorithm.clip_low", low, "above 0 and at most 1, where nothing is clipped below")
    _require(high > 0, "algorithm.clip_high", high, "must be above 0")
    _require(dual == 0 or dual > 1, "algorithm.dual_clip", dual, "above 1, or 0 for none")
    if algorithm.surrogate == "cispo" and dual:
        raise UserError(
            f"algorithm.dual_clip={dual} with algorithm.surrogate=cispo: cispo has no minimum that a large ratio could "
            "escape, its weight is at most 1 + clip_high already; leave dual_clip at 0"
        )


def _check_weights(algorithm: AlgorithmConfig) -> None:
    cap, level, bound = algorithm.behavior_weight.cap, algorithm.behavior_weight.level, algorithm.total_weight.bound
    hint = "at least 1, the weight of fresh data, or 0 for no cap"
    _require(cap == 0 or cap >= 1, "algorithm.behavior_weight.cap", cap, hint)
    _require(bound == 0 or bound > 1, "algorithm.total_weight.bound", bound, "above 1, or 0 for none")
    for name, mode, limit, value in (
        ("behavior_weight", algorithm.behavior_weight.mode, "cap", cap),
        ("total_weight", algorithm.total_weight.mode, "bound", bound),
    ):
        if mode == "mask" and not value:
            raise UserError(
                f"algorithm.{name}.mode=mask with algorithm.{name}.{limit}=0: nothing would be masked; set the {limit} that a "
                "token must not exceed, or leave the mode at truncate"
            )
    if algorithm.surrogate == "gspo" and level == "token":
        raise UserError(
            "algorithm.behavior_weight.level=token with algorithm.surrogate=gspo: the ratio belongs to the whole response, "
            "so its product with a token's weight corrects for no policy; use auto or sequence"
        )
    if algorithm.surrogate == "cispo" and bound:
        raise UserError(
            f"algorithm.total_weight.bound={bound} with algorithm.surrogate=cispo: cispo bounds the total weight itself, "
            "by clip_low and clip_high; leave the bound at 0"
        )


def _check_penalties(algorithm: AlgorithmConfig) -> None:
    kl = algorithm.kl
    for name, value in (
        ("kl.reference_coefficient", kl.reference_coefficient),
        ("kl.behavior_coefficient", kl.behavior_coefficient),
        ("entropy_coefficient", algorithm.entropy_coefficient),
    ):
        _require(0 <= value < math.inf, f"algorithm.{name}", value, "must be at least 0")
    _require(kl.behavior_clamp > 0, "algorithm.kl.behavior_clamp", kl.behavior_clamp, "must be above 0")


def _check_alpha(alpha: AlphaConfig, surrogate: str) -> None:
    if alpha.fresh_anchor == "target" and alpha.kind != "inverse":
        raise UserError(
            f"algorithm.alpha.fresh_anchor=target with algorithm.alpha.kind={alpha.kind}: only inverse has a choice at "
            "staleness 0; leave it at behavior"
        )
    _require(0 <= alpha.value <= 1, "algorithm.alpha.value", alpha.value, "a share between 0 and 1")
    _require(alpha.rate > 0, "algorithm.alpha.rate", alpha.rate, "must be above 0")
    steering = alpha.adaptive
    for name in ("target", "gain", "min_strength"):
        value = getattr(steering, name)
        _require(0 < value < math.inf, f"algorithm.alpha.adaptive.{name}", value, "must be above 0")
    if alpha.kind == "adaptive" and steering.measure == "clip_fraction":
        _require(steering.target < 1, "algorithm.alpha.adaptive.target", steering.target, "a share of tokens, below 1")
        if surrogate == "cispo":
            raise UserError(
                "algorithm.alpha.adaptive.measure=clip_fraction with algorithm.surrogate=cispo: cispo clips the total weight, "
                "which no alpha moves; use measure behavior_kl or another surrogate"
            )
    low, start, high = steering.min_strength, steering.initial_strength, steering.max_strength
    if not low <= start <= high:
        raise UserError(
            f"algorithm.alpha.adaptive.initial_strength={start}: must lie between min_strength={low} and max_strength={high}"
        )


def _check_m2po(algorithm: AlgorithmConfig) -> None:
    threshold = algorithm.m2po_threshold
    _require(0 <= threshold < math.inf, "algorithm.m2po_threshold", threshold, "above 0, or 0 for no M2PO")
    if not threshold:
        return
    if algorithm.method != "recompute":
        raise UserError(
            f"algorithm.m2po_threshold={threshold} with algorithm.method={algorithm.method}: M2PO chooses tokens of the whole "
            "batch by their ratios before its first step, which only the extra pass of recompute gives"
        )
    if algorithm.reuse_first_forward:
        raise UserError(
            f"algorithm.m2po_threshold={threshold} with algorithm.reuse_first_forward=true: M2PO needs the ratios of the first "
            "minibatch before its own forward pass; set reuse_first_forward=false"
        )
    if algorithm.surrogate == "gspo":
        raise UserError(
            f"algorithm.m2po_threshold={threshold} with algorithm.surrogate=gspo: M2PO drops single tokens by their own ratio, "
            "gspo has one ratio for a whole response; use surrogate ppo or cispo"
        )


def _require(holds: bool, name: str, value: float, hint: str) -> None:
    """Raise UserError unless `holds`, which a comparison with NaN does not."""
    if not holds:
        raise UserError(f"{name}={value}: {hint}")
