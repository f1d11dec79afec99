"""Random passes of random adapters, beside each other and each alone: ranks that are no multiples of 8, all subsets of
layers, sequences of one token, several targets for a token, weights or advantages that are all 0, forwards beside
backwards, and adapters whose weights are not finite.

On a CPU without merging the numbers are the same bits. Merged ones, also with the grouped products of CUDA, are equal
up to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_lora_support import ARCHITECTURES, VOCAB, grpo, make_backend, overflowing, rl, sft

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.protocol import Datum, PassResult, TrainingPass
from skyrl.trainer.ranks import lora_rank as passes_module
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

RANKS = (1, 2, 3, 5, 8, 9, 12, 16, 20, 32, 64)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dppo", "dppo_kl", "dro", "gspo")
LENGTHS = (1, 1, 2, 3, 9, 20, 40)

Outcome = PassResult | Exception


def _seeds(*seeds: int) -> pytest.MarkDecorator:
    """`make test` runs the first two."""
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in seeds[2:])
    return pytest.mark.parametrize("seed", [*seeds[:2], *slow])


class Case:
    """Everything random that follows from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = rng = np.random.default_rng(seed)
        self._architecture = str(rng.choice(list(ARCHITECTURES)))
        self._budget = int(rng.choice([16, 4096, 4096]))
        self.logits_bytes = int(rng.choice([3, 17, 4096])) * VOCAB * 4
        self.specs = {name: self._spec() for name in "abcde"[: rng.integers(2, 6)]}
        self._broken = str(rng.choice(list(self.specs))) if rng.random() < 0.3 else None
        self.passes = [self._pass() for _ in range(rng.integers(2, 8))]

    def backend(self, *, merge: bool) -> LoraBackend:
        """With adapters whose lora_B is not 0."""
        high: dict[str, Any] = {"policy.model.lora.max_lora_rank": max(RANKS)}
        backend = make_backend(self._architecture, merge=merge, micro_batch_tokens=self._budget, **high)
        generator = torch.Generator().manual_seed(self._seed)
        for name, spec in self.specs.items():
            backend.create_model(name, spec)
            weights = rank_of(backend).adapters[name].weights
            weights.add_(0.05 * torch.randn(len(weights), generator=generator))
            if name == self._broken:
                weights.fill_(torch.nan)
        return backend

    def _spec(self) -> LoraSpec:
        rng = self._rng
        chosen = int(rng.integers(1, 8))  # not none of the three
        flags = {name: bool(chosen >> bit & 1) for bit, name in enumerate(("train_attn", "train_mlp", "train_unembed"))}
        rank, alpha, seed = int(rng.choice(RANKS)), float(rng.choice([0.5, 16, 64])), int(rng.integers(99))
        return replace(LoraSpec(rank, alpha, seed), **flags)

    def _pass(self) -> TrainingPass:
        rng = self._rng
        loss = str(rng.choice(LOSSES))
        data = self._supervised() if loss == "cross_entropy" else self._sampled(loss)
        if loss == "ppo" and rng.random() < 0.2:
            data = overflowing()
        return TrainingPass(str(rng.choice(list(self.specs))), data, loss, {}, backward=bool(rng.random() < 0.75))

    def _supervised(self) -> list[Datum]:
        rng = self._rng
        data = sft(int(rng.integers(9)), *rng.choice(LENGTHS, rng.integers(1, 5)).tolist())
        kind = int(rng.integers(5))
        for datum in data:
            inputs, count = datum.loss_inputs, len(datum.tokens)
            if kind == 0:
                inputs["weights"] = np.zeros(count, np.float32)
            elif kind == 1:
                del inputs["weights"]
            elif kind == 2:
                inputs["weights"] = rng.integers(-2, 3, count)
            elif kind == 3:
                targets = int(rng.integers(1, 4))
                inputs["target_tokens"] = rng.integers(0, VOCAB, (count, targets))
                inputs["weights"] = rng.normal(size=(targets, count)).astype(np.float32).T
        return data

    def _sampled(self, loss: str) -> list[Datum]:
        rng = self._rng
        seed = int(rng.integers(9))
        if rng.random() < 0.5:
            data = rl(seed, *rng.choice(LENGTHS, rng.integers(1, 5)).tolist())
        else:
            data = grpo(seed, int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 20)))
        kind = int(rng.integers(4))
        for datum in data:
            inputs, count = datum.loss_inputs, len(datum.tokens)
            if kind == 0:
                inputs["advantages"] = np.zeros(count, np.float32)
            elif kind == 1:
                inputs["advantages"] = np.ones(count, np.int64)
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = np.ones(count, np.float32)
        return data


def _alone(case: Case) -> list[tuple[Outcome, Tensor | None]]:
    """Of each pass: its outcome and its gradient, in a backend that runs nothing else."""
    found: list[tuple[Outcome, Tensor | None]] = []
    for each in case.passes:
        backend = case.backend(merge=False)
        (outcome,) = backend.run([each])
        found.append((outcome, rank_of(backend).adapters[each.model_id].gradient))
    return found


def _gradients(passes: Sequence[TrainingPass], alone: Sequence[Tensor | None]) -> Mapping[str, list[Tensor]]:
    """By model, those of its passes, in order."""
    found: dict[str, list[Tensor]] = {}
    for each, gradient in zip(passes, alone, strict=True):
        if gradient is not None:
            found.setdefault(each.model_id, []).append(gradient)
    return found


@_seeds(*range(6))
def test_passes_beside_others_have_the_bits_of_passes_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seed)
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", case.logits_bytes)
    backend, alone = case.backend(merge=False), _alone(case)
    for found, (expected, _) in zip(backend.run(case.passes), alone, strict=True):
        if isinstance(expected, Exception):
            assert str(found) == str(expected)
            continue
        assert not isinstance(found, Exception)
        assert found.metrics == expected.metrics
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one.tobytes() == other.tobytes()
    expected_gradients = _gradients(case.passes, [gradient for _, gradient in alone])
    for name in case.specs:
        found_gradient, own = rank_of(backend).adapters[name].gradient, expected_gradients.get(name, [])
        assert (found_gradient is None) == (not own)
        if found_gradient is not None:
            total = own[0]
            for gradient in own[1:]:
                total = total + gradient
            assert torch.equal(found_gradient.view(torch.int32), total.view(torch.int32))


@pytest.mark.parametrize("grouped", [False, True])
@_seeds(7, 14, 9, 16, 19, 21)  # in these cases two to five slices are in one stack
def test_merged_passes_have_the_numbers_of_passes_alone(
    seed: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(seed)
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", case.logits_bytes)
    backend, alone = case.backend(merge=True), _alone(case)
    monkeypatch.setattr(passes_module, "groups_adapters", lambda device: grouped)
    kept: list[Tensor | None] = []
    for found, (expected, gradient) in zip(backend.run(case.passes), alone, strict=True):
        has_norm = gradient is None or math.isfinite(float(gradient.norm()))
        kept.append(gradient if has_norm else None)
        if isinstance(expected, Exception) or not has_norm:  # merged passes have no gradient without a finite norm
            assert isinstance(found, Exception)
            continue
        assert not isinstance(found, Exception)
        assert found.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            if name != "computed_tokens:sum":  # rows that passes share count once
                assert found.metrics[name] == pytest.approx(value, rel=2e-3, abs=1e-3)
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4, rtol=1e-4)
    expected_gradients = _gradients(case.passes, kept)
    for name in case.specs:
        found_gradient, own = rank_of(backend).adapters[name].gradient, expected_gradients.get(name, [])
        assert (found_gradient is None) == (not own)
        if found_gradient is not None:
            largest = max(float(gradient.abs().max()) for gradient in own)
            torch.testing.assert_close(found_gradient, torch.stack(own).sum(0), rtol=0, atol=2e-4 * largest + 1e-7)
