"""Prompt logprobs in both of vLLM's model runners as GPUs use them: vLLM's own Python and maps of adapters, with its
Triton kernels replaced by torch. `tests/gpu/test_prompt_logprobs.py` runs the same on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample import sampler as sampler_module
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample import prompt_logprob
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from skyrl.inference.vllm_plugin import cuda_patches, logprobs, model_runners
    from skyrl.inference.vllm_plugin.logprobs import PromptLogits
    from skyrl.inference.vllm_plugin.protocol import PromptScores

WIDTH, VOCAB, RANK, SLOTS = 6, 40, 2, 3
ROWS_AT_A_TIME = 4
"""Rows of which a runner computes logits at a time; with a real vocabulary some hundred."""


@dataclass
class Request:
    """One request. `adapter` is 0 for the base model; `hidden` [tokens, width] stands for the model's layers."""

    name: str
    adapter: int
    prompt: list[int]
    hidden: torch.Tensor
    params: SamplingParams
    computed: int = 0
    answer: LogprobsTensors | None = None


def ask(name: str, adapter: int, tokens: int, scores: PromptScores | None = None, top: int | None = 1) -> Request:
    """A request with a random prompt, which asks for the `top` best tokens of each position (None: no prompt
    logprobs), and for `scores`."""
    seed = torch.Generator().manual_seed(sum(map(ord, name)))
    return Request(
        name,
        adapter,
        torch.randint(VOCAB, (tokens,), generator=seed).tolist(),
        torch.randn((tokens + 8, WIDTH), generator=seed),
        SamplingParams(prompt_logprobs=top, extra_args=None if scores is None else dict(scores.to_extra_args())),
    )


class Model:
    """The unembedding and its adapters, of which `adapter` n is in slot n - 1, in vLLM's layer for GPUs."""

    def __init__(self) -> None:
        seed = torch.Generator().manual_seed(0)
        self.weight = torch.randn((VOCAB, WIDTH), generator=seed)
        self.lora_a = torch.randn((SLOTS, 1, RANK, WIDTH), generator=seed)
        self.lora_b = torch.randn((SLOTS, 1, VOCAB, RANK), generator=seed)
        config = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=False)
        self.wrapper = PunicaWrapperGPU(256, 16, torch.device("cpu"), lora_config=config)
        self.counts: list[int] = []
        """The number of rows of each call of `compute_logits`."""

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        self.counts.append(rows.shape[0])
        logits = rows @ self.weight.T
        self.wrapper.add_lora_logits(logits, rows, self.lora_a, self.lora_b, 1.0)
        return logits

    def logprobs(self, request: Request) -> torch.Tensor:
        """The right logprobs of the prompt's positions, [tokens - 1, vocabulary]."""
        weight = self.weight
        if request.adapter:
            weight = weight + self.lora_b[request.adapter - 1, 0] @ self.lora_a[request.adapter - 1, 0]
        return (request.hidden[: len(request.prompt) - 1] @ weight.T).log_softmax(-1)


@dataclass
class Batches:
    """Computes batches of requests with one of vLLM's runners."""

    second: bool
    model: Model = field(default_factory=Model)
    requests: dict[str, Request] = field(default_factory=dict)
    of_token_ids: dict[str, torch.Tensor] = field(default_factory=dict)
    """vLLM's own logprobs of token ids, [tokens - 1, ids]."""

    def __post_init__(self) -> None:
        self.worker = PromptLogprobsWorker(8, torch.device("cpu"), logprobs_mode="processed_logprobs")
        self.runner: Any = SimpleNamespace(
            num_prompt_logprobs={},
            requests={},
            lora_config=self.model.wrapper.lora_config,
            model=SimpleNamespace(compute_logits=self.model.compute_logits),
            sampler=Sampler("processed_logprobs"),
            device=torch.device("cpu"),
            model_config=SimpleNamespace(logprobs_mode="processed_logprobs", get_vocab_size=lambda: VOCAB),
            _sync_device=lambda: None,
        )

    def add(self, *requests: Request) -> None:
        for index, request in enumerate(requests, len(self.requests)):
            self.requests[request.name] = request
            self.worker.add_request(request.name, index, request.params)
            if request.params.prompt_logprobs is not None:
                self.runner.num_prompt_logprobs[request.name] = request.params.prompt_logprobs
            self.runner.requests[request.name] = SimpleNamespace(
                prompt_token_ids=request.prompt, in_progress_prompt_logprobs_cpu=None, sampling_params=request.params
            )

    def step(self, **counts: int) -> torch.Tensor:
        """Compute the next `counts` tokens of each request in one forward pass. Returns the logits from which each
        request samples."""
        batch = [self.requests[name] for name in counts]
        scheduled = np.array(list(counts.values()))
        mapping = LoRAMapping(
            tuple(int(n) for n in np.repeat([r.adapter for r in batch], scheduled)),
            tuple(r.adapter for r in batch),
            is_prefill=True,
        )
        self.model.wrapper.update_metadata(mapping, [1, 2, 3], SLOTS, VOCAB)
        starts = np.concatenate([[0], np.cumsum(scheduled)])
        parts = [r.hidden[r.computed : r.computed + n] for r, n in zip(batch, scheduled, strict=True)]
        padding = torch.full((3, WIDTH), torch.nan)
        hidden = torch.cat([*parts, padding])[: int(starts[-1])]
        sampled = self.model.compute_logits(hidden[torch.from_numpy(starts[1:] - 1)])
        answers = self._second(batch, hidden, starts) if self.second else self._first(batch, hidden, counts, starts)
        for request, n in zip(batch, scheduled, strict=True):
            request.answer = answers.get(request.name, request.answer)
            request.computed += int(n)
        return sampled

    def _first(self, batch: list[Request], hidden: torch.Tensor, counts: dict[str, int], starts: Any) -> dict[str, Any]:
        self.runner.query_start_loc = SimpleNamespace(np=starts)
        self.runner.input_batch = SimpleNamespace(req_id_to_index={r.name: i for i, r in enumerate(batch)})
        for request in batch:
            self.runner.requests[request.name].num_computed_tokens = request.computed
        model, sampler = self.runner.model, self.runner.sampler
        kept = model.compute_logits
        answers = GPUModelRunner._get_prompt_logprobs_dict(self.runner, hidden, counts)
        model.compute_logits = kept  # a real model has it in its class
        assert "gather_logprobs" not in vars(sampler)
        return answers

    def _second(self, batch: list[Request], hidden: torch.Tensor, starts: Any) -> dict[str, Any]:
        indices = np.array([list(self.requests).index(r.name) for r in batch])
        computed = np.array([r.computed for r in batch])
        prompts = torch.full((8, 64), -1)
        for index, request in enumerate(self.requests.values()):
            prompts[index, : len(request.prompt)] = torch.tensor(request.prompt)
        lengths = np.zeros(8, np.int32)
        lengths[: len(self.requests)] = [len(r.prompt) for r in self.requests.values()]
        input_batch: Any = SimpleNamespace(
            req_ids=[r.name for r in batch],
            idx_mapping=torch.from_numpy(indices),
            idx_mapping_np=indices,
            num_computed_prefill_tokens_np=computed,
            prefill_len_np=lengths[indices],
            num_scheduled_tokens=starts[1:] - starts[:-1],
            num_tokens=int(starts[-1]),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
        )
        of_states = torch.zeros(8, dtype=torch.int64)
        of_states[indices] = torch.from_numpy(computed)
        worker, compute_logits = self.worker, self.model.compute_logits
        self.of_token_ids |= worker.compute_prompt_token_id_logprobs(compute_logits, hidden, input_batch, lengths)
        return worker.compute_prompt_logprobs(compute_logits, hidden, input_batch, prompts, of_states, lengths)


def _rows_of_kernel(x: torch.Tensor, meta: tuple[Any, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of each adapter slot that a LoRA kernel computes. A real kernel would also read and write the rows that
    are not in `x`."""
    mapping, by_slot, counts, starts, slots, no_lora, _ = meta
    assert mapping.shape[0] == x.shape[0]
    for place, slot in enumerate([] if no_lora.item() else slots.tolist()):
        rows = by_slot[: x.shape[0]][int(starts[place]) : int(starts[place] + counts[place])].long()
        if slot >= 0:
            yield slot, rows[rows < x.shape[0]]


def _shrink(x: torch.Tensor, lora_a: list[torch.Tensor], y: torch.Tensor, *meta_and_scale: Any) -> None:
    y.zero_()
    for slot, rows in _rows_of_kernel(x, meta_and_scale[:-1]):
        y[0, rows] = meta_and_scale[-1] * x[rows] @ lora_a[0][slot, 0].T


def _expand(x: torch.Tensor, lora_b: list[torch.Tensor], y: torch.Tensor, *meta: Any, add_inputs: bool) -> None:
    assert add_inputs
    for slot, rows in _rows_of_kernel(x[0], meta):
        y[rows] += x[0, rows] @ lora_b[0][slot, 0].T


def _next_tokens(
    count: int, starts: torch.Tensor, states: torch.Tensor, computed: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    spans = zip(states.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    parts = [tokens[s, int(computed[s]) + 1 :][: last - first] for s, first, last in spans]
    assert sum(map(len, parts)) == count
    return torch.cat(parts)


def _top_scores(logits: torch.Tensor, count: int, tokens: torch.Tensor, *, logits_mode: bool) -> LogprobsTensors:
    assert not logits_mode
    logprobs = logits.float().log_softmax(-1)
    tokens = tokens.clamp_min(0)[:, None]  # the token after a prompt is not known yet
    ids = torch.cat([tokens, logprobs.topk(count).indices], dim=1)
    own = logprobs.gather(1, tokens)
    return LogprobsTensors(ids, logprobs.gather(1, ids), (logprobs >= own).sum(1))


@pytest.fixture(params=[False, True], ids=["first", "second"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Batches:
    """vLLM's runners and LoRA layer with the plugin, and without Triton."""
    for name in ("add_request", "remove_request", "compute_prompt_logprobs", "compute_prompt_token_id_logprobs"):
        monkeypatch.setattr(PromptLogprobsWorker, name, getattr(PromptLogprobsWorker, name))
    monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", GPUModelRunner._get_prompt_logprobs_dict)
    monkeypatch.setattr(PunicaWrapperGPU, "add_lora_logits", PunicaWrapperGPU.add_lora_logits)
    for name, value in (("LoRAKernelMeta", LoRAKernelMeta), ("lora_shrink", _shrink), ("lora_expand", _expand)):
        monkeypatch.setattr(punica_gpu, name, value, raising=False)
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", _next_tokens)
    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", _top_scores)
    monkeypatch.setattr(prompt_logprob, "compute_token_logprobs", lambda x, ids: x.log_softmax(-1).gather(1, ids))
    monkeypatch.setattr(prompt_logprob, "CHUNK_SIZE", prompt_logprob.CHUNK_SIZE)
    monkeypatch.setattr(logprobs, "PART_LOGITS", ROWS_AT_A_TIME * VOCAB)
    monkeypatch.setattr(sampler_module, "batched_count_greater_than", lambda x, values: (x >= values).sum(-1))
    model_runners.score_prompts_of_first_runner()
    model_runners.score_prompts_of_second_runner()
    cuda_patches.correct_prompt_logits()
    return Batches(request.param)


def scores(cells: dict[int, list[int]], draws: int = 0) -> PromptScores:
    """Named tokens by row, and draws in every row."""
    rows = [row for row, ids in cells.items() for _ in ids]
    ids = [each for ids in cells.values() for each in ids]
    return PromptScores(np.asarray(rows, np.int32), np.asarray(ids, np.int32), draws, seed=5)


def check(model: Model, request: Request, asked: PromptScores | None = None) -> None:
    """The answer has the right logprobs: of the prompt's own tokens, of the best, and the plugin's rows after them."""
    assert request.answer is not None
    ids, found, _ = request.answer[:3]
    right, own = model.logprobs(request), len(request.prompt) - 1
    assert ids[:own, 0].tolist() == request.prompt[1:]
    torch.testing.assert_close(found[:own], right.gather(1, ids[:own].long()))
    assert ids[:own, 1].tolist() == right.argmax(1).tolist()
    if asked is None:
        assert len(ids) == own
        return
    assert (
        len(ids) == len(found) == len(request.answer.selected_token_ranks) == own + asked.appended(len(request.prompt))
    )
    cells = len(asked.rows)
    assert ids[own : own + cells, 0].tolist() == asked.ids.tolist()
    rows = torch.cat([torch.from_numpy(asked.rows), torch.arange(own).repeat_interleave(asked.draws)]).long()
    torch.testing.assert_close(found[own:, 0], right[rows, ids[own:, 0].long()])
    assert (ids[own:] == ids[own:, :1]).all()


def test_each_row_of_a_prompt_has_the_part_of_its_own_adapter(batches: Batches) -> None:
    base, one, other = ask("base", 0, 9), ask("one", 1, 7), ask("other", 3, 6)
    batches.add(base, one, other)
    batches.step(base=9, one=7, other=6)
    for request in (base, one, other):
        check(batches.model, request)


def test_a_prompt_of_any_length_has_logits_of_a_few_rows_at_a_time(batches: Batches) -> None:
    """All logits of 1,000 tokens of a vocabulary of 262k are 1 GB, and their logprobs as much again."""
    wanted = scores({0: [1], 20: [2], 40: [3]}, draws=1)
    long, other = ask("long", 2, 43, wanted, top=2), ask("other", 0, 13)
    batches.add(long, other)
    batches.step(long=30, other=13)
    batches.step(long=13)
    check(batches.model, long, wanted)
    check(batches.model, other)
    assert max(batches.model.counts) == ROWS_AT_A_TIME
    assert sum(batches.model.counts) >= 42 + 12


def test_ranks_and_best_tokens_do_not_depend_on_the_parts(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = scores({7: [1, 2]}, draws=2)
    parts, whole = ask("x", 1, 19, wanted, top=3), ask("x", 1, 19, wanted, top=3)
    batches.add(parts)
    batches.step(x=19)
    monkeypatch.setattr(logprobs, "PART_LOGITS", 19 * VOCAB)
    at_once = Batches(batches.second)
    at_once.add(whole)
    at_once.step(x=19)
    assert max(at_once.model.counts) >= 18 > ROWS_AT_A_TIME == max(batches.model.counts)
    assert parts.answer is not None
    assert whole.answer is not None
    for part, one in zip(parts.answer[:3], whole.answer[:3], strict=True):
        torch.testing.assert_close(part, one, rtol=0, atol=1e-6)


def test_logits_that_are_sampled_from_are_vllms_own(batches: Batches) -> None:
    one, other = ask("one", 1, 7), ask("other", 0, 5)
    batches.add(one, other)
    sampled = batches.step(one=6, other=4)
    right = torch.stack([batches.model.logprobs(one)[5], batches.model.logprobs(other)[3]])
    torch.testing.assert_close(sampled.log_softmax(-1), right)


def test_parts_of_prompts_beside_requests_that_sample(batches: Batches) -> None:
    """A prompt in parts, of which one ends right before its last token; other requests come and sample meanwhile."""
    wanted = scores({0: [3], 5: [1, 1, 39], 8: [0]}, draws=2)
    long, samples, late = ask("long", 2, 10, wanted), ask("samples", 1, 4, top=None), ask("late", 3, 5)
    batches.add(samples, long, late)
    batches.step(samples=4, long=3)
    batches.step(samples=1, long=6)
    assert long.answer is None
    batches.step(samples=1, late=5, long=1)
    check(batches.model, long, wanted)
    check(batches.model, late)
    assert samples.answer is None


def test_scores_of_several_prompts_in_one_pass(batches: Batches) -> None:
    wanted = {"a": scores({0: [1], 4: [2, 3]}), "b": scores({}, draws=3), "c": scores({2: [7]}, draws=1)}
    requests = [ask(name, adapter, 6, wanted[name], top=2) for adapter, name in enumerate(wanted)]
    plain = ask("plain", 1, 8)
    batches.add(*requests[:2], plain, requests[2])
    batches.step(a=6, b=6, plain=8, c=6)
    for request in requests:
        check(batches.model, request, wanted[request.name])
    check(batches.model, plain)


def test_draws_do_not_depend_on_the_parts_of_a_prompt(batches: Batches) -> None:
    wanted = scores({}, draws=4)
    whole, parts = ask("x", 1, 9, wanted), ask("x", 1, 9, wanted)
    batches.add(whole)
    batches.step(x=9)
    batches.add(parts)
    batches.step(x=4)
    batches.step(x=5)
    assert whole.answer is not None
    assert parts.answer is not None
    assert len(whole.answer.logprob_token_ids) == 8 + wanted.appended(9)
    assert torch.equal(whole.answer.logprob_token_ids, parts.answer.logprob_token_ids)


def test_a_prompt_that_vllm_computes_again_from_its_start_has_all_scores(batches: Batches) -> None:
    wanted = scores({0: [1], 6: [2]}, draws=1)
    request = ask("again", 2, 8, wanted)
    batches.add(request)
    batches.step(again=5)
    request.computed = 0
    if batches.second:  # which forgets a request that is preempted; the first runner keeps it
        batches.worker.remove_request("again")
        batches.worker.add_request("again", 0, request.params)
    batches.step(again=8)
    check(batches.model, request, wanted)


def test_xargs_that_are_invalid_leave_vllms_own_logprobs(batches: Batches) -> None:
    request = ask("bad", 1, 5, scores({0: [VOCAB]}))
    batches.add(request)
    batches.step(bad=5)
    check(batches.model, request)


@pytest.mark.parametrize("batches", [True], indirect=True)
def test_vllms_own_scores_of_token_ids_have_the_part_of_the_right_adapter(batches: Batches) -> None:
    """`prompt_logprob_token_ids`, which only the second runner has."""
    requests = [ask(name, adapter, 7, top=None) for adapter, name in enumerate(("base", "one", "two"))]
    wanted = np.random.default_rng(0).integers(0, VOCAB, (6, 2))
    for request in requests:
        request.params.prompt_logprob_token_ids = wanted
    batches.add(*requests)
    batches.step(base=7, one=7, two=7)
    for request in requests:
        right = batches.model.logprobs(request).gather(1, torch.from_numpy(wanted))
        torch.testing.assert_close(batches.of_token_ids[request.name], right)


REGISTERED = """
import gc
gc.disable()  # the imports make millions of objects, and no garbage
import vllm.platforms
vllm.platforms.current_platform.is_cpu = lambda: False
vllm.platforms.current_platform.is_cuda_alike = lambda: True
from skyrl.inference.vllm_plugin import register
register()
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
patched = (PunicaWrapperGPU.add_lora_logits, GPUModelRunner._get_prompt_logprobs_dict,
           PromptLogprobsWorker.compute_prompt_logprobs)
print(*(each.__module__ for each in patched))
"""


@pytest.mark.slow
def test_on_a_gpu_the_plugin_changes_both_runners_and_the_layer_for_adapters() -> None:
    done = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    names = [f"skyrl.inference.vllm_plugin.{part}" for part in ("cuda_patches", "model_runners", "model_runners")]
    assert done.stdout.splitlines()[-1].split() == names


def test_logits_of_other_rows_than_the_passs_are_refused() -> None:
    hidden = torch.zeros((4, 2))
    with pytest.raises(RuntimeError, match="not computed from the hidden states"):
        PromptLogits(lambda rows: rows, hidden)(hidden.clone())


def test_a_pass_without_an_adapter_for_each_of_its_rows_is_refused(batches: Batches) -> None:
    """For example rows of several ranks together, as with context parallelism."""
    request = ask("one", 1, 6)
    batches.add(request)
    batches.step(one=5)
    whole = torch.zeros((6, WIDTH))
    with pytest.raises(RuntimeError, match="logits of 6 rows, but the batch has adapters for 5"):
        PromptLogits(batches.model.compute_logits, whole)(whole)
