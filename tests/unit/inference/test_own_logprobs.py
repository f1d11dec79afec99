"""Logprobs under a grammar in both of vLLM's model runners: the model's own, and a mark. The second runner, which needs
a GPU, has its kernels replaced by torch; the first one's sampler is vLLM's."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.sample import sampler as second_sampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    from skyrl.inference.vllm_plugin import model_runners
    from skyrl.inference.vllm_plugin.logprobs import unmasked

VOCAB = 70
NAMES = ["free", "greedy", "warm", "open"]
TEMPERATURES = torch.tensor([1.0, 0.0, 0.5, 1.0])
GRAMMAR = ["warm", "open", "greedy"]
"""The requests that have a grammar, in the order of the scheduler; that of "open" forbids nothing."""
ALLOWED = {"greedy": [3], "warm": [4, 5], "open": range(VOCAB)}


def bitmask() -> np.ndarray:
    """As the scheduler sends it; bits behind the vocabulary may be anything."""
    rows = np.zeros((len(GRAMMAR), 3), np.uint32)
    for row, name in enumerate(GRAMMAR):
        for token in ALLOWED[name]:
            rows[row, token // 32] |= np.uint32(1 << token % 32)
    return rows.view(np.int32)


def mask(logits: torch.Tensor) -> None:
    for name, allowed in ALLOWED.items():
        forbidden = [token for token in range(VOCAB) if token not in allowed]
        logits[NAMES.index(name), forbidden] = -torch.inf


def logits_of_a_step() -> torch.Tensor:
    return torch.randn((len(NAMES), VOCAB), generator=torch.Generator().manual_seed(7)) * 3


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step of the first runner: logits and the grammars of some requests in, vLLM's logprobs out."""
    monkeypatch.setattr(gpu_model_runner, "apply_grammar_bitmask", lambda _, __, ___, logits: mask(logits))
    monkeypatch.setattr(
        gpu_model_runner.GPUModelRunner, "_sample", gpu_model_runner.GPUModelRunner._sample
    )  # so that it is put back
    model_runners.keep_own_logprobs_of_first_runner()
    sampler = Sampler("processed_logprobs")
    metadata: Any = SamplingMetadata(
        temperature=TEMPERATURES,
        all_greedy=False,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=2,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(0),
        presence_penalties=torch.zeros(0),
        repetition_penalties=torch.zeros(0),
        output_token_ids=[[] for _ in NAMES],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    batch = SimpleNamespace(
        req_id_to_index={name: row for row, name in enumerate(NAMES)},
        sampling_metadata=metadata,
        update_async_output_token_ids=lambda: None,
    )
    runner: Any = SimpleNamespace(sampler=sampler, input_batch=batch)

    def step(drafts: bool = False) -> LogprobsTensors:
        logits = logits_of_a_step()
        scheduled = SimpleNamespace(scheduled_spec_decode_tokens={"warm": [1]} if drafts else {})
        grammar = SimpleNamespace(structured_output_request_ids=GRAMMAR, grammar_bitmask=bitmask())
        gpu_model_runner.apply_grammar_bitmask(scheduled, grammar, batch, logits)  # type: ignore[arg-type]
        output = gpu_model_runner.GPUModelRunner._sample(runner, logits, None)
        assert "skyrl_unmasked" not in vars(batch)
        assert output.logprobs_tensors is not None
        return output.logprobs_tensors

    return step


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step of the second runner, with kernels that do what vLLM's do."""

    def apply(_: Any, logits: torch.Tensor, *__: Any) -> None:
        mask(logits)

    def sample(sampler: Any, logits: torch.Tensor, batch: Any) -> Any:
        scaled = logits / torch.where(TEMPERATURES < 1e-5, 1.0, TEMPERATURES)[:, None]
        logprobs = scaled.log_softmax(-1)
        sampled = logprobs.argmax(-1, keepdim=True)
        ids = torch.cat([sampled, logprobs.topk(2).indices], 1)
        return SimpleNamespace(
            logprobs_tensors=LogprobsTensors(ids, logprobs.gather(1, ids), torch.ones(len(NAMES), dtype=torch.int64))
        )

    monkeypatch.setattr(StructuredOutputsWorker, "apply_grammar_bitmask", apply)
    monkeypatch.setattr(second_sampler.Sampler, "__call__", sample)
    model_runners.keep_own_logprobs_of_second_runner()
    temperature = SimpleNamespace(gpu=torch.cat([torch.full((5,), 9.0), TEMPERATURES.flip(0)]))
    sampler: Any = SimpleNamespace(
        sampling_states=SimpleNamespace(temperature=temperature), logprobs_mode="processed_logprobs"
    )

    def step(drafts: bool = False) -> LogprobsTensors:
        logits = logits_of_a_step()
        count = len(NAMES) - 1 if drafts else len(NAMES)
        batch = SimpleNamespace(req_ids=NAMES, num_reqs=count, idx_mapping=torch.tensor([8, 7, 6, 5]))
        StructuredOutputsWorker.apply_grammar_bitmask(SimpleNamespace(), logits, batch, GRAMMAR, bitmask())  # type: ignore[arg-type]
        return second_sampler.Sampler.__call__(sampler, logits, batch).logprobs_tensors  # type: ignore[arg-type]

    return step


@pytest.fixture(params=["first", "second"])
def step(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_a_constrained_token_has_the_models_own_logprob_and_a_mark(step: Any) -> None:
    tensors = step()
    own = logits_of_a_step() / torch.tensor([1.0, 1.0, 0.5, 1.0])[:, None]
    own = own.log_softmax(-1)
    for row, name in enumerate(NAMES):
        sampled = int(tensors.logprob_token_ids[row, 0])
        assert sampled in ALLOWED.get(name, range(VOCAB))
        assert tensors.logprobs[row, 0] == pytest.approx(float(own[row, sampled]), abs=1e-5)
        assert (int(tensors.selected_token_ranks[row]) < 0) == (name in ("greedy", "warm"))
    ranks = tensors.selected_token_ranks
    assert torch.where(ranks < 0, ~ranks, ranks).min() >= 1
    assert own[1, 3] < -1, "under the grammar the only token would have the logprob 0"


def test_alternatives_that_the_grammar_forbids_stay_impossible(step: Any) -> None:
    tensors = step()
    (of_greedy, of_warm) = tensors.logprobs[1], tensors.logprobs[2]
    assert sorted(torch.isneginf(of_greedy).tolist()) == [False, False, True], "one token of two is allowed"
    assert not torch.isneginf(of_warm).any()


def test_a_step_with_draft_tokens_stays_as_vllm_has_it(step: Any) -> None:
    tensors = step(drafts=True)
    assert tensors.logprobs[1, 0] == 0
    assert (tensors.selected_token_ranks > 0).all()


def test_a_grammar_that_forbids_nothing_keeps_no_logits() -> None:
    rows = bitmask()[[GRAMMAR.index("open")]]
    assert unmasked(torch.zeros((4, VOCAB)), [3], rows) is None
    rows[0, VOCAB // 32] &= ~(1 << (VOCAB - 1) % 32)
    kept = unmasked(torch.zeros((4, VOCAB)), [3], rows)
    assert kept is not None, "the last token of the vocabulary"
    assert kept.rows.tolist() == [3]
