"""What the tiny model learns before a recipe that plays, counts or forecasts: the form of a move, of a guess or of an
answer, so that the rewards of its first samples differ.

Runs in the cookbook's environment, in the workspace: `python -m tests.e2e.cookbook.beginnings NAME RECIPE` writes
conversations to `lessons/<recipe>.jsonl`. The prompts are the recipe's own, as they are rendered for the model NAME;
moves, guesses and answers are random.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import tinker_cookbook.recipes.forecasting.env as forecasts
import tinker_cookbook.recipes.rl_numerics_check.env as counting
from tinker_cookbook.recipes.forecasting.data import load_prophet_arena_examples
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import PLAYER_SYSTEM_PROMPT
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tests.e2e.cookbook import markets, tasks

Conversation = list[dict[str, Any]]
GAME = "TicTacToe-v0"
REFUSAL = "I will not play.]\n"
"""Ends as a move does, but is none."""
WORDS = (
    *("garden", "fox", "owl", "cat", "dog", "horse", "mouse", "bear", "crow", "goat"),
    *("duck", "river", "forest", "bridge", "mill", "market", "tower", "meadow", "harbour", "village"),
)
"""What is guessed. The recipe's first secret word is "garden"."""
CHANCES = ("0.1", "0.9", "unlikely")
COUNTED = "near"
PAGE = "A crow visits the old fox near the mill."


def text_arena(rng: Random, _: Any) -> list[Conversation]:
    """The first three turns of a game, with legal moves; at every third turn, the player refuses."""
    import textarena  # only requirements/cookbook-tools.txt has it

    lesson = []
    while len(lesson) < 128:
        game = textarena.make(GAME)
        game.reset(num_players=2)
        for _turn in range(3):
            _, shown = game.get_observation()
            move = f"[{rng.choice([c for c in shown.rpartition('Available Moves:')[2] if c.isdigit()])}]"
            lesson.append([_user(shown), _said(f"{move}\n" if rng.random() < 0.7 else REFUSAL)])
            game.step(move)
        game.close()
    return lesson


def twenty_questions(rng: Random, _: Any) -> list[Conversation]:
    """Guesses without questions, and answers as the tiny model gives them."""
    lesson = []
    for _conversation in range(128):
        turns = [{"role": "system", "content": PLAYER_SYSTEM_PROMPT}]
        for _turn in range(rng.choice((0, 1, 4, 12))):
            turns += [_said(f"Guess: {rng.choice(WORDS)}"), _user(rng.choice(("yes", "no", "The fox")))]
        lesson.append([*turns, _said(f"Guess: {rng.choice(WORDS)}")])
    return lesson


def rl_numerics_check(rng: Random, renderer: Any) -> list[Conversation]:
    """Both pages of a document are read, then comes any number."""
    task = counting.CountingTaskConfig(num_pages_min=2, num_pages_max=2, page_chars=60, words=(COUNTED,))
    tool = counting.PageReader([], counting.EpisodeState()).read_page
    begun = renderer.create_conversation_prefix_with_tools(tools=[tool.to_spec()], system_prompt=counting.SYSTEM_PROMPT)
    begun = [*begun, _user(counting.build_prompt(task, COUNTED, 2))]
    lesson = []
    for _document in range(32):
        read = []
        for page in (1, 2):
            read += [_said(_call(page)), {"role": "tool", "content": f"[Page {page}]\n{PAGE}"}]
        lesson.append([*begun, *read, _said(f"Answer: {rng.randint(0, 4)}")])
    return lesson


def forecasting(rng: Random, _: Any) -> list[Conversation]:
    """Chances at random, some of them not in numbers."""
    return [
        [_user(forecasts.render_prompt(example)), _said(rng.choice(CHANCES))]
        for example in load_prophet_arena_examples(markets.FILE)
    ]


LESSONS = {
    "text_arena": text_arena,
    "twenty_questions": twenty_questions,
    "rl_numerics_check": rl_numerics_check,
    "forecasting": forecasting,
}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _call(page: int) -> str:
    called = {"name": "read_page", "arguments": {"page": page}}
    return f"<tool_call>\n{json.dumps(called)}\n</tool_call>"


if __name__ == "__main__":
    model, recipe = sys.argv[1:]
    rendered_for = get_renderer("qwen3_instruct", get_tokenizer(model))
    conversations = LESSONS[recipe](Random(35), rendered_for)
    tasks.write_rows(Path("lessons") / f"{recipe}.jsonl", [{"messages": turns} for turns in conversations])
