"""Each loss against an independent NumPy formula and finite differences, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from skyrl.trainer.losses import LOSSES, REFUSED, LossInputs, served_losses

Arrays = dict[str, np.ndarray]
COUNT, SIZE = 3, 24


def _clip_objective(r: np.ndarray, x: Arrays, c: dict[str, float]) -> float:
    low, high = c["clip_low_threshold"], c["clip_high_threshold"]
    return -float(np.minimum(r * x["advantages"], np.clip(r, low, high) * x["advantages"]).sum())


def _gspo(lp: np.ndarray, frozen: np.ndarray, x: Arrays, c: dict[str, float]) -> float:
    total = 0.0
    for index in range(COUNT):
        own = x["datum"] == index
        masked = own & (x["sequence_ratio_mask"] != 0)
        s = (frozen - x["logprobs"])[masked].mean()
        r = np.exp(s + lp - frozen)[own]
        total += _clip_objective(r, {"advantages": x["advantages"][own]}, c)
    return total


def _cispo(lp: np.ndarray, frozen: np.ndarray, x: Arrays, c: dict[str, float]) -> float:
    r = np.clip(np.exp(frozen - x["logprobs"]), c["clip_low_threshold"], c["clip_high_threshold"])
    return -float((r * lp * x["advantages"]).sum())


def _dro(lp: np.ndarray, frozen: np.ndarray, x: Arrays, c: dict[str, float]) -> float:
    return -float((lp * x["advantages"] - 0.5 * c["beta"] * (lp - x["logprobs"]) ** 2).sum())


def _dppo(divergence: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., float]:
    """divergence: of the probabilities of a sampled token before and now."""

    def loss(lp: np.ndarray, frozen: np.ndarray, x: Arrays, c: dict[str, float]) -> float:
        total = 0.0
        far = divergence(np.exp(x["logprobs"]), np.exp(frozen))
        for r, moved, a, d in zip(
            np.exp(lp - x["logprobs"]), frozen - x["logprobs"], x["advantages"], far, strict=True
        ):
            delta = c["delta_high"] if a > 0 else c["delta_low"]
            total -= 0.0 if a * moved > 0 and d > delta else r * a
        return total

    return loss


def _binary_kl(p: np.ndarray, now: np.ndarray) -> np.ndarray:
    return p * np.log(p / now) + (1 - p) * np.log((1 - p) / (1 - now))


# Arguments: `lp` is differentiated; `frozen` is the same value where the formula stops the gradient; `x` are the
# inputs; `c` is the configuration of the loss.
REFERENCE: dict[str, Callable[[np.ndarray, np.ndarray, Arrays, dict[str, float]], float]] = {
    "cross_entropy": lambda lp, frozen, x, c: -float((x["weights"] * lp).sum()),
    "importance_sampling": lambda lp, frozen, x, c: -float((np.exp(lp - x["logprobs"]) * x["advantages"]).sum()),
    "ppo": lambda lp, frozen, x, c: _clip_objective(np.exp(lp - x["logprobs"]), x, c),
    "cispo": _cispo,
    "dppo": _dppo(lambda p, now: np.abs(p - now)),
    "dppo_kl": _dppo(_binary_kl),
    "dro": _dro,
    "gspo": _gspo,
}


def _random(seed: int) -> tuple[np.ndarray, Arrays]:
    rng = np.random.default_rng(seed)
    q = np.minimum(-2 + rng.normal(size=SIZE), -0.01)
    advantages = rng.normal(size=SIZE) * (rng.random(SIZE) < 0.7)
    arrays = {
        "weights": rng.normal(size=SIZE),
        "logprobs": q,
        "advantages": advantages,
        "sequence_ratio_mask": (rng.random(SIZE) < 0.7).astype(float),
        "datum": np.repeat(np.arange(COUNT), SIZE // COUNT),
    }
    return np.minimum(q + 0.5 * rng.normal(size=SIZE), -0.01), arrays


def _run(name: str, lp: np.ndarray, arrays: Arrays, config: dict[str, float]) -> tuple[float, np.ndarray]:
    inputs = LossInputs(
        {key: torch.from_numpy(value) for key, value in arrays.items() if key != "datum"},
        torch.from_numpy(arrays["datum"]),
        COUNT,
    )
    leaf = torch.from_numpy(lp.copy()).requires_grad_()
    total = LOSSES[name].function(leaf, inputs, config).total
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), gradient.numpy()


CONFIGS = [
    *((name, dict(loss.config)) for name, loss in LOSSES.items()),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("dppo", {"delta_low": 0.02, "delta_high": 0.05}),
    ("dppo_kl", {"delta_low": 0.001, "delta_high": 0.004}),
    ("dro", {"beta": 0.7}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
]


def test_every_loss_has_a_reference() -> None:
    assert set(REFERENCE) == set(LOSSES)


@pytest.mark.parametrize(("name", "config"), CONFIGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_value_and_gradient_equal_the_reference(name: str, config: dict[str, float], seed: int) -> None:
    lp, arrays = _random(seed)
    total, gradient = _run(name, lp, arrays, config)
    assert total == pytest.approx(REFERENCE[name](lp, lp, arrays, config), rel=1e-12, abs=1e-12)
    step = 1e-6
    for index in range(SIZE):
        above, below = lp.copy(), lp.copy()
        above[index] += step
        below[index] -= step
        slope = REFERENCE[name](above, lp, arrays, config) - REFERENCE[name](below, lp, arrays, config)
        assert gradient[index] == pytest.approx(slope / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if "advantages" in loss.required])
def test_an_advantage_of_zero_with_a_huge_ratio_gives_no_nan(name: str) -> None:
    lp, arrays = _random(3)
    lp[4], arrays["logprobs"][4], arrays["advantages"][4] = 0.0, -2000.0, 0.0
    arrays["sequence_ratio_mask"][4] = 0.0
    total, gradient = _run(name, lp, arrays, dict(LOSSES[name].config))
    assert np.isfinite(total)
    assert np.isfinite(gradient).all()
    if name != "dro":
        assert gradient[4] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_no_gradient_where_it_says_that_it_has_none(name: str) -> None:
    """The trainer relies on it: rows without a gradient go through the output layer without one."""
    trained = LOSSES[name].trained
    lp, arrays = _random(1)
    changed = "advantages" if trained is None else trained
    arrays[changed][::3] = 0.0
    _, gradient = _run(name, lp, arrays, dict(LOSSES[name].config))
    if trained is None:
        assert (gradient != 0).all()
    else:
        assert not gradient[::3].any()
        assert gradient[1::3].any()


P = [(0.6, 0.9), (0.6, 0.3), (0.001, 0.05)]
"""Probabilities of a token when it was sampled, and now. The last one's ratio is 50, and its divergence small."""


@pytest.mark.parametrize(("name", "delta"), [("dppo", 0.2), ("dppo_kl", 0.1)])
def test_dppo_masks_only_what_moves_far_away_whatever_its_ratio(name: str, delta: float) -> None:
    for advantage, expected in ((1.0, [True, False, False]), (-1.0, [False, True, False])):
        before, now = (torch.tensor(each, dtype=torch.float64).log() for each in zip(*P, strict=True))
        inputs = LossInputs({"logprobs": before, "advantages": torch.full((3,), advantage)}, torch.zeros(3), 1)
        leaf = now.clone().requires_grad_()
        value = LOSSES[name].function(leaf, inputs, {"delta_low": delta, "delta_high": delta})
        (gradient,) = torch.autograd.grad(value.total, leaf)
        assert value.clipped is not None
        assert value.clipped.tolist() == expected
        assert (gradient == 0).tolist() == expected


@pytest.mark.parametrize(("q", "lp", "masked"), [(0.0, -1e-7, False), (-1e-7, 0.0, True), (1e-7, 1e-7, False)])
def test_dppo_kl_at_the_ends_of_float32(q: float, lp: float, *, masked: bool) -> None:
    """A token that had all of the probability, one that has now, and logprobs that rounding has left above 0."""
    inputs = LossInputs({"logprobs": torch.tensor([q]), "advantages": torch.tensor([1.0])}, torch.zeros(1), 1)
    value = LOSSES["dppo_kl"].function(torch.tensor([lp]), inputs, LOSSES["dppo_kl"].config)
    assert value.clipped is not None
    assert value.clipped.item() is masked
    assert value.terms.isfinite().all()


@pytest.mark.parametrize(("advantage", "bound"), [(1.0, "clip_high_threshold"), (-1.0, None)])
def test_ppo_clips_an_overflowing_ratio_or_is_infinite(advantage: float, bound: str | None) -> None:
    """A clipped ratio gives the bound's value and no gradient. A ratio that is not clipped (A < 0) gives infinity, not
    NaN."""
    lp, arrays = _random(5)
    arrays["advantages"][:] = 0
    lp[0], arrays["logprobs"][0], arrays["advantages"][0] = 0.0, -2000.0, advantage
    total, gradient = _run("ppo", lp, arrays, dict(LOSSES["ppo"].config))
    if bound is None:
        assert total == np.inf
    else:
        assert total == -LOSSES["ppo"].config[bound]
        assert (gradient == 0).all()


def test_a_target_of_probability_zero_with_weight_zero_is_ignored() -> None:
    lp, arrays = _random(6)
    lp[2], arrays["weights"][2] = -np.inf, 0.0
    total, gradient = _run("cross_entropy", lp, arrays, {})
    assert np.isfinite(total)
    assert gradient[2] == 0


def test_names_and_defaults_are_frozen() -> None:
    assert {name: dict(loss.config) for name, loss in LOSSES.items()} == {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dppo": {"delta_low": 0.2, "delta_high": 0.2},
        "dppo_kl": {"delta_low": 0.05, "delta_high": 0.05},
        "dro": {"beta": 0.05},
        "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    }
    assert set(REFUSED) == {"stable_reinforce"}


def test_the_refusal_of_stable_reinforce_begins_with_what_to_send_and_what_the_operator_can_set() -> None:
    first = REFUSED["stable_reinforce"].partition(". ")[0]
    assert "loss_fn=ppo" in first
    assert 'losses.stable_reinforce = "cispo"' in first


def test_stable_reinforce_is_cispo_only_if_the_operator_allows_it_and_a_metric_says_so() -> None:
    assert "stable_reinforce" not in served_losses("refuse")
    served = served_losses("cispo")["stable_reinforce"]
    assert served.function is LOSSES["cispo"].function
    assert served.config == LOSSES["cispo"].config
    assert served.notice == "stable_reinforce_is_cispo:max"
