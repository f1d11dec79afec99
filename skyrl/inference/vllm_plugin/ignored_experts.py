"""Refuses adapters whose experts vLLM 0.32 would ignore without a word.

Where `lora_target_modules` does not name experts, vLLM loads an adapter with matrices for experts, and computes without
them: samples would come from other weights than were trained.

Knows how vLLM names the parts of a loaded adapter. Knows nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.lora.worker_manager import WorkerLoRAManager


def refuse_ignored_experts() -> None:
    """Patch this process. A second call changes nothing."""
    original = WorkerLoRAManager._load_adapter
    if original.__module__ == __name__:
        return

    def load_adapter(manager: Any, lora_request: Any) -> Any:
        adapter = original(manager, lora_request)
        check_experts(adapter.loras, manager._adapter_manager)
        return adapter

    WorkerLoRAManager._load_adapter = load_adapter  # type: ignore[method-assign]


def check_experts(names: Iterable[str], manager: Any) -> None:
    """Raise ValueError if an adapter has parts for experts that vLLM adds no adapters to. `names`: of its parts;
    `manager`: vLLM's, which knows its layers with adapters."""
    for name in names:
        layer, found, _ = name.partition(".experts")
        if found and f"{layer}.experts" not in manager.modules:
            raise ValueError(
                f"the adapter changes experts ({name}), and vLLM keeps no room for adapters on them: set "
                "trainer.policy.model.lora.train_mlp_of_mixtures to train"
            )
