"""The cookbook's score of steps of reasoning: how much the probability of the answer hangs on each.

The recipe only samples from a base model. This one takes the answer from its first step, and never from its second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from skyrl.cli.demo.server import DemoServer
from tests.environments import ROOT, environment
from tests.servers import ready

from ..conftest import ALIAS
from . import second_model, tasks
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

PROBLEMS = "HuggingFaceH4/MATH-500"
DATA = f"`{PROBLEMS}`, configuration `default`: rows with `problem`, and `solution` with the answer in `\\boxed{{}}`"


@pytest.fixture
def riddles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace on a server of the second tiny model, with riddles that it solves."""
    directory = tmp_path_factory.mktemp("riddles")
    model = directory / "model"
    second_model.make(model)
    python = environment(ROOT / "requirements" / "cookbook.txt")
    flags = ("--base-model", str(model), "--served-model-name", ALIAS)
    with ready(DemoServer(directory / "server", *flags)) as server:
        made = Workspace(directory / "cookbook", python, server.url, model)
        asked = [
            {"problem": second_model.RIDDLE.format(animal), "solution": f"\\boxed{{{second_model.ANSWER}}}"}
            for animal in tasks.ANIMALS
        ]
        tasks.write_rows(made.root / PROBLEMS / "default" / "test.jsonl", asked)
        tasks.write_configurations(made.root / PROBLEMS, {"default": ["test"]})
        yield made


def test_the_step_that_the_answer_comes_from_scores_high_and_the_other_low(riddles: Workspace) -> None:
    run = riddles.run("true_thinking_score.analyze", "thinking-score", "n_problems=8", "max_tokens=64")
    solved = [json.loads(line) for line in (run.path / "tts_per_problem.jsonl").read_text().splitlines()]
    assert len(solved) == len(tasks.ANIMALS)
    assert all(problem["model_correct"] for problem in solved)
    first, second = zip(*(problem["per_step_tts"] for problem in solved), strict=True)
    assert min(first) > 0.7
    assert max(second) < 0.2
    run.shows(
        "the step that the answer comes from scores high, the other low",
        data=DATA,
        score_of_the_first_step=first,
        score_of_the_second_step=second,
    )
