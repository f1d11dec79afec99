"""Claude Code and Codex from npm, unmodified, as agents of a real server. `make test-agents` runs them alone.

Each runs with its server in a network namespace of its own, so that nothing leaves the machine and no figure depends on
a vendor's server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from transformers import AutoTokenizer

from skyrl.chat.openai import messages as chat_messages
from tests.agents.kinds import kept, kinds_of_codex
from tests.agents.npm_packages import CannotInstall, has_namespaces, programs
from tests.agents.scripted_vllm import ASIDE, for_template
from tests.agents.scripts import GREETING, LAST, TURNS, result_of
from tests.agents.without_network import Found

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROUTES = {"claude": "/v1/messages", "codex": "/v1/responses"}
AGENTS = tuple(ROUTES)
RUN_S = 900.0
"""How long a server may take to start on a busy machine, and an agent for its task."""


class Thirty(NamedTuple):
    directory: Path
    found: Found

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Those that the script answered."""
        return [turn for turn in self.found.turns if turn["answer"].get("content") != ASIDE.text]


@pytest.fixture(scope="module")
def installed() -> Path:
    try:
        found = programs()
    except CannotInstall as error:
        pytest.skip(str(error))
    if not has_namespaces():
        pytest.skip("needs a user who may make a network namespace (unshare -rn)")
    return found


def run(installed: Path, directory: Path, kind: str, agent: str) -> Found:
    """An agent with its server, without a network. Prints the figures; pytest shows them with `-s`."""
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    program = [sys.executable, "-m", "tests.agents.without_network", str(installed), str(directory), kind, agent]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*alone, *program], cwd=root, env=os.environ, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode((directory / "found.json").read_bytes(), type=Found)
    prompts = [turn["usage"]["prompt"] for turn in found.turns]
    forks = Counter(turn["fork"] for turn in found.turns if turn["fork"])
    print(
        f"\n{agent}, {kind}: exit code {found.exit_code}, {len(found.requests)} requests and {found.asides} aside in "
        f"{found.seconds:.1f} s, prompts of {min(prompts)} to {max(prompts)} tokens, {found.session['sampled']} "
        f"tokens sampled, {len(found.datums)} rows, forks: {dict(forks) or 'none'}"
    )
    return found


@pytest.fixture(scope="module", params=AGENTS)
def thirty(request: pytest.FixtureRequest, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Thirty:
    """A run of `TURNS` turns with the scripted model."""
    directory = tmp_path_factory.mktemp(request.param)
    return Thirty(directory, run(installed, directory, "scripted", request.param))


def test_the_kinds_of_items_are_those_of_this_codex(installed: Path) -> None:
    assert kinds_of_codex(installed / "codex") == kept().kinds, "run `make tables NEW=agents`"


@pytest.mark.vllm
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_gets_answers_from_vllm_in_its_dialect(agent: str, installed: Path, tmp_path: Path) -> None:
    found = run(installed, tmp_path, "sampled", agent)
    assert found.exit_code == 0, found.output
    answered = [request for request in found.requests if request[1] == ROUTES[agent]]
    assert len(answered) == len(found.turns) > 0
    assert {status for _, _, status in found.requests} == {200}
    assert GREETING in found.output
    for turn in found.turns:
        assert len(turn["sampled_tokens"]) == len(turn["logprobs"]) > 0
    for turn in found.turns[1:]:
        assert [message["role"] for message in turn["messages"]][0] == "tool"
        assert "hello" in str(turn["messages"][0]["content"])
    assert len(found.datums) == 1
    assert _trained(found) == found.session["sampled"]


def test_thirty_turns_run_the_agents_own_tools(thirty: Thirty) -> None:
    directory, found = thirty
    assert found.exit_code == 0, found.output
    assert LAST in found.output
    assert {status for _, _, status in found.requests} == {200}
    assert (found.scripted, len(thirty.turns)) == (TURNS, TURNS)
    assert (directory / "work" / "notes.txt").read_text() == "".join(f"note {n}\n" for n in range(TURNS - 1))
    for number, turn in enumerate(thirty.turns[1:]):
        results = [str(message["content"]) for message in turn["messages"] if message["role"] == "tool"]
        assert any(result_of(number) in result for result in results), (number, turn["messages"])


def test_all_system_messages_are_in_the_prompt(thirty: Thirty) -> None:
    """The template refuses a second one."""
    tokenizer = AutoTokenizer.from_pretrained(str(thirty.directory / "model"))
    first = thirty.turns[0]
    told = [message for message in first["messages"] if message["role"] in chat_messages.ROLES]
    prompt = tokenizer.decode(first["added_tokens"])
    assert len(told) > 1
    for message in told:
        assert tokenizer.decode(tokenizer.encode(message["content"], add_special_tokens=False)) in prompt


def test_thirty_turns_do_not_fork_and_each_sampled_token_is_trained_once(thirty: Thirty) -> None:
    found = thirty.found
    assert [(turn["fork"], turn["forked_at"], turn["messages"]) for turn in found.turns if turn["fork"]] == []
    assert len(found.datums) == 1 + found.asides
    assert _trained(found) == found.session["sampled"] == sum(len(turn["sampled_tokens"]) for turn in found.turns)
    sampled = [token for turn in thirty.turns for token in turn["sampled_tokens"]]
    assert sampled in [_sampled_in(datum) for datum in found.datums]


def test_a_row_reads_as_the_whole_conversation_does(thirty: Thirty) -> None:
    """Transformers' rendering of all messages at once, beside the tokens that were put together turn by turn."""
    tokenizer = AutoTokenizer.from_pretrained(str(thirty.directory / "model"))
    messages = [message for turn in thirty.turns for message in [*turn["messages"], turn["answer"]]]
    whole: Any = tokenizer.apply_chat_template(
        [for_template(message) for message in chat_messages.for_template(messages)],
        tools=thirty.turns[0]["setting"].get("tools"),
        tokenize=False,
    )
    texts = [tokenizer.decode(_tokens(datum)) for datum in thirty.found.datums]
    assert whole.removesuffix("\n") in texts


def _tokens(datum: dict[str, Any]) -> list[int]:
    """All tokens of a row: its inputs, and the last target."""
    inputs = datum["model_input"]["chunks"][0]["tokens"]
    return [*inputs, datum["loss_fn_inputs"]["target_tokens"]["data"][-1]]


def _sampled_in(datum: dict[str, Any]) -> list[int]:
    inputs = datum["loss_fn_inputs"]
    return [token for token, mask in zip(inputs["target_tokens"]["data"], inputs["mask"]["data"], strict=True) if mask]


def _trained(found: Found) -> int:
    """How many tokens the rows train."""
    return sum(len(_sampled_in(datum)) for datum in found.datums)
