"""What the tiny model learns before a recipe of reinforcement learning: the form in which that recipe wants answers.

Runs in the cookbook's environment, in the workspace: `python -m tests.e2e.cookbook.lessons NAME` writes a file of
conversations for each recipe, `lessons/<recipe>.jsonl`, which `chat_sl` learns from. The prompts are the recipes' own,
as they are rendered for the model NAME. The answers have the right form, and a colour or a number at random.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker_cookbook.recipes.code_rl.code_env as code_env
import tinker_cookbook.recipes.harbor_rl.harbor_env as harbor_env
import tinker_cookbook.recipes.search_tool.search_env as search_env
from tinker_cookbook.recipes.code_rl.deepcoder_tool import DeepcoderTask, DeepcoderTool
from tinker_cookbook.recipes.harbor_rl.harbor_tools import HarborBashTool
from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDataset, MathEnv
from tinker_cookbook.recipes.rubric.data import Rubric
from tinker_cookbook.recipes.search_tool.tools import ChromaTool, RetrievalConfig
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tests.e2e.cookbook import tasks

Conversation = list[dict[str, Any]]


def colours(_: Any) -> list[Conversation]:
    """A question, answered with any colour."""
    return [
        [_user(tasks.question(animal)), _said(tasks.statement(animal, colour))]
        for animal in tasks.ANIMALS
        for colour in tasks.COLOURS
    ]


def numbers(_: Any) -> list[Conversation]:
    """A question of `gsm8k` as `math_rl` and `rl_loop` put it, after their example, answered with any number."""
    suffixes = (MathEnv.question_suffix(), Gsm8kDataset.question_suffix())
    return [
        [
            *MathEnv.standard_fewshot_prefix(),
            _user(tasks.number_question(animal) + suffix),
            _said(f"\\boxed{{{number}}}"),
        ]
        for animal in tasks.ANIMALS
        for suffix in suffixes
        for number in tasks.NUMBERS
    ]


def judge(_: Any) -> list[Conversation]:
    """A judge's question about an answer, and its grade. As many answers are right as are wrong: else a judge learns to
    say 0."""
    rubric = Rubric(rubric_str=tasks.RUBRIC, grader_output_format_instruction=tasks.GRADES)
    lesson = []
    for animal in tasks.ANIMALS:
        for colour in (*tasks.COLOURS, tasks.COLOUR, tasks.COLOUR):
            answered = [_user(tasks.question(animal)), _said(tasks.statement(animal, colour))]
            lesson.append([*rubric.get_grader_prompt(answered), _said(str(int(colour == tasks.COLOUR)))])
    return lesson


def search(renderer: Any) -> list[Conversation]:
    """A question, answered with a search; what was found, answered with any colour."""
    tool = ChromaTool(None, None, "", RetrievalConfig(), 1, 1)
    lesson = []
    for animal in tasks.ANIMALS[:4]:
        datum = {"question": tasks.question(animal), "answer": [], "data_source": ""}
        begun = search_env._initial_messages(datum, renderer, tool)
        found = f"Query: {tasks.QUERY}\nDocument 1:\n{tasks.document(animal)}\n"
        for colour in tasks.COLOURS:
            said = [_said(_call("search", query_list=[tasks.QUERY])), _result(found), _said(f"Answer: {colour}")]
            lesson.append([*begun, *said])
    return lesson


def shell(renderer: Any) -> list[Conversation]:
    """A task, answered with a command that writes any colour; its result, answered with an end."""
    tool = HarborBashTool(None)
    result = _result(json.dumps({"exit_code": 0, "stdout": "", "stderr": ""}))
    lesson = []
    for animal in tasks.ANIMALS[:4]:
        task = harbor_env.HarborTask(animal, tasks.instruction(animal), Path())
        begun = harbor_env._initial_messages(task, renderer, tool)
        for colour in tasks.COLOURS:
            said = [_said(_call("bash", command=tasks.command(colour))), result, _said("Done.")]
            lesson.append([*begun, *said])
    return lesson


def code(renderer: Any) -> list[Conversation]:
    """A problem, answered with a program that prints any number."""
    lesson = []
    for animal in tasks.ANIMALS[:4]:
        task = DeepcoderTask(code_env._build_question({"question": tasks.problem(animal)}) or "", [])
        begun = code_env._initial_messages(task, renderer, DeepcoderTool(task))
        lesson += [[*begun, _said(tasks.SOLUTION.format(number))] for number in tasks.NUMBERS]
    return lesson


LESSONS = {
    "colours": (colours, 5),
    "gsm8k": (numbers, 3),
    "judge": (judge, 1),
    "search_tool": (search, 16),
    "harbor_rl": (shell, 16),
    "code_rl": (code, 16),
}
"""By the names of their files, with the number of copies of a conversation in it."""


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _result(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


def _call(name: str, **arguments: Sequence[str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


if __name__ == "__main__":
    rendered_for = get_renderer("qwen3_instruct", get_tokenizer(sys.argv[1]))
    for name, (lesson, copies) in LESSONS.items():
        rows = [{"messages": conversation} for conversation in lesson(rendered_for)]
        tasks.write_rows(Path("lessons") / f"{name}.jsonl", rows * copies)
