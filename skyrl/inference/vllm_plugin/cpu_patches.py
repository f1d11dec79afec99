"""Patches of vLLM 0.32 that a CPU needs. `patch_cpu` is their index.

Knows where the platform names its LoRA wrapper and sets the start method of processes, where the registry of models
looks at a class, and where the runner begins a step, samples, and makes slots and cache. `punica` has the arithmetic of
adapters, `experts_cpu` that of experts.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import math
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from skyrl.inference.vllm_plugin.adapters_cpu import use_adapters_in_place
from skyrl.inference.vllm_plugin.experts_cpu import choose_cpu_kernels
from skyrl.inference.vllm_plugin.slots import Slots
from skyrl.runtime.processes.host_resources import trim

WRAPPER = "skyrl.inference.vllm_plugin.punica.GroupedPunicaWrapperCPU"


def patch_cpu(*, fork_engine: bool) -> None:
    """The patches of a process on a CPU. `fork_engine`: as FORK_ENGINE_VARIABLE says."""
    correct_adapters()
    return_routed_experts()
    choose_cpu_kernels()
    route_without_groups()
    turn_all_heads()
    take_what_is_used()
    use_adapters_in_place()
    remove_unloaded()
    look_at_models_here()
    refuse_missing_kernels()
    ask_for_tiles()
    take_the_plain_latent_attention()
    if fork_engine:
        fork_the_engine()


def correct_adapters() -> None:
    """Compute adapters with `punica.GroupedPunicaWrapperCPU`."""
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: WRAPPER)  # type: ignore[method-assign]


def look_at_models_here() -> None:
    """Look at a model's class in this process. vLLM looks in a new one, because an import could initialise CUDA. That
    process imports all of vLLM, which takes longer than the rest of a start."""
    registry._run_in_subprocess = lambda look: look()


def refuse_missing_kernels() -> None:
    """Refuse weights of four bits while the model is loaded, where vLLM's build has no product with them: it would
    start, and end with the first sample."""
    can_implement = CPUWNA16LinearKernel.can_implement

    def checked(cls: type[CPUWNA16LinearKernel], config: Any) -> tuple[bool, str | None]:
        if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
            return False, "vLLM samples from weights of four bits only on a GPU or on a CPU with AVX-512"
        return can_implement(config)

    CPUWNA16LinearKernel.can_implement = classmethod(checked)  # type: ignore[method-assign,assignment]


def ask_for_tiles() -> None:
    """Ask Linux for the tiles of AMX, for this process and those that it forks, on a CPU that has them.

    vLLM 0.32.0 leaves that to oneDNN. Where another product in bfloat16 comes first, as with weights of four bits, its
    attention ends the engine core by SIGILL.
    """
    torch.cpu._init_amx()


def take_the_plain_latent_attention() -> None:
    """Compute latent attention by `CPU_MLA` on every CPU, unless the operator names another backend.

    On a CPU with AMX vLLM 0.32.0 takes `AMX_MLA` without looking at the model. It knows bfloat16 alone, and heads of a
    multiple of 32; skyrl serves models without quantized weights in float32.
    """
    original = CpuPlatform.check_and_update_config

    def patched(cls: type[CpuPlatform], vllm_config: Any) -> None:
        attention = vllm_config.attention_config
        if attention.backend is None and getattr(vllm_config.model_config, "use_mla", False):
            attention.backend = AttentionBackendEnum.CPU_MLA
        original(vllm_config)

    CpuPlatform.check_and_update_config = classmethod(patched)  # type: ignore[method-assign]


def fork_the_engine() -> None:
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


def turn_all_heads() -> None:
    """Correct the rotary embeddings of latent attention.

    vLLM's kernel for CPUs takes queries [tokens, heads * size]. Latent attention hands it views [tokens, heads, size],
    of which the kernel turns one head, and for keys rows of another stride: logprobs of DeepSeek's kind are off by
    whole nats. The plugin computes such queries in plain torch, with vLLM's own function.
    """
    original = RotaryEmbedding.forward_cpu

    def forward_cpu(
        layer: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() == 2:
            return original(layer, positions, query, key)
        return layer.forward_native(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]


def route_without_groups() -> None:
    """Serve routers with sigmoid scores and no groups, as MiniMax-M2 has them.

    vLLM's router for CPUs computes sigmoid scores and their correction bias only where experts are in groups. No groups
    are the same as one group that holds all experts.
    """
    original = CPURouter.__init__

    def initialize(router: Any, *args: Any, **kwargs: Any) -> None:
        original(router, *args, **kwargs)
        if router.scoring_func == "sigmoid" and router.custom_routing_function is None and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    CPURouter.__init__ = initialize  # type: ignore[method-assign]


CONNECTOR = "skyrl_routed_experts"
"""The runner's attribute with the worker's side, or None where the option is not given."""


def return_routed_experts() -> None:
    """Return routed experts, for which vLLM's option `--enable-return-routed-experts` is refused on a CPU.

    vLLM has all parts: routers that show the experts they choose, a store of the experts of each block of the prefix
    cache, and the scheduler's side, which gives each request its rows. Only the second version of its model runner
    calls them, and a CPU needs the first. Here the first version calls them, in the same order.
    """
    _allow_option()
    _patch_cache()
    _patch_steps()


class _AsVersion2:
    """vLLM's configuration, as if the runner were the second version, and had a prefix cache where it needs none."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config
        if not config.scheduler_config.enable_chunked_prefill:
            self.cache_config = SimpleNamespace(enable_prefix_caching=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _allow_option() -> None:
    """Keep vLLM's other checks. Refuse speculative decoding: the runner would have to tell which tokens it rejected."""
    original = VllmConfig._verify_aux_output_compatibility

    def patched(config: Any) -> None:
        original(_AsVersion2(config))  # type: ignore[arg-type]
        if config.aux_output_config.enabled and config.speculative_config is not None:
            raise ValueError("--enable-return-routed-experts is incompatible with speculative decoding on a CPU.")

    VllmConfig._verify_aux_output_compatibility = patched  # type: ignore[method-assign]


def _patch_cache() -> None:
    """The store has a place for each block of the cache, so it is made with the cache."""
    original = CPUModelRunner.initialize_kv_cache

    def patched(runner: Any, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        original(runner, kv_cache_config, is_profiling, **kwargs)
        connector = None
        if runner.vllm_config.aux_output_config.enabled and not is_profiling:
            connector = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)
            if not runner.vllm_config.cache_config.enable_prefix_caching:
                connector._publish_blocks = partial(_drop_blocks, connector)  # type: ignore[method-assign]
        setattr(runner, CONNECTOR, connector)

    CPUModelRunner.initialize_kv_cache = patched  # type: ignore[method-assign]


def _drop_blocks(connector: AuxOutputWorkerConnector, batches: Sequence[tuple[Any, Any]], *_: Any, **__: Any) -> None:
    """Forget the rows of whole blocks. vLLM keeps them for prompts that it finds in its prefix cache, or computes in
    parts; with latent attention on a CPU it does neither, and every row goes out with the step that computed it."""
    buffer: Any = connector._buffer
    for state, completed in batches:
        for _, rows in state.pending_blocks + completed:
            buffer.release_block(rows)
        state.pending_blocks = []


def _patch_steps() -> None:
    execute, sample = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector: AuxOutputWorkerConnector | None = getattr(runner, CONNECTOR, None)
        if connector is not None:
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(runner, scheduler_output, *args, **kwargs)

    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        has_step = runner.execute_model_state is not None
        output = sample(runner, *args, **kwargs)
        connector: AuxOutputWorkerConnector | None = getattr(runner, CONNECTOR, None)
        if connector is not None and has_step:
            _add_rows(connector, runner, output)
        return output

    CPUModelRunner.execute_model = execute_model  # type: ignore[method-assign]
    CPUModelRunner.sample_tokens = sample_tokens  # type: ignore[method-assign]


def _add_rows(connector: AuxOutputWorkerConnector, runner: Any, output: ModelRunnerOutput) -> None:
    """Give `output` the rows of each request that sampled a token in this step: those of its tokens since the last
    output, or of its whole prompt, also where blocks of the prefix cache had its tokens."""
    requests = runner.input_batch.num_reqs
    batch: Any = SimpleNamespace(
        req_ids=output.req_ids,
        query_start_loc_np=runner.query_start_loc.np,
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[:requests].copy(),
    )
    pending = connector.prepare_output(batch)
    if pending is None:
        return
    sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
    pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
    output.aux_output_connector_output = pending.process_output()


LEAST_BYTES = 2**16
"""Smaller tensors are left to torch."""


def take_what_is_used() -> None:
    """Let slots of adapters and the cache take the memory that is written, and give back what loading has freed.

    vLLM makes slots and cache with `torch.zeros`, which writes zeros into all of them: Qwen2.5-0.5B at a context of
    4,096 took 0.7 GB for eight slots and 1.1 GB for its cache before the first request. Pages of a new mapping are
    zeros, too, and exist from their first write on. So the slots of adapters that nobody loads take nothing, and the
    cache as much as was ever used.
    """
    for name in ("load_model", "initialize_kv_cache"):
        setattr(CPUModelRunner, name, _then_trimmed(getattr(CPUModelRunner, name)))
    for name in ("load_lora_model", "initialize_kv_cache"):
        setattr(CPUModelRunner, name, _inside(getattr(CPUModelRunner, name)))


def _then_trimmed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        trim()
        return result

    return patched


def _inside(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(runner: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        with UntouchedZeros():
            return original(runner, *args, **kwargs)

    return patched


class UntouchedZeros(TorchFunctionMode):
    """Inside, large `torch.zeros` for a CPU are mappings that nobody has written to."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.zeros and given.keys() == {"dtype", "device"} and torch.device(given["device"]).type == "cpu":
            shape = args if isinstance(args[0], int) else args[0]
            size = math.prod(shape) * given["dtype"].itemsize
            if size >= LEAST_BYTES:
                return untouched(size, given["dtype"]).view(shape)
        return func(*args, **given)


_MAPPINGS: set[int] = set()
"""Addresses of the storages of `untouched`, which live as long as the process."""
_DONTNEED = 4
"""Of madvise: pages of a private mapping are zeros again, and take no memory."""


def forget_pages(slot: torch.Tensor) -> None:
    """Give back the whole pages of a part of a tensor of `untouched`. They are zeros afterwards; nobody may rely on the
    numbers of the pages that the part shares with others. Other tensors stay as they are."""
    if slot.untyped_storage().data_ptr() in _MAPPINGS and slot.is_contiguous():
        start = -(-slot.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (slot.data_ptr() + slot.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)


def untouched(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of `size` bytes in a mapping of their own, which ends with the tensor: [elements]."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made = torch.frombuffer(pages, dtype=dtype)
    _MAPPINGS.add(made.data_ptr())
    return made


logger = logging.getLogger("vllm.skyrl_plugin")

AFTER_S = 10.0
"""Requests that were accepted before the name was forgotten are with the engine by then."""
AGAIN_S, ATTEMPTS = 30.0, 120
"""While requests run with the adapter, for an hour."""


def remove_unloaded() -> None:
    """Let an adapter that is unloaded leave the engine, and give back its slot's memory.

    vLLM's API server only forgets the name. The engine keeps the adapter's matrices until `max_cpu_loras` others have
    come, and its slot until all others are taken: the adapters of skyrl's check at a start filled all eight slots of
    Qwen2.5-0.5B, 0.7 GB, for nobody.
    """
    original = OpenAIServingModels.unload_lora_adapter

    @functools.wraps(original)
    async def unload_lora_adapter(models: Any, request: Any) -> Any:
        adapter = models.lora_requests.get(request.lora_name)
        answer = await original(models, request)
        if adapter is not None and request.lora_name not in models.lora_requests:
            task = asyncio.create_task(_remove(models.engine_client, adapter.lora_int_id))
            _TASKS.add(task)
            task.add_done_callback(_TASKS.discard)
        return answer

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
                        if isinstance(slots, Slots):
                            slots.forget(index)
                        else:
                            forget_pages(slots[index])

    return deactivate
