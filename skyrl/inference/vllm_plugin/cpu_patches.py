"""Installs all of skyrl's changes to vLLM 0.32 on a CPU: the LoRA wrapper, prompt logprobs, routed experts, kernels of
experts, and the forked engine core.

Knows three places inside vLLM: where the platform names its LoRA wrapper, how the runner scores prompt rows, and where
the platform sets the start method of processes. The modules that it calls know other places: `punica_cpu` has the LoRA
arithmetic, `prompt_scores` the scores, `routed_experts_cpu` the routed experts, `experts_cpu` the kernels of experts.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.outputs import LogprobsTensors

from skyrl.inference.vllm_plugin.experts_cpu import choose_cpu_kernels
from skyrl.inference.vllm_plugin.prompt_scores import ScoredPrompt, scored_prompt
from skyrl.inference.vllm_plugin.routed_experts_cpu import return_routed_experts

WRAPPER = "skyrl.inference.vllm_plugin.punica_cpu.GroupedPunicaWrapperCPU"


def apply(*, fork_engine: bool) -> None:
    """Patch this process. A second call changes nothing."""
    if CpuPlatform.get_punica_wrapper() == WRAPPER:
        return
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: WRAPPER)  # type: ignore[method-assign]
    _patch_prompt_logprobs()
    return_routed_experts()
    choose_cpu_kernels()
    if fork_engine:
        _patch_start_method()


def _patch_prompt_logprobs() -> None:
    """Tell the wrapper which rows of the forward pass a prompt's logits belong to, and score the prompt.

    The runner computes logits for one request at a time, from a slice of the pass's hidden states. The slice's place in
    that tensor is the place of its rows in the batch's row-to-adapter map, also for a part of a prompt. Then the runner
    turns logits into logprobs and gathers some of them; there the plugin gathers its own.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from skyrl.inference.vllm_plugin.punica_cpu import prompt_rows

    original = CPUModelRunner._get_prompt_logprobs_dict

    def patched(runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
        scored = _scored_prompts(runner, num_scheduled_tokens)
        if not scored and not (runner.num_prompt_logprobs and runner.lora_config):
            return original(runner, hidden_states, num_scheduled_tokens)
        model, compute_logits = runner.model, runner.model.compute_logits
        sampler, gather_logprobs = runner.sampler, runner.sampler.gather_logprobs
        first, step = int(hidden_states.storage_offset()), int(hidden_states.stride(0))
        start = 0

        def compute_prompt_logits(rows: torch.Tensor) -> torch.Tensor:
            nonlocal start
            assert rows.untyped_storage().data_ptr() == hidden_states.untyped_storage().data_ptr()
            start = (int(rows.storage_offset()) - first) // step
            if not runner.lora_config:
                return compute_logits(rows)
            with prompt_rows(slice(start, start + rows.shape[0])):
                return compute_logits(rows)

        def gather_and_score(logprobs: torch.Tensor, *args: Any) -> Any:
            if (prompt := scored.get(start)) is not None:
                prompt.add(logprobs)
            return gather_logprobs(logprobs, *args)

        model.compute_logits, sampler.gather_logprobs = compute_prompt_logits, gather_and_score
        try:
            return original(runner, hidden_states, num_scheduled_tokens)
        finally:
            del model.compute_logits, sampler.gather_logprobs

    CPUModelRunner._get_prompt_logprobs_dict = patched  # type: ignore[method-assign]


def _scored_prompts(runner: Any, num_scheduled_tokens: dict[str, int]) -> dict[int, ScoredPrompt]:
    """The prompts of this forward pass that the plugin scores, by their first row in the pass.

    The scores go into the tensors that the runner keeps with a request while its prompt is computed. The runner makes
    these tensors only if the request has none yet.
    """
    scored: dict[int, ScoredPrompt] = {}
    for request_id, kept_tokens in runner.num_prompt_logprobs.items():
        if request_id not in num_scheduled_tokens:
            continue
        request = runner.requests[request_id]
        if request.in_progress_prompt_logprobs_cpu is None:
            prompt = request.skyrl_prompt = scored_prompt(
                request.sampling_params.extra_args,
                request.prompt_token_ids,
                vocab_size=runner.model_config.get_vocab_size(),
                columns=1 + kept_tokens,
                temperature=request.sampling_params.temperature,
            )
            if prompt is not None:
                request.in_progress_prompt_logprobs_cpu = LogprobsTensors(
                    prompt.token_ids, prompt.logprobs, prompt.ranks
                )
        if request.skyrl_prompt is not None:
            row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]])
            scored[row] = request.skyrl_prompt.continued_at(request.num_computed_tokens)
    return scored


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
