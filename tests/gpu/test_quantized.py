"""A quantized release becomes the same weights on the device as in main memory; kept in its bits, it trains the same
and takes less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.base.config.loading import load_config
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.device import base_dtype
from skyrl.trainer.model.loading import load_model
from skyrl.trainer.protocol import AdamParams, TrainingPass
from skyrl.trainer.quantized.weights import QuantizedWeight, held_bytes
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.families import VOCAB, make_family
from tests.gpu.figures import FIGURES
from tests.gpu.support import DEVICE, backend_on, flat, ok, texts
from tests.local_ranks import rank_of
from tests.quantized import FP8, INT4, MXFP4, block_fp8, int4, mxfp4, quantize

WHOLE_GROUPS = {"q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 32, "moe_intermediate_size": 64}

RELEASES: dict[str, tuple[str, dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "fp8": ("qwen3", FP8, block_fp8(torch.bfloat16), {}),
    "mxfp4": ("gpt-oss", MXFP4, mxfp4, {}),
    "int4": ("deepseek-v3", INT4, int4(), WHOLE_GROUPS),
}


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_becomes_weights_of_the_devices_dtype(name: str, tmp_path: Path) -> None:
    family, config, stored, changed = RELEASES[name]
    path = quantize(make_family(family, tmp_path, **changed), tmp_path / "release", config, stored)
    device = torch.device(DEVICE)
    base = rank_of(LoraBackend(load_config({"base_model": path}))).base
    expected = load_model(path, base_dtype(device))
    for ours, theirs in zip(base.packed.model.parameters(), expected.parameters(), strict=True):
        assert ours.device.type == DEVICE
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("name", RELEASES)
def test_kept_in_its_bits_a_release_trains_the_same(name: str, tmp_path: Path) -> None:
    family, config, stored, changed = RELEASES[name]
    path = quantize(make_family(family, tmp_path, **changed), tmp_path / "release", config, stored)
    logprobs, held = [], []
    for keep in (False, True):
        backend = backend_on(path, keep_quantized=keep)
        backend.create_model("m", LoraSpec(8, 32.0, seed=1))
        for step in range(2):
            ok(backend.run([TrainingPass("m", texts(step, VOCAB, 30, 9, 21), "cross_entropy")]))
            backend.optim_step("m", AdamParams(learning_rate=1e-2))
        (result,) = ok(backend.run([TrainingPass("m", texts(5, VOCAB, 40), "cross_entropy", backward=False)]))
        logprobs.append(flat(result))
        parameters = list(rank_of(backend).base.packed.parameters())
        assert all(each.device.type == DEVICE for each in parameters)
        assert any(isinstance(each, QuantizedWeight) for each in parameters) == keep
        held.append(held_bytes(parameters))
    largest = float((logprobs[0] - logprobs[1]).abs().max())
    FIGURES.record(f"{name} kept in its bits: largest difference of a logprob", largest)
    FIGURES.record(f"{name} kept in its bits: the base's bytes over those of the full dtype", held[1] / held[0])
    assert largest < (0.05 if DEVICE == "cuda" else 1e-6), "on CUDA sums of a backward may come in another order"
    assert held[1] < held[0]
