"""What the plugin answers beside vLLM's own prompt logprobs: the contract of both sides, and the arithmetic."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from skyrl.vllm_plugin.prompt_scores import ScoredPrompt, draw, scored_prompt
from skyrl.vllm_plugin.xargs import PromptScores

TOKENS, VOCAB = 7, 50


def asked(rows: list[int], ids: list[int], draws: int = 0, seed: int | None = None) -> PromptScores:
    return PromptScores(np.asarray(rows, np.int32), np.asarray(ids, np.int32), draws, seed)


def sent(scores: PromptScores) -> dict[str, Any]:
    """As vLLM gets it."""
    return json.loads(json.dumps(scores.to_xargs()))


def random_logprobs(rows: int = TOKENS - 1, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (spread * torch.randn((rows, VOCAB), generator=generator)).log_softmax(-1)


# The contract


@pytest.mark.parametrize(
    "scores",
    [asked([0, 5, 5], [49, 0, 7]), asked([], [], 3), asked([2], [2], 4, 2**63 - 1), asked([], [], 1, 0)],
)
def test_what_is_asked_arrives(scores: PromptScores) -> None:
    arrived = PromptScores.from_xargs(sent(scores) | {"session_id": "x"}, TOKENS, VOCAB)
    assert arrived is not None
    assert arrived.rows.tolist() == scores.rows.tolist()
    assert arrived.ids.tolist() == scores.ids.tolist()
    assert (arrived.draws, arrived.seed) == (scores.draws, scores.seed)
    assert arrived.appended(TOKENS) == len(scores.rows) + scores.draws * (TOKENS - 1)


@pytest.mark.parametrize("xargs", [None, {}, {"session_id": "x"}, {"skyrl_prompt_seed": 1}])
def test_others_ask_for_nothing(xargs: Any) -> None:
    assert PromptScores.from_xargs(xargs, TOKENS, VOCAB) is None


@pytest.mark.parametrize(
    "xargs",
    [
        {"skyrl_prompt_cells": "?"},
        {"skyrl_prompt_cells": 7},
        {"skyrl_prompt_cells": "AAAAAA=="},
        sent(asked([TOKENS - 1], [0])),
        sent(asked([-1], [0])),
        sent(asked([0], [VOCAB])),
        sent(asked([0], [-1])),
        {"skyrl_prompt_draws": -1},
        {"skyrl_prompt_draws": "3"},
        {"skyrl_prompt_draws": 1, "skyrl_prompt_seed": -1},
        {"skyrl_prompt_draws": 1, "skyrl_prompt_seed": 1.5},
    ],
)
def test_what_cannot_be_answered_is_left_alone(xargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="skyrl_prompt_"):
        PromptScores.from_xargs(xargs, TOKENS, VOCAB)
    made = scored_prompt(xargs, list(range(TOKENS)), vocab_size=VOCAB, columns=1, temperature=1.0)
    assert made is None


def test_prompts_of_embeddings_are_left_alone() -> None:
    assert scored_prompt(sent(asked([0], [0])), None, vocab_size=VOCAB, columns=1, temperature=1.0) is None


# The answer


def scored(scores: PromptScores, logprobs: torch.Tensor, *cuts: int, columns: int = 3) -> ScoredPrompt:
    """With the prompt computed in parts that end at `cuts`."""
    made = scored_prompt(sent(scores), [0] * TOKENS, vocab_size=VOCAB, columns=columns, temperature=0.8)
    assert made is not None
    for start, end in zip((0, *cuts), (*cuts, len(logprobs)), strict=True):
        made.continued_at(start).add(logprobs[start:end])
    return made


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 5)])
def test_cells_and_draws_stand_after_the_prompts_own_rows(cuts: tuple[int, ...]) -> None:
    logprobs = random_logprobs()
    scores = asked([5, 0, 5, 2], [3, 49, 3, 0], draws=2, seed=9)
    made = scored(scores, logprobs, *cuts)
    own = TOKENS - 1
    assert made.token_ids.shape == made.logprobs.shape == (own + 4 + 2 * own, 3)
    assert made.ranks.shape == (own + 4 + 2 * own,)
    assert made.logprobs[:own].isnan().all()  # vLLM's
    assert (made.token_ids == made.token_ids[:, :1]).all()
    assert made.token_ids[own : own + 4, 0].tolist() == [3, 49, 3, 0]
    assert torch.equal(made.logprobs[own : own + 4, 2], logprobs[[5, 0, 5, 2], [3, 49, 3, 0]])
    drawn = made.token_ids[own + 4 :, 0].reshape(own, 2).long()
    assert torch.equal(made.logprobs[own + 4 :, 0].reshape(own, 2), logprobs.gather(1, drawn))
    assert torch.equal(drawn, scored(scores, logprobs).token_ids[own + 4 :, 0].reshape(own, 2))


def test_rows_never_computed_are_not_numbers() -> None:
    made = scored_prompt(sent(asked([5], [3])), [0] * TOKENS, vocab_size=VOCAB, columns=1, temperature=1.0)
    assert made is not None
    made.add(random_logprobs()[:3])
    assert made.logprobs[TOKENS - 1].isnan().all()


def test_a_prompt_that_vllm_computes_again_from_its_start() -> None:
    logprobs, scores = random_logprobs(), asked([0, 5], [1, 2], draws=1, seed=3)
    made = scored_prompt(sent(scores), [0] * TOKENS, vocab_size=VOCAB, columns=1, temperature=1.0)
    assert made is not None
    made.add(logprobs[:4])
    made.continued_at(0).add(logprobs)
    assert not made.logprobs[TOKENS - 1 :].isnan().any()


def drawn_with(seed: int | None, k: int = 3, rows: int = TOKENS - 1) -> np.ndarray:
    made = ScoredPrompt(asked([], [], k, seed), rows + 1, 1, 1.0)
    made.add(random_logprobs()[:rows])
    return made.token_ids[rows:, 0].reshape(rows, k).numpy()


def test_draws_are_repeatable_by_seed_and_do_not_depend_on_what_follows() -> None:
    assert (drawn_with(5) == drawn_with(5)).all()
    assert (drawn_with(5) != drawn_with(6)).any()
    assert (drawn_with(5, rows=3) == drawn_with(5)[:3]).all()
    assert (drawn_with(None, k=60) != drawn_with(None, k=60)).any()
    assert (drawn_with(5, k=60)[:, :30] != drawn_with(5, k=60)[:, 30:]).any()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Chi-square of 20,000 draws in each of 40 rows."""
    logprobs = random_logprobs(40, spread=1.5)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((40, 20_000)))
    tokens = draw(logprobs, uniforms, temperature)
    expected = 20_000 * (logprobs.double() / temperature).softmax(-1).numpy()
    for row in range(40):
        counted = np.bincount(tokens[row].numpy(), minlength=VOCAB)
        often = expected[row] >= 5
        counts, means = np.append(counted[often], counted[~often].sum()), expected[row][often]
        means = np.append(means, max(20_000 - means.sum(), 1e-9))
        chi_square = ((counts - means) ** 2 / means)[means > 1].sum()
        degrees = (means > 1).sum() - 1
        assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_large_vocabularies_are_computed_in_blocks() -> None:
    logprobs = torch.randn((7, 100_000), generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((7, 3)))
    together = draw(logprobs, uniforms, 1.0)
    assert together.shape == (7, 3)
    for row in range(7):
        assert torch.equal(draw(logprobs[row : row + 1], uniforms[row : row + 1], 1.0)[0], together[row])


def test_the_ends_of_the_unit_interval() -> None:
    logprobs = torch.tensor([[-torch.inf, -0.7, -0.7, -torch.inf]])
    ends = torch.tensor([[0.0, np.nextafter(1.0, 0.0)]], dtype=torch.float64)
    assert draw(logprobs, ends, 1.0).tolist() == [[1, 2]]


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_draws_are_the_best_token(temperature: float) -> None:
    logprobs = random_logprobs()
    tokens = draw(logprobs, torch.rand((TOKENS - 1, 3), dtype=torch.float64), temperature)
    assert torch.equal(tokens, logprobs.argmax(-1, keepdim=True).expand(-1, 3))


@pytest.mark.parametrize("temperature", [1e-4, 1e300])
def test_extreme_temperatures_are_numbers(temperature: float) -> None:
    tokens = draw(random_logprobs(), torch.rand((TOKENS - 1, 50), dtype=torch.float64), temperature)
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB
    assert (len(tokens.unique()) > 30) == (temperature > 1)
