"""Lets vLLM 0.32 return routed experts on a CPU, where its option `--enable-return-routed-experts` is refused.

vLLM has all parts: routers that show the experts they choose, a store of the experts of each block of the prefix cache,
and the scheduler's side, which gives each request its rows. Only the second version of its model runner calls them,
and a CPU needs the first. This module calls them from the first version, in the same order.

Knows where vLLM's runner begins a step, samples and makes its cache. Knows nothing of what the rows are used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

CONNECTOR = "skyrl_routed_experts"
"""The runner's attribute with the worker's side, or None where the option is not given."""


def return_routed_experts() -> None:
    """Patch this process."""
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
