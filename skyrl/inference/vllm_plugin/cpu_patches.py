"""Installs skyrl's changes to vLLM 0.32 that a CPU needs: the LoRA wrapper, routed experts, kernels of experts,
routers, rotary embeddings, memory, the look at a model's class, and the forked engine core.

Knows three places inside vLLM: where the platform names its LoRA wrapper, where it sets the start method of processes,
and where the registry of models looks at a class. The modules that it calls know other places: `punica_cpu` has the
LoRA arithmetic, `routed_experts_cpu` the routed experts, `experts_cpu` the kernels of experts, `routers_cpu` the
routers, `rotary_cpu` the rotary embeddings, `memory_cpu` and `unloaded_adapters` what takes memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

from skyrl.inference.vllm_plugin.experts_cpu import choose_cpu_kernels
from skyrl.inference.vllm_plugin.memory_cpu import take_what_is_used
from skyrl.inference.vllm_plugin.rotary_cpu import turn_all_heads
from skyrl.inference.vllm_plugin.routed_experts_cpu import return_routed_experts
from skyrl.inference.vllm_plugin.routers_cpu import route_without_groups
from skyrl.inference.vllm_plugin.unloaded_adapters import remove_unloaded

WRAPPER = "skyrl.inference.vllm_plugin.punica_cpu.GroupedPunicaWrapperCPU"


def apply(*, fork_engine: bool) -> None:
    """Patch this process. A second call changes nothing."""
    if CpuPlatform.get_punica_wrapper() == WRAPPER:
        return
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: WRAPPER)  # type: ignore[method-assign]
    return_routed_experts()
    choose_cpu_kernels()
    route_without_groups()
    turn_all_heads()
    take_what_is_used()
    remove_unloaded()
    registry._run_in_subprocess = _run_here
    if fork_engine:
        _patch_start_method()


def _run_here(look: Callable[[], Any]) -> Any:
    """What a look at a model's class gives. vLLM looks in a new process, because an import could initialise CUDA. That
    process imports all of vLLM, which takes longer than the rest of a start."""
    return look()


def _patch_start_method() -> None:
    """Fork the engine core, as vLLM does on GPUs: a second import of all modules takes 40 % of the start-up time.

    vLLM forces `spawn` on CPUs, because of OpenMP threads and the CPU binding of its multi-process executor. With the
    executor `uni` neither is a problem: the API server has run no parallel region before the fork.
    """
    original = CpuPlatform.check_and_update_config

    def patched(cls: type[CpuPlatform], vllm_config: Any) -> None:
        original(vllm_config)
        if vllm_config.parallel_config.distributed_executor_backend == "uni":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(patched)  # type: ignore[method-assign]
