"""Which kernels of torch compute attention: none that plans each new shape, and none that keeps all scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import TrainingPass
from tests.gpu.support import DEVICE, NUMERICS, SETTINGS, backend_on, build, ok, texts

OPERATION = "aten::_scaled_dot_product_"
FLASH = {f"{OPERATION}flash_attention", f"{OPERATION}flash_attention_backward"}
EFFICIENT = {f"{OPERATION}efficient_attention", f"{OPERATION}efficient_attention_backward"}
ON_CPU = {f"{OPERATION}flash_attention_for_cpu", f"{OPERATION}flash_attention_for_cpu_backward"}
VOCAB = NUMERICS["vocab_size"]
LENGTHS = (200, 31, 90, 128)


@pytest.mark.skipif("trainer.attention" in SETTINGS, reason="of `sdpa`; test_varlen_kernel.py has the other way")
@pytest.mark.parametrize("shares_a_prompt", [False, True], ids=["causal", "behind-a-prompt"])
def test_the_kernels_of_attention(shares_a_prompt: bool, bases: Path) -> None:
    """Causal groups: FlashAttention. Groups behind a prompt, which have masks: the memory-efficient kernel."""
    data = texts(1, VOCAB, *LENGTHS)
    if shares_a_prompt:
        prompt = np.random.default_rng(2).integers(0, VOCAB, 24)
        for datum in data:
            datum.tokens[: len(prompt)] = prompt
    backend = backend_on(build(NUMERICS, bases))
    backend.create_model("m", LoraSpec(8, 32.0, 3))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:  # else torch 2.11 warns
        (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy")]))
    shared = 3 * 24 if shares_a_prompt else 0
    assert result.metrics["computed_tokens:sum"] == sum(LENGTHS) - shared
    names = {event.key for event in profiled.key_averages()}
    on_cuda = FLASH | EFFICIENT if shares_a_prompt else FLASH
    assert {name for name in names if name.startswith(OPERATION)} == (on_cuda if DEVICE == "cuda" else ON_CPU)
