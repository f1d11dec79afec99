"""Logprobs in vLLM's first model runner (`gpu_model_runner`), which CPUs use, and GPUs where it is chosen.

Knows how this runner scores a prompt: one request at a time, into tensors that it keeps with the request. It would
compute the logits of all rows of the prompt at once; the plugin computes those of some rows at a time. And knows where
it applies grammars before it samples.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from skyrl.inference.vllm_plugin.own_logprobs import put_own, unmasked
from skyrl.inference.vllm_plugin.prompt_rows import PromptLogits, part_rows
from skyrl.inference.vllm_plugin.prompt_scores import ScoredPrompt, scored_prompt


def score_prompts() -> None:
    """Patch this process. A second call changes nothing.

    The runner computes the logits of a prompt, then the logprobs of these, then gathers some of them. Here the first
    two steps hand the hidden states on, and the third does all three for each part of the prompt.
    """
    original = GPUModelRunner._get_prompt_logprobs_dict
    if original.__module__ == __name__:
        return

    def get_prompt_logprobs_dict(
        runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        if not runner.num_prompt_logprobs:
            return original(runner, hidden_states, num_scheduled_tokens)
        model, sampler = runner.model, runner.sampler
        parts = _Parts(runner, hidden_states, _scored_prompts(runner, num_scheduled_tokens))
        model.compute_logits, sampler.compute_logprobs = parts.keep, _hand_on
        sampler.gather_logprobs = parts.gather
        try:
            return original(runner, hidden_states, num_scheduled_tokens)
        finally:
            del model.compute_logits, sampler.compute_logprobs, sampler.gather_logprobs

    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs_dict  # type: ignore[method-assign]


def _hand_on(rows: torch.Tensor) -> torch.Tensor:
    return rows


class _Parts:
    """The logprobs of the prompts of one forward pass, computed for some rows of a prompt at a time."""

    def __init__(self, runner: Any, hidden_states: torch.Tensor, scored: dict[int, ScoredPrompt]) -> None:
        """`scored`: the prompts that the plugin scores, by their first row in the pass."""
        sampler = runner.sampler
        self._logits = PromptLogits(runner.model.compute_logits, hidden_states)
        self._rows_at_a_time = part_rows(runner.model_config.get_vocab_size())
        self._gather = sampler.gather_logprobs
        takes_logits = runner.model_config.logprobs_mode in ("raw_logits", "processed_logits")
        self._scores = torch.Tensor.float if takes_logits else sampler.compute_logprobs
        self._scored = scored
        self._rows = hidden_states

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [n, width] are the hidden states of the prompt whose logprobs are gathered next."""
        self._rows = rows
        return rows

    def gather(self, _: torch.Tensor, count: int, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tokens, logprobs and ranks of the kept rows: of `token_ids` [n], and of the `count` best tokens."""
        parts = -(-self._rows.shape[0] // self._rows_at_a_time)
        # Written into tensors that are there before: small results of each part, kept until the end, would lie between
        # its freed large ones, and glibc then finds no place for the large ones of the next part.
        ids, logprobs = (token_ids.new_empty(len(token_ids), 1 + count, dtype=t) for t in (torch.int32, torch.float32))
        ranks = torch.empty_like(token_ids)
        prompt, first = None, 0
        for rows, own in zip(self._rows.tensor_split(parts), token_ids.tensor_split(parts), strict=True):
            scores = self._scores(self._logits(rows))
            prompt = prompt or self._scored.get(self._logits.start)
            if prompt is not None:
                prompt.add(scores)
            last = first + len(own)
            ids[first:last], logprobs[first:last], ranks[first:last] = self._gather(scores, count, own)[:3]
            first = last
            del scores  # before the logits of the next part
        return ids, logprobs, ranks


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
