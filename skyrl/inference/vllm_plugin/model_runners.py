"""Patches of vLLM's two model runners: logprobs of prompts by parts, and the model's own logprobs under a grammar.

The first runner (`gpu_model_runner`) is the one of CPUs, and of GPUs where it is chosen. It scores a prompt one request
at a time, into tensors that it keeps with the request. It would compute the logits of all rows of the prompt at once;
the plugin computes those of some rows at a time. The second runner (`v1.worker.gpu`) is the GPUs' default. It computes
logits of all rows of the forward pass, some rows at a time, and then takes out those of each prompt. The number of rows
is vLLM's for any vocabulary; the plugin sets it by the vocabulary.

Knows how both runners score prompts, and where they apply grammars before they sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from skyrl.inference.vllm_plugin.logprobs import PromptLogits, ScoredPrompt, part_rows, put_own, scored_prompt, unmasked


def score_prompts_of_first_runner() -> None:
    """Score prompts by parts in the first runner, and add the plugin's own scores.

    The runner computes the logits of a prompt, then the logprobs of these, then gathers some of them. Here the first
    two steps hand the hidden states on, and the third does all three for each part of the prompt.
    """
    original = GPUModelRunner._get_prompt_logprobs_dict

    def get_prompt_logprobs_dict(
        runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        if not runner.num_prompt_logprobs:
            return original(runner, hidden_states, num_scheduled_tokens)
        model, sampler = runner.model, runner.sampler
        parts = _FirstRunnerParts(runner, hidden_states, _scored_prompts(runner, num_scheduled_tokens))
        model.compute_logits, sampler.compute_logprobs = parts.keep, _hand_on
        sampler.gather_logprobs = parts.gather
        try:
            return original(runner, hidden_states, num_scheduled_tokens)
        finally:
            del model.compute_logits, sampler.compute_logprobs, sampler.gather_logprobs

    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs_dict  # type: ignore[method-assign]


def _hand_on(rows: torch.Tensor) -> torch.Tensor:
    return rows


class _FirstRunnerParts:
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


def keep_own_logprobs_of_first_runner() -> None:
    """Keep the model's own logprobs under a grammar in the first runner.

    One row of logits for each request of the batch: steps with draft tokens have more, and stay as vLLM has them.
    """
    module: Any = gpu_model_runner
    apply_grammar, sample = module.apply_grammar_bitmask, GPUModelRunner._sample

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


Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Asked:
    """A request for prompt logprobs. `prompt` is made when the size of the vocabulary is known, with the first logits;
    it stays None when the request does not ask for scores of the plugin."""

    params: SamplingParams
    is_read: bool = False
    prompt: ScoredPrompt | None = None


@dataclass(frozen=True)
class _Part:
    """The part of a prompt that one forward pass computes: `rows` of the pass, of which the first is the prompt's row
    `position`."""

    asked: _Asked
    rows: range
    position: int
    prompt_tokens: int


def score_prompts_of_second_runner() -> None:
    """Score prompts by parts in the second runner, and add the plugin's own scores."""
    worker: Any = PromptLogprobsWorker
    add_request, remove_request = worker.add_request, worker.remove_request
    compute_prompt_logprobs = worker.compute_prompt_logprobs
    compute_prompt_token_id_logprobs = worker.compute_prompt_token_id_logprobs

    def add(worker: Any, req_id: str, req_idx: int, sampling_params: SamplingParams) -> None:
        add_request(worker, req_id, req_idx, sampling_params)
        if sampling_params.prompt_logprobs is not None:
            _asked_of(worker)[req_id] = _Asked(sampling_params)

    def remove(worker: Any, req_id: str) -> None:
        remove_request(worker, req_id)
        _asked_of(worker).pop(req_id, None)

    def compute(
        worker: Any,
        logits_fn: Logits,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        asked = _asked_of(worker)
        parts = _parts(asked, input_batch, prompt_lens)
        logits_of = PromptLogits(logits_fn, hidden_states)
        if asked:
            _set_rows_at_a_time(worker, logits_of, hidden_states)

        def compute_and_score(rows: torch.Tensor) -> torch.Tensor:
            logits = logits_of(rows)
            for part in parts:
                _score(part, logits, logits_of.start)
            return logits

        answers = compute_prompt_logprobs(
            worker, compute_and_score, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
        )
        return {name: _with_scores(own, asked[name].prompt) for name, own in answers.items()}

    def compute_token_ids(worker: Any, logits_fn: Logits, hidden_states: torch.Tensor, *args: Any) -> Any:
        logits_of = PromptLogits(logits_fn, hidden_states)
        if worker.token_id_scores:
            _set_rows_at_a_time(worker, logits_of, hidden_states)
        return compute_prompt_token_id_logprobs(worker, logits_of, hidden_states, *args)

    worker.add_request, worker.remove_request = add, remove
    worker.compute_prompt_logprobs, worker.compute_prompt_token_id_logprobs = compute, compute_token_ids


def _set_rows_at_a_time(worker: Any, logits_of: Logits, hidden_states: torch.Tensor) -> None:
    """Let vLLM compute logits of one part at a time. The worker does not know the vocabulary, so the first call
    computes the logits of one row."""
    if "skyrl_vocabulary" not in worker.__dict__:
        worker.skyrl_vocabulary = logits_of(hidden_states[:1]).shape[1]
        prompt_logprob.CHUNK_SIZE = part_rows(worker.skyrl_vocabulary)


def _asked_of(worker: Any) -> dict[str, _Asked]:
    return worker.__dict__.setdefault("skyrl_asked", {})


def _parts(asked: dict[str, _Asked], batch: InputBatch, prompt_lens: np.ndarray) -> list[_Part]:
    """The prompts in this forward pass whose rows still have logprobs to compute. After a preemption vLLM computes the
    prompt again; if its logprobs were complete before, it does not answer them again."""
    parts = []
    for i, name in enumerate(batch.req_ids):
        tokens = int(prompt_lens[batch.idx_mapping_np[i]])
        position = int(batch.num_computed_prefill_tokens_np[i])
        count = min(int(batch.num_scheduled_tokens[i]), tokens - 1 - position)
        if name in asked and count > 0 and tokens >= batch.prefill_len_np[i]:
            first = int(batch.query_start_loc_np[i])
            parts.append(_Part(asked[name], range(first, first + count), position, tokens))
    return parts


def _score(part: _Part, logits: torch.Tensor, start: int) -> None:
    """Add the scores of the rows that are both in `part` and in `logits` [rows, vocabulary], of which the first is the
    row `start` of the pass."""
    asked = part.asked
    if not asked.is_read:
        asked.is_read = True
        asked.prompt = scored_prompt(
            asked.params.extra_args,
            part.prompt_tokens,
            vocab_size=logits.shape[1],
            columns=1,
            temperature=asked.params.temperature,
        )
    first, last = max(part.rows.start, start), min(part.rows.stop, start + logits.shape[0])
    if asked.prompt is None or first >= last:
        return
    asked.prompt.continued_at(part.position + first - part.rows.start)
    asked.prompt.add(logits[first - start : last - start].log_softmax(dim=-1, dtype=torch.float32))


def _with_scores(own: LogprobsTensors, prompt: ScoredPrompt | None) -> LogprobsTensors:
    """vLLM's logprobs of a prompt with the plugin's rows after them, repeated in each of vLLM's columns."""
    if prompt is None:
        return own
    first = prompt.own_rows
    ids = prompt.token_ids[first:].to(own.logprob_token_ids).expand(-1, own.logprobs.shape[1])
    logprobs = prompt.logprobs[first:].to(own.logprobs).expand(-1, own.logprobs.shape[1])
    ranks = prompt.ranks[first:].to(own.selected_token_ranks)
    return LogprobsTensors.cat([own, LogprobsTensors(ids, logprobs, ranks)])


def keep_own_logprobs_of_second_runner() -> None:
    """Keep the model's own logprobs under a grammar in the second runner.

    One row of logits for each request of the batch: steps with draft tokens have more, and stay as vLLM has them.
    """
    apply_grammar, sample_rows = StructuredOutputsWorker.apply_grammar_bitmask, Sampler.__call__

    def apply_and_keep(worker: Any, logits: torch.Tensor, batch: Any, names: list[str], bitmask: np.ndarray) -> None:
        if names and logits.shape[0] == batch.num_reqs:
            row_of = {name: row for row, name in enumerate(batch.req_ids)}
            batch.skyrl_unmasked = unmasked(logits, [row_of[name] for name in names], bitmask)
        apply_grammar(worker, logits, batch, names, bitmask)

    def sample_with_own(sampler: Any, logits: torch.Tensor, batch: Any) -> Any:
        before = batch.__dict__.pop("skyrl_unmasked", None)
        output = sample_rows(sampler, logits, batch)
        if before is not None and output.logprobs_tensors is not None:
            temperatures = sampler.sampling_states.temperature.gpu[batch.idx_mapping]
            put_own(output.logprobs_tensors, before, temperatures, sampler.logprobs_mode)
        return output

    StructuredOutputsWorker.apply_grammar_bitmask = apply_and_keep  # type: ignore[method-assign]
    Sampler.__call__ = sample_with_own  # type: ignore[method-assign]
