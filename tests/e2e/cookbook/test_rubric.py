"""The cookbook's recipe with a judge: another model of the same server grades the answers, which gives the reward.

The judge gives 1 to an answer with the right colour and 0 to others. The policy guesses one of four colours at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer
from tests.environments import ROOT, environment
from tests.servers import ready

from ..conftest import ALIAS
from . import tasks
from .agreement import AGREE, assert_rises, divergence
from .judge import make_judge
from .workspace import Workspace, serve_command

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

JUDGE = "Qwen/Qwen3.6-35B-A3B"
"""The judge's name, which is also the recipe's default."""


@pytest.fixture(scope="module")
def judge(tools: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The judge's files."""
    pairs = [(chat_prompt(asked), said) for asked, said in tasks.prompts(tools.root / "lessons" / "judge.jsonl")]
    directory = tmp_path_factory.mktemp("judge") / "model"
    make_judge(pairs, directory)
    return directory


@pytest.fixture(scope="module")
def judged(judge: Path, tools: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace on a server with a policy, which trains, and a judge. One model is both, under two names."""
    names = (ALIAS, JUDGE)
    flags = ["--base-model", str(judge), *(part for name in names for part in ("--served-model-name", name))]
    python = environment(ROOT / "requirements" / "cookbook.txt")
    root = tmp_path_factory.mktemp("judged")
    with ready(DemoServer(root / "server", *flags)) as server:
        made = Workspace(root / "cookbook", python, server.url, judge, names, serve_command(*names))
        (made.root / "lessons").symlink_to(tools.root / "lessons")
        yield made


def test_a_judge_on_the_same_server_teaches_the_policy_what_it_rewards(judged: Workspace) -> None:
    item = {
        "rubric_str": tasks.RUBRIC,
        "extraction_regex": r"(\d)",
        "grader_output_format_instruction": tasks.GRADES,
    }
    rows = [
        {"convo": [{"role": "user", "content": tasks.question(animal)}], "rubric_items": [item]}
        for animal in tasks.ANIMALS
    ]
    for split, copies in (("train", 8), ("test", 1)):
        tasks.write_rows(judged.root / "rubric" / f"{split}.jsonl", rows * copies)
    lesson = judged.taught("colours", "rubric-lesson", "batch_size=8")
    data = ("train_jsonl_path=rubric/train.jsonl", "test_jsonl_path=rubric/test.jsonl")
    graded = (f"grader_llm_name={JUDGE}", "grader_renderer_name=qwen3_instruct", "renderer_name=qwen3_instruct")
    sizes = ("groups_per_batch=4", "train_group_size=8", "max_tokens=8", "eval_every=0")
    learns = ("loss_fn=cispo", "learning_rate=3e-3", "max_steps=8")
    run = judged.run("rubric.train", "rubric", lesson.as_start, *data, *graded, *sizes, *learns)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 8
    score = run.column("env/all/rubric_score")
    assert 0 < score[0] < 0.8
    assert_rises(score, 0.25)
    run.shows(
        "the judge's score rises; sampler and trainer agree",
        data="rows with `convo` and `rubric_items`",
        before=[lesson.command],
        score=score,
        divergence=divergence(run),
    )
