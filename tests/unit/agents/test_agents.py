"""The client for agent sessions: its requests, the programs that it runs, and groups of trajectories."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import numpy as np
import openai
import psutil
import pytest
from aiohttp import web

from skyrl.agents import (
    AgentServer,
    BadAnswer,
    Command,
    CommandFailed,
    Finished,
    Group,
    RequestRefused,
    ServerUnavailable,
    Session,
    Trajectory,
    advantages,
    collect,
    run,
)
from skyrl.agents.requests import Requests
from skyrl.agents.runs import is_servers
from skyrl.agents.trajectories import rows_of

CREATED = {"session_id": "s1", "key": "ska-s1", "base_url": "http://127.0.0.1"}


@asynccontextmanager
async def server(answers: list[web.Response], patience_s: float = 20.0) -> AsyncIterator[tuple[AgentServer, list[str]]]:
    """A client of a server that gives each answer once, and the requests that have come. None left: it hangs up."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path_qs}")
        if not answers:
            assert request.transport is not None
            request.transport.abort()
        return answers.pop(0) if answers else web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with AgentServer(
            f"http://127.0.0.1:{runner.addresses[0][1]}/", "tml-key", patience_s=patience_s
        ) as client:
            yield client, asked
    finally:
        await runner.cleanup()


def json(body: object, status: int = 200, **headers: str) -> web.Response:
    content = msgspec.json.encode(body)
    return web.Response(body=content, status=status, headers=headers, content_type="application/json")


async def test_a_server_that_is_busy_or_restarts_is_asked_again() -> None:
    answers = [json({"detail": "busy"}, 429), web.Response(status=502, text="<html>"), json(CREATED)]
    async with server(answers) as (client, asked):
        session = await client.session(model="tiny")
    assert session.key == "ska-s1"
    assert asked == ["POST /api/v1/agent_sessions"] * 3


async def test_the_pause_is_as_long_as_the_server_asks() -> None:
    async with server([json({"detail": "busy"}, 503, **{"Retry-After": "1"}), json(CREATED)]) as (client, _):
        began = time.monotonic()
        await client.session(model="tiny")
        assert time.monotonic() - began >= 1


async def test_a_server_that_stays_away_is_given_up_with_the_last_failure() -> None:
    async with server([], patience_s=0.5) as (client, asked):
        with pytest.raises(ServerUnavailable, match=r"POST /api/v1/agent_sessions: no answer within 0\.5 s; last: \w+"):
            await client.session(model="tiny")
    assert len(asked) > 1


async def test_a_refusal_is_raised_at_once_with_the_servers_sentence() -> None:
    async with server([json({"detail": "model: not found", "field": "model"}, 404)]) as (client, asked):
        with pytest.raises(RequestRefused, match="HTTP 404: model: not found") as refused:
            await client.session(model="none")
    assert refused.value.status == 404
    assert len(asked) == 1


async def test_an_answer_without_a_key_is_an_error_of_the_server() -> None:
    async with server([json({"session_id": "s1"})]) as (client, _):
        with pytest.raises(BadAnswer, match="key"):
            await client.session(model="tiny")


async def test_all_pages_of_turns_are_read() -> None:
    first = {"rows": [{"id": "a"}, {"id": "b"}], "total": 3, "next_offset": "2-3-00"}
    pages = [json(first), json({"rows": [{"id": "c"}], "total": 3, "next_offset": None})]
    async with server([json(CREATED), *pages]) as (client, asked):
        turns = await (await client.session(model="tiny")).turns()
    assert [turn["id"] for turn in turns] == ["a", "b", "c"]
    assert asked[-1] == "GET /api/v1/agent_sessions/s1/turns?offset=2-3-00&limit=64"


async def test_pages_that_end_too_soon_are_an_error() -> None:
    async with server([json(CREATED), json({"rows": [], "total": 3})]) as (client, _):
        session = await client.session(model="tiny")
        with pytest.raises(BadAnswer, match="0 of 3"):
            await session.turns()


@pytest.mark.parametrize("reward", [np.float64(0.5), np.float32(1), True, "0.5"])
async def test_any_number_is_a_reward_and_what_is_none_fails_its_own_agent_alone(reward: Any) -> None:
    async def agent(session: Session, task: str) -> float:
        return reward

    pages = {"rows": [], "total": 0}
    async with server([json(CREATED), json({}), json({}), json(pages)]) as (client, _):
        (group,) = await run(client, agent, ["task"], retries=0, model="tiny")
    (trajectory,) = group.trajectories
    expected = None if isinstance(reward, str) else float(reward)
    assert (trajectory.reward, type(trajectory.reward)) == (expected, type(expected))


class Status(Exception):
    """As the SDKs of OpenAI and Anthropic have it."""

    def __init__(self, status_code: int) -> None:
        super().__init__(status_code)
        self.status_code = status_code


def test_the_server_is_to_blame_for_its_5xx_and_the_agent_for_what_it_asked() -> None:
    assert is_servers(Status(503))
    assert is_servers(ExceptionGroup("two tools", [ValueError(), Status(500)]))
    assert not is_servers(Status(400))
    assert not is_servers(ValueError("no number"))


@pytest.mark.parametrize("sdk", [openai.OpenAI, anthropic.Anthropic])
def test_the_server_is_to_blame_for_a_connection_that_an_sdk_cannot_make(sdk: Any) -> None:
    with (
        sdk(base_url="http://127.0.0.1:9", api_key="ska-s1", max_retries=0) as away,
        pytest.raises((openai.APIConnectionError, anthropic.APIConnectionError)) as error,
    ):
        away.models.list()
    assert is_servers(error.value)


def test_the_server_is_to_blame_for_a_status_that_httpx_raises() -> None:
    request = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")
    with pytest.raises(httpx.HTTPStatusError) as error:
        httpx.Response(502, request=request).raise_for_status()
    assert is_servers(error.value)


# The program asks nothing, so there is no server behind the session.
SESSION = Session(Requests("http://127.0.0.1:9", "tml-key", 1.0), "s1", "ska-s1", "http://127.0.0.1:9", "tiny")


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


async def length(script: str, finished: Finished) -> float:
    return len(finished.output)


async def said(script: str, finished: Finished) -> float:
    return float(finished.output)


async def test_the_program_finds_the_session_in_its_environment_and_no_other_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "sk-of-another-server")
    seen: list[str] = []

    async def reward(script: str, finished: Finished) -> float:
        seen.extend(finished.output.split())
        return 1.0

    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY")
    agent = Command(shell, reward, cwd=lambda _: tmp_path, environment={"EXTRA": "more"})
    await agent(SESSION, f"echo {' '.join('$' + name for name in (*names, 'EXTRA', 'PATH'))}; pwd")
    url, key = SESSION.base_url, SESSION.key
    assert seen == [f"{url}/v1", key, url, key, key, "more", os.environ["PATH"], str(tmp_path)]


async def test_only_the_end_of_a_long_output_is_kept() -> None:
    agent = Command(shell, length, max_output=1_000)
    assert await agent(SESSION, "yes | head -c 3000000; echo; echo end >&2") == 1_000
    assert await Command(shell, said, max_output=4)(SESSION, "yes | head -c 3000000; printf 0.75 >&2") == 0.75


async def test_no_output_is_kept_with_a_bound_of_0() -> None:
    assert await Command(shell, length, max_output=0)(SESSION, "echo much") == 0


@pytest.mark.parametrize("begin", ["", "setsid "])
async def test_a_program_that_has_ended_waits_for_no_child(tmp_path: Path, begin: str) -> None:
    child = tmp_path / "child"
    try:
        async with asyncio.timeout(30):
            assert await Command(shell, said)(SESSION, f"{begin}sleep 600 & echo $! > {child}; printf 0.75") == 0.75
        if not begin:
            await ended(int(child.read_text()))
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(child.read_text()), signal.SIGKILL)
        await asyncio.sleep(0.1)  # asyncio sees the end of the pipe


async def test_a_status_other_than_0_is_a_failure_with_the_end_of_the_output() -> None:
    with pytest.raises(CommandFailed, match="status 3: cannot go on"):
        await Command(shell, length)(SESSION, "echo cannot go on; exit 3")


async def test_after_the_time_limit_the_program_and_its_children_are_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    began = time.monotonic()
    with pytest.raises(CommandFailed, match="stopped after 2 s: started"):
        await Command(shell, length, timeout_s=2.0)(
            SESSION, f"sleep 600 & echo $! > {child}; echo started; trap '' TERM; wait; sleep 600"
        )
    assert time.monotonic() - began < 30
    await ended(int(child.read_text()))


async def test_a_cancelled_program_is_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    running = asyncio.create_task(Command(shell, length)(SESSION, f"sleep 600 & echo $! > {child}; wait"))
    await until(lambda: child.exists() and child.read_text().endswith("\n"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await ended(int(child.read_text()))


async def test_a_program_that_is_cancelled_while_it_starts_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the program runs before asyncio has its pipes."""
    child, start = tmp_path / "child", asyncio.create_subprocess_exec

    async def slow(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*argv, **options)
        await until(lambda: child.exists() and child.read_text().endswith("\n"))
        running.cancel()
        await asyncio.sleep(0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    running = asyncio.create_task(Command(shell, length)(SESSION, f"sleep 600 & echo $! > {child}; wait"))
    with pytest.raises(asyncio.CancelledError):
        await running
    await ended(int(child.read_text()))


async def ended(pid: int) -> None:
    """Wait until the process is gone, or is a zombie that init has not looked at yet."""
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.01)


TOKENS = [5, 6, 7, 8, 9]
INPUTS: dict[str, list[int] | list[float]] = {
    "target_tokens": TOKENS[1:],
    "logprobs": [0.0, -0.5, 0.0, -0.25],
    "advantages": [0.0, 0.0, 0.0, 0.0],
    "mask": [0.0, 1.0, 0.0, 1.0],
}
EXPERTS = [1, 2, -3, 4, 5, 6, 7, -(2**63)]


def row(**changed: list[int] | list[float]) -> dict[str, Any]:
    """A row as the server sends it."""
    inputs = {name: {"data": data, "shape": [len(data)]} for name, data in (INPUTS | changed).items()}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]}, "loss_fn_inputs": inputs}


def group(*rewards: float | None) -> Group[str]:
    rows = tuple(rows_of([row()]))
    return Group("task", tuple(Trajectory("s", reward, () if reward is None else rows) for reward in rewards))


def test_an_advantage_is_the_reward_minus_the_mean_of_its_group() -> None:
    assert advantages([group(1.0, 0.0, 0.0, 1.0), group(3.0, 1.0)]) == [[0.5, -0.5, -0.5, 0.5], [1.0, -1.0]]


def test_advantages_in_standard_deviations() -> None:
    assert advantages([group(3.0, 1.0, 1.0, 3.0)], divide_by_std=True) == [[1.0, -1.0, -1.0, 1.0]]
    assert advantages([group(0.1, 0.1, 0.1)], divide_by_std=True) == [[0.0, 0.0, 0.0]], "equal but for rounding"


def test_a_failed_trajectory_has_no_advantage_and_is_no_part_of_the_mean() -> None:
    assert advantages([group(1.0, None, 0.0)]) == [[0.5, None, -0.5]]
    assert advantages([group(None, None), group(2.0, None)]) == [[None, None], [0.0, None]]


def test_a_datum_has_the_advantage_at_the_positions_whose_targets_were_sampled() -> None:
    better, worse = collect([group(1.0, 0.0, None), group(1.0, 1.0)])
    assert better.model_input.to_ints() == [5, 6, 7, 8]
    inputs = {name: tensor.to_numpy() for name, tensor in better.loss_fn_inputs.items()}
    assert inputs["target_tokens"].tolist() == [6, 7, 8, 9]
    np.testing.assert_array_equal(inputs["advantages"], np.array([0, 0.5, 0, 0.5], np.float32))
    np.testing.assert_array_equal(inputs["logprobs"], np.array([0, -0.5, 0, -0.25], np.float32))
    assert worse.loss_fn_inputs["advantages"].to_numpy().tolist() == [0, -0.5, 0, -0.5]


def test_a_datum_has_the_experts_that_the_session_kept() -> None:
    (kept,) = rows_of([row(routed_experts=EXPERTS)])
    inputs = kept.datum(1.0).loss_fn_inputs
    np.testing.assert_array_equal(inputs["routed_experts"].to_numpy(), np.reshape(EXPERTS, (4, 2)))
    (without,) = rows_of([row()])
    assert "routed_experts" not in without.datum(1.0).loss_fn_inputs


def test_constrained_tokens_can_be_left_out_of_the_loss() -> None:
    (marked,) = rows_of([row(constrained=[0.0, 1.0, 0.0, 0.0])])
    assert marked.constrained is not None
    assert marked.constrained.tolist() == [False, False, True, False, False]
    trajectories = (Trajectory("s", 1.0, (marked,)), Trajectory("s", -1.0, (marked,)))
    for kept, weights in ((True, [0, 1, 0, 1]), (False, [0, 0, 0, 1])):
        better, _ = collect([Group("task", trajectories)], train_constrained=kept)
        assert better.loss_fn_inputs["advantages"].to_numpy().tolist() == weights
        assert "constrained" not in better.loss_fn_inputs, "no loss knows it"


@pytest.mark.parametrize(
    "damage",
    [{"constrained": [1.0]}, {"mask": [1.0]}, {"target_tokens": [6.5, 7, 8, 9]}, {"routed_experts": [1, 2, 3]}],
)
def test_a_row_that_contradicts_itself_is_refused(damage: dict[str, list[int] | list[float]]) -> None:
    with pytest.raises(BadAnswer):
        rows_of([row(**damage)])
