"""An adapter that is unloaded leaves the engine, and its slot's memory, on a CPU.

vLLM's API server only forgets the name. The engine keeps the adapter's matrices until `max_cpu_loras` others have come,
and its slot until all others are taken: the adapters of skyrl's check at a start filled all eight slots of
Qwen2.5-0.5B, 0.7 GB, for nobody.

Knows where vLLM unloads adapters, and which requests its engine has. Knows nothing of who unloads or why.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.model_manager import LoRAModelManager
from vllm.v1.engine.core import EngineCore

from skyrl.inference.vllm_plugin.memory_cpu import forget

logger = logging.getLogger("vllm.skyrl_plugin")

AFTER_S = 10.0
"""Requests that were accepted before the name was forgotten are with the engine by then."""
AGAIN_S, ATTEMPTS = 30.0, 120
"""While requests run with the adapter, for an hour."""


def remove_unloaded() -> None:
    """Patch this process. A second call changes nothing."""
    original = OpenAIServingModels.unload_lora_adapter
    if original.__module__ == __name__:
        return

    @functools.wraps(original)
    async def unload_lora_adapter(models: Any, request: Any) -> Any:
        adapter = models.lora_requests.get(request.lora_name)
        answer = await original(models, request)
        if adapter is not None and request.lora_name not in models.lora_requests:
            task = asyncio.create_task(_remove(models.engine_client, adapter.lora_int_id))
            _TASKS.add(task)
            task.add_done_callback(_TASKS.discard)
        return answer

    unload_lora_adapter.__module__ = __name__
    OpenAIServingModels.unload_lora_adapter = unload_lora_adapter  # type: ignore[method-assign]
    EngineCore.remove_lora = _remove_unless_used(EngineCore.remove_lora)  # type: ignore[method-assign]
    LoRAModelManager._deactivate_adapter = _then_forgotten(  # type: ignore[method-assign]
        LoRAModelManager._deactivate_adapter
    )


_TASKS: set[asyncio.Task[None]] = set()


async def _remove(engine: Any, adapter: int) -> None:
    await asyncio.sleep(AFTER_S)
    try:
        for _ in range(ATTEMPTS):
            if await engine.remove_lora(adapter):
                return
            await asyncio.sleep(AGAIN_S)
    except Exception as error:  # the engine has died or is asleep: its next start has no adapters
        logger.info("adapter %s stays in the engine: %s", adapter, error)


def _remove_unless_used(original: Any) -> Any:
    """Whether the engine is without the adapter now. One that a request needs stays."""

    def remove_lora(core: Any, lora_id: int) -> bool:
        used = {each.lora_request.lora_int_id for each in core.scheduler.requests.values() if each.lora_request}
        if lora_id in used:
            return False
        original(core, lora_id)
        return True

    return remove_lora


def _then_forgotten(original: Any) -> Any:
    def deactivate(manager: Any, lora_id: int) -> None:
        held = manager.lora_index_to_id
        index = held.index(lora_id) if lora_id in held else None
        original(manager, lora_id)
        if index is not None:
            for module in manager.modules.values():
                for name in ("lora_a_stacked", "lora_b_stacked"):
                    stacked = getattr(module, name, ())
                    for slots in stacked if isinstance(stacked, tuple | list) else (stacked,):
                        forget(slots[index])

    return deactivate
