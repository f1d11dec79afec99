"""Slots of adapters and the cache of a vLLM on a CPU take memory when they are written to, and adapters leave it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl.runtime.processes.host_resources import trim

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from skyrl.inference.vllm_plugin import patches
    from skyrl.inference.vllm_plugin.cpu_patches import (
        LEAST_BYTES,
        UntouchedZeros,
        _remove_unless_used,
        _then_forgotten,
        forget_pages,
    )

SLOTS, VOCABULARY, HIDDEN, RANK = 4, 200_000, 64, 32
SLOT = 4 * RANK * (VOCABULARY + HIDDEN)
CPU = torch.device("cpu")


def resident() -> int:
    """Bytes of this process, without what it has freed: tensors of earlier tests, and those that a copy was made of."""
    trim()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def layer(vocabulary: int = VOCABULARY) -> Any:
    """vLLM's own wrapper of an output layer, with its slots."""
    base = SimpleNamespace(vocab_size=vocabulary)
    made = object.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(made)
    made.__dict__.update(base_layer=base, hidden_size=HIDDEN, device=CPU, sharded_to_full_mapping=None)
    config: Any = SimpleNamespace(max_lora_rank=RANK, lora_dtype=torch.float32)
    with UntouchedZeros():
        made.create_lora_weights(SLOTS, config)
    return made


def test_slots_take_memory_when_an_adapter_comes_and_give_it_back_when_it_goes() -> None:
    before = resident()
    made = layer()
    assert not made.lora_b_stacked[2].any()
    assert resident() - before < SLOT / 2
    made.set_lora(2, torch.ones(RANK, HIDDEN), torch.ones(VOCABULARY, RANK))
    assert made.lora_b_stacked.sum() == VOCABULARY * RANK
    assert 0.9 * SLOT < resident() - before < 1.5 * SLOT
    manager: Any = SimpleNamespace(lora_index_to_id=[None, None, 7, None], modules={"lm_head": made})
    deactivate = _then_forgotten(LoRAModelManager._deactivate_adapter)
    deactivate(manager, 8)
    assert made.lora_b_stacked[2].all(), "no slot is this adapter's"
    deactivate(manager, 7)
    assert manager.lora_index_to_id == [None] * SLOTS
    assert resident() - before < SLOT / 2
    made.set_lora(2, torch.ones(RANK, HIDDEN), torch.ones(VOCABULARY, RANK))
    assert made.lora_b_stacked.sum() == VOCABULARY * RANK


def test_slots_of_a_vocabulary_beyond_vllms_bound_are_untouched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitsProcessorWithLoRA, "create_lora_weights", LogitsProcessorWithLoRA.create_lora_weights)
    monkeypatch.setattr(LoRAModelRunnerMixin, "load_lora_model", LoRAModelRunnerMixin.load_lora_model)
    patches.serve_lm_head()
    before = resident()
    made = layer(patches.VLLMS_BOUND + 64)
    assert made.lora_b_stacked.shape == (SLOTS, 1, patches.VLLMS_BOUND + 64, RANK)
    assert resident() - before < SLOT / 2


def test_small_tensors_and_those_of_others_are_left_to_torch() -> None:
    others = torch.ones(SLOTS, LEAST_BYTES)
    forget_pages(others[0])
    assert others.all()
    with UntouchedZeros():
        small = torch.zeros(8, dtype=torch.float32, device=CPU)
        meta = torch.zeros((SLOTS, LEAST_BYTES), dtype=torch.int8, device=torch.device("meta"))
        large = torch.zeros(SLOTS, LEAST_BYTES, dtype=torch.int8, device="cpu")
    assert (small.shape, meta.device.type, large.shape) == ((8,), "meta", (SLOTS, LEAST_BYTES))
    assert large.dtype == torch.int8
    assert not large.any()
    large[1] = 3
    forget_pages(large[0])
    assert large[1].all(), "only whole pages of the slot"


@pytest.mark.parametrize("used", [True, False])
def test_an_adapter_that_a_request_needs_stays_in_the_engine(*, used: bool) -> None:
    requests = {"a": SimpleNamespace(lora_request=None)}
    if used:
        requests["b"] = SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=3))
    removed: list[int] = []
    remove = _remove_unless_used(lambda core, adapter: removed.append(adapter))
    core = SimpleNamespace(scheduler=SimpleNamespace(requests=requests))
    assert remove(core, 3) is not used
    assert removed == ([] if used else [3])
