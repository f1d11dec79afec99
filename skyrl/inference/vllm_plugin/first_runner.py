"""Logprobs in vLLM's first model runner (`gpu_model_runner`), which CPUs use, and GPUs where it is chosen.

Knows how this runner scores a prompt: one request at a time, into tensors that it keeps with the request; and where it
applies grammars before it samples.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from skyrl.inference.vllm_plugin.own_logprobs import put_own, unmasked
from skyrl.inference.vllm_plugin.prompt_rows import PromptLogits
from skyrl.inference.vllm_plugin.prompt_scores import ScoredPrompt, scored_prompt


def score_prompts() -> None:
    """Patch this process. A second call changes nothing.

    The runner turns the logits of a prompt into logprobs and gathers some of them; there the plugin gathers its own.
    """
    original = GPUModelRunner._get_prompt_logprobs_dict
    if original.__module__ == __name__:
        return

    def get_prompt_logprobs_dict(
        runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        if not runner.num_prompt_logprobs:
            return original(runner, hidden_states, num_scheduled_tokens)
        scored = _scored_prompts(runner, num_scheduled_tokens)
        model, sampler = runner.model, runner.sampler
        gather_logprobs = sampler.gather_logprobs
        logits = PromptLogits(model.compute_logits, hidden_states)

        def gather_and_score(logprobs: torch.Tensor, *args: Any) -> Any:
            if (prompt := scored.get(logits.start)) is not None:
                prompt.add(logprobs)
            return gather_logprobs(logprobs, *args)

        model.compute_logits, sampler.gather_logprobs = logits, gather_and_score
        try:
            return original(runner, hidden_states, num_scheduled_tokens)
        finally:
            del model.compute_logits, sampler.gather_logprobs

    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs_dict  # type: ignore[method-assign]


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
                None if request.prompt_token_ids is None else len(request.prompt_token_ids),
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


def keep_own_logprobs() -> None:
    """Patch this process (see `own_logprobs`). A second call changes nothing.

    One row of logits for each request of the batch: steps with draft tokens have more, and stay as vLLM has them.
    """
    module: Any = gpu_model_runner
    apply_grammar, sample = module.apply_grammar_bitmask, GPUModelRunner._sample
    if sample.__module__ == __name__:
        return

    def apply_and_keep(scheduled: Any, grammar: Any, batch: Any, logits: torch.Tensor) -> None:
        metadata = batch.sampling_metadata
        asked = metadata.max_num_logprobs is not None or metadata.logprob_token_ids
        if asked and not scheduled.scheduled_spec_decode_tokens:
            rows = [batch.req_id_to_index[name] for name in grammar.structured_output_request_ids]
            batch.skyrl_unmasked = unmasked(logits, rows, grammar.grammar_bitmask)
        apply_grammar(scheduled, grammar, batch, logits)

    def sample_with_own(runner: Any, logits: torch.Tensor | None, drafts: Any) -> Any:
        batch = runner.input_batch
        before = batch.__dict__.pop("skyrl_unmasked", None)
        output = sample(runner, logits, drafts)
        if before is not None and output.logprobs_tensors is not None:
            put_own(output.logprobs_tensors, before, batch.sampling_metadata.temperature, runner.sampler.logprobs_mode)
        return output

    module.apply_grammar_bitmask = apply_and_keep
    GPUModelRunner._sample = sample_with_own  # type: ignore[method-assign]
