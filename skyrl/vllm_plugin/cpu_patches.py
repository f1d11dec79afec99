"""Installs skyrl's LoRA wrapper and the forked engine core into vLLM 0.32 on a CPU.

Knows three places inside vLLM: which LoRA wrapper the platform names, how the runner asks for logits of prompt
rows, and where the platform sets the start method of processes. Knows no LoRA arithmetic (that is `punica_cpu`).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

WRAPPER = "skyrl.vllm_plugin.punica_cpu.GroupedPunicaWrapperCPU"


def apply(*, fork_engine: bool) -> None:
    """Patch this process; calling it again changes nothing."""
    if CpuPlatform.get_punica_wrapper() == WRAPPER:
        return
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: WRAPPER)  # type: ignore[method-assign]
    _patch_prompt_logprobs()
    if fork_engine:
        _patch_start_method()


def _patch_prompt_logprobs() -> None:
    """Tell the wrapper which rows of the forward pass the logits of a prompt belong to.

    The runner asks for them one request at a time, with a slice of the pass's hidden states: the slice's place
    in that tensor is the place of its rows in the batch's row-to-adapter map (a part of a prompt included).
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from skyrl.vllm_plugin.punica_cpu import prompt_rows

    original = CPUModelRunner._get_prompt_logprobs_dict

    def patched(runner: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not runner.num_prompt_logprobs or not runner.lora_config:
            return original(runner, hidden_states, *args, **kwargs)
        model, compute_logits = runner.model, runner.model.compute_logits
        first, step = int(hidden_states.storage_offset()), int(hidden_states.stride(0))

        def of_prompt(rows: torch.Tensor) -> torch.Tensor:
            assert rows.untyped_storage().data_ptr() == hidden_states.untyped_storage().data_ptr()
            start = (int(rows.storage_offset()) - first) // step
            with prompt_rows(slice(start, start + rows.shape[0])):
                return compute_logits(rows)

        model.compute_logits = of_prompt
        try:
            return original(runner, hidden_states, *args, **kwargs)
        finally:
            del model.compute_logits

    CPUModelRunner._get_prompt_logprobs_dict = patched  # type: ignore[method-assign]


def _patch_start_method() -> None:
    """Fork the engine core, as vLLM does on GPUs: importing everything twice is 40 % of the start-up time.

    vLLM forces `spawn` on CPUs, because of OpenMP threads and CPU binding of its multi-process executor. Neither
    exists here: with the `uni` executor the API server has run no parallel region before the fork.
    """
    original = CpuPlatform.check_and_update_config

    def patched(cls: type[CpuPlatform], vllm_config: Any) -> None:
        original(vllm_config)
        if vllm_config.parallel_config.distributed_executor_backend == "uni":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(patched)  # type: ignore[method-assign]
