"""The prompt scores that the plugin adds to vLLM's own prompt logprobs: the contract of both sides, and the
arithmetic."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from skyrl.inference.vllm_plugin.logprobs import ScoredPrompt, draw, scored_prompt
from skyrl.inference.vllm_plugin.protocol import PromptScores

TOKENS, VOCAB = 7, 50


def make_scores(rows: list[int], ids: list[int], draws: int = 0, seed: int | None = None) -> PromptScores:
    return PromptScores(np.asarray(rows, np.int32), np.asarray(ids, np.int32), draws, seed)


def as_extra_args(scores: PromptScores) -> dict[str, Any]:
    """The scores in the form in which vLLM gets them."""
    return json.loads(json.dumps(scores.to_extra_args()))


def random_logprobs(rows: int = TOKENS - 1, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (spread * torch.randn((rows, VOCAB), generator=generator)).log_softmax(-1)


# The contract


@pytest.mark.parametrize(
    "scores",
    [
        make_scores([0, 5, 5], [49, 0, 7]),
        make_scores([], [], 3),
        make_scores([2], [2], 4, 2**63 - 1),
        make_scores([], [], 1, 0),
    ],
)
def test_the_requested_scores_arrive_unchanged(scores: PromptScores) -> None:
    arrived = PromptScores.from_extra_args(as_extra_args(scores) | {"session_id": "x"}, TOKENS, VOCAB)
    assert arrived is not None
    assert arrived.rows.tolist() == scores.rows.tolist()
    assert arrived.ids.tolist() == scores.ids.tolist()
    assert (arrived.draws, arrived.seed) == (scores.draws, scores.seed)
    assert arrived.appended(TOKENS) == len(scores.rows) + scores.draws * (TOKENS - 1)


@pytest.mark.parametrize("xargs", [None, {}, {"session_id": "x"}, {"skyrl_prompt_seed": 1}])
def test_requests_without_cells_or_draws_ask_for_no_scores(xargs: Any) -> None:
    assert PromptScores.from_extra_args(xargs, TOKENS, VOCAB) is None


@pytest.mark.parametrize(
    "xargs",
    [
        {"skyrl_prompt_cells": "?"},
        {"skyrl_prompt_cells": 7},
        {"skyrl_prompt_cells": "AAAAAA=="},
        as_extra_args(make_scores([TOKENS - 1], [0])),
        as_extra_args(make_scores([-1], [0])),
        as_extra_args(make_scores([0], [VOCAB])),
        as_extra_args(make_scores([0], [-1])),
        {"skyrl_prompt_draws": -1},
        {"skyrl_prompt_draws": "3"},
        {"skyrl_prompt_draws": 1, "skyrl_prompt_seed": -1},
        {"skyrl_prompt_draws": 1, "skyrl_prompt_seed": 1.5},
    ],
)
def test_invalid_requests_for_scores_get_none(xargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="skyrl_prompt_"):
        PromptScores.from_extra_args(xargs, TOKENS, VOCAB)
    prompt = scored_prompt(xargs, TOKENS, vocab_size=VOCAB, columns=1, temperature=1.0)
    assert prompt is None


def test_prompts_of_embeddings_get_no_scores() -> None:
    assert (
        scored_prompt(as_extra_args(make_scores([0], [0])), None, vocab_size=VOCAB, columns=1, temperature=1.0) is None
    )


# The answer


def computed_in_parts(scores: PromptScores, logprobs: torch.Tensor, *cuts: int, columns: int = 3) -> ScoredPrompt:
    """The scores of a prompt that vLLM computes in parts, which end at `cuts`."""
    prompt = scored_prompt(as_extra_args(scores), TOKENS, vocab_size=VOCAB, columns=columns, temperature=0.8)
    assert prompt is not None
    for start, end in zip((0, *cuts), (*cuts, len(logprobs)), strict=True):
        prompt.continued_at(start).add(logprobs[start:end])
    return prompt


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 5)])
def test_rows_of_cells_and_draws_follow_the_prompts_own_rows(cuts: tuple[int, ...]) -> None:
    logprobs = random_logprobs()
    scores = make_scores([5, 0, 5, 2], [3, 49, 3, 0], draws=2, seed=9)
    prompt = computed_in_parts(scores, logprobs, *cuts)
    own_rows = TOKENS - 1
    assert prompt.token_ids.shape == prompt.logprobs.shape == (own_rows + 4 + 2 * own_rows, 3)
    assert prompt.ranks.shape == (own_rows + 4 + 2 * own_rows,)
    assert prompt.logprobs[:own_rows].isnan().all()  # vLLM fills these rows
    assert (prompt.token_ids == prompt.token_ids[:, :1]).all()
    assert prompt.token_ids[own_rows : own_rows + 4, 0].tolist() == [3, 49, 3, 0]
    assert torch.equal(prompt.logprobs[own_rows : own_rows + 4, 2], logprobs[[5, 0, 5, 2], [3, 49, 3, 0]])
    drawn = prompt.token_ids[own_rows + 4 :, 0].reshape(own_rows, 2).long()
    assert torch.equal(prompt.logprobs[own_rows + 4 :, 0].reshape(own_rows, 2), logprobs.gather(1, drawn))
    assert torch.equal(drawn, computed_in_parts(scores, logprobs).token_ids[own_rows + 4 :, 0].reshape(own_rows, 2))


def test_scores_of_rows_that_were_never_computed_are_nan() -> None:
    prompt = scored_prompt(as_extra_args(make_scores([5], [3])), TOKENS, vocab_size=VOCAB, columns=1, temperature=1.0)
    assert prompt is not None
    prompt.add(random_logprobs()[:3])
    assert prompt.logprobs[TOKENS - 1].isnan().all()


def test_scores_are_complete_after_vllm_computes_a_prompt_again_from_its_start() -> None:
    logprobs, scores = random_logprobs(), make_scores([0, 5], [1, 2], draws=1, seed=3)
    prompt = scored_prompt(as_extra_args(scores), TOKENS, vocab_size=VOCAB, columns=1, temperature=1.0)
    assert prompt is not None
    prompt.add(logprobs[:4])
    prompt.continued_at(0).add(logprobs)
    assert not prompt.logprobs[TOKENS - 1 :].isnan().any()


def drawn_with(seed: int | None, k: int = 3, rows: int = TOKENS - 1) -> np.ndarray:
    prompt = ScoredPrompt(make_scores([], [], k, seed), rows + 1, 1, 1.0)
    prompt.add(random_logprobs()[:rows])
    return prompt.token_ids[rows:, 0].reshape(rows, k).numpy()


def test_draws_depend_on_the_seed_and_not_on_later_rows() -> None:
    assert (drawn_with(5) == drawn_with(5)).all()
    assert (drawn_with(5) != drawn_with(6)).any()
    assert (drawn_with(5, rows=3) == drawn_with(5)[:3]).all()
    assert (drawn_with(None, k=60) != drawn_with(None, k=60)).any()
    assert (drawn_with(5, k=60)[:, :30] != drawn_with(5, k=60)[:, 30:]).any()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Chi-square test of 20,000 draws in each of 40 rows; tokens expected less than 5 times are counted together."""
    logprobs = random_logprobs(40, spread=1.5)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((40, 20_000)))
    tokens = draw(logprobs, uniforms, temperature)
    expected = 20_000 * (logprobs.double() / temperature).softmax(-1).numpy()
    for row in range(40):
        counted = np.bincount(tokens[row].numpy(), minlength=VOCAB)
        frequent = expected[row] >= 5
        counts, means = np.append(counted[frequent], counted[~frequent].sum()), expected[row][frequent]
        means = np.append(means, max(20_000 - means.sum(), 1e-9))
        chi_square = ((counts - means) ** 2 / means)[means > 1].sum()
        degrees = (means > 1).sum() - 1
        assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_draws_of_several_rows_equal_the_draws_of_each_row_alone() -> None:
    logprobs = torch.randn((7, 100_000), generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((7, 3)))
    together = draw(logprobs, uniforms, 1.0)
    assert together.shape == (7, 3)
    for row in range(7):
        assert torch.equal(draw(logprobs[row : row + 1], uniforms[row : row + 1], 1.0)[0], together[row])


def test_draws_at_the_ends_of_the_unit_interval_are_possible_tokens() -> None:
    logprobs = torch.tensor([[-torch.inf, -0.7, -0.7, -torch.inf]])
    ends = torch.tensor([[0.0, np.nextafter(1.0, 0.0)]], dtype=torch.float64)
    assert draw(logprobs, ends, 1.0).tolist() == [[1, 2]]


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_draws_are_the_best_token(temperature: float) -> None:
    logprobs = random_logprobs()
    tokens = draw(logprobs, torch.rand((TOKENS - 1, 3), dtype=torch.float64), temperature)
    assert torch.equal(tokens, logprobs.argmax(-1, keepdim=True).expand(-1, 3))


@pytest.mark.parametrize("temperature", [1e-4, 1e300])
def test_extreme_temperatures_give_valid_tokens(temperature: float) -> None:
    tokens = draw(random_logprobs(), torch.rand((TOKENS - 1, 50), dtype=torch.float64), temperature)
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB
    assert (len(tokens.unique()) > 30) == (temperature > 1)
