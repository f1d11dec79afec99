"""The rollout client with a real router in front of workers that are played."""

from __future__ import annotations

import asyncio
import json
import random
import runpy
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from skyrl.base.tiny import model_path
from skyrl.rollout import (
    BadAnswer,
    EngineError,
    RequestRefused,
    RolloutClient,
    RolloutConfig,
    RolloutRequest,
    RolloutTimeout,
    SamplingParams,
    SglangHooks,
    Trajectory,
    VllmHooks,
    make_strategy,
)
from skyrl.rollout.client import ROUTING_KEY
from skyrl.rollout.strategies import PlainStrategy
from skyrl.router.middleware import RouterContext
from tests.component.loop_clock import LoopClock
from tests.component.router_world import Exchange, FakeWorker, running_router, steps, until, until_left

EXAMPLE = Path(__file__).parents[3] / "examples" / "text_rollouts.py"
REQUEST = RolloutRequest(input_ids=[1, 2], params=SamplingParams(max_new_tokens=5, min_new_tokens=3))
Reply = dict[str, Any]


def reply(tokens: list[int], kind: str = "stop", version: str = "1", text: str | None = None) -> Reply:
    return {
        "text": "".join(f"<{token}>" for token in tokens) if text is None else text,
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": kind, "matched": tokens[-1]} if kind == "stop" else {"type": kind},
            "output_token_logprobs": [[-token / 8, token, None] for token in tokens],
            "weight_version": version,
        },
    }


class Engine(FakeWorker):
    """Answers `/generate` with the next of `replies`: an answer, or a function of the exchange. Without replies it
    holds requests until they are aborted, and answers what it `has`."""

    def __init__(self, *replies: Reply | Callable[[Exchange], Any]) -> None:
        super().__init__(self._run)
        self.replies: list[Any] = list(replies)
        self.has = reply([7], "abort")
        self.running: set[asyncio.Event] = set()
        self.most = 0
        self.aborts = 0
        self.gone = 0
        self.answers_aborts = True

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(one.body) for one in self.received if one.path == "/generate"]

    async def _run(self, exchange: Exchange) -> None:
        match exchange.request.path.partition("?")[0]:
            case "/abort_request":
                assert json.loads(exchange.request.body) == {"abort_all": True}
                self.aborts += 1
                for held in self.running if self.answers_aborts else ():
                    held.set()
                await exchange.answer(b"")
            case "/v1/loads":
                loads = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
                await exchange.answer(json.dumps({"loads": [loads]}).encode())
            case _ if self.replies:
                given = self.replies.pop(0)
                if not isinstance(given, dict):
                    await given(exchange)
                else:
                    await exchange.answer(json.dumps(given).encode())
            case _:
                await self._hold(exchange)

    async def _hold(self, exchange: Exchange) -> None:
        held = asyncio.Event()
        self.running.add(held)
        self.most = max(self.most, len(self.running))
        waits = [asyncio.create_task(event.wait()) for event in (held, exchange.client_closed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        self.running.discard(held)
        if exchange.client_closed.is_set():
            self.gone += 1
        else:
            await exchange.answer(json.dumps(self.has).encode())


def refusing(status: str, body: bytes = b"{}", *headers: str) -> Callable[[Exchange], Any]:
    return lambda exchange: exchange.answer(body, status, ("content-type: application/json", *headers))


async def broken(exchange: Exchange) -> None:
    exchange.break_off()


@asynccontextmanager
async def client_of(
    *engines: Engine, router: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[RolloutClient]:
    async with running_router(*engines, **(router or {})) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        config = RolloutConfig(rollout_router_ip=host, rollout_router_port=int(port), **options)
        async with RolloutClient(config) as client:
            yield client


async def test_a_sample_and_its_routing_key() -> None:
    engine = Engine(reply([7, 8]))
    async with client_of(engine) as client:
        answer = await client.generate(RolloutRequest(input_ids=[1], session_id="s1"))
    assert (answer.tokens, answer.logprobs, answer.finish_reason) == ((7, 8), (-0.875, -1.0), "stop")
    assert engine.received[-1].header(ROUTING_KEY) == ["s1"]
    assert client.counters.answered == 1


def sessions(engine: Engine) -> list[str]:
    """The routing key of each request for a sample; every one has one."""
    keys = [one.header(ROUTING_KEY) for one in engine.received if one.path == "/generate"]
    assert all(len(key) == 1 and key[0] for key in keys)
    return [key[0] for key in keys]


async def test_the_parts_of_a_sample_have_one_session_and_each_member_of_a_group_its_own() -> None:
    engine = Engine(reply([3], "abort"), reply([4]), *(reply([5]) for _ in range(4)))
    async with client_of(engine) as client:
        await client.generate(REQUEST)
        await client.generate_group(REQUEST, 3)
        await client.generate(REQUEST)
    first, continued, *group, last = sessions(engine)
    assert first == continued
    assert len({first, *group, last}) == 5


@pytest.mark.parametrize("strategy", ["plain", "radix"])
async def test_the_turns_of_a_trajectory_stay_at_one_of_two_workers(strategy: str) -> None:
    tokenizer = RouterContext(tokenizer_dir=model_path(), options={}).tokenizer
    ids: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    engines = [Engine(*[reply(ids("a"), "length", text="a")] * 72) for _ in range(2)]
    router = {"middleware": ("radix",), "tokenizer": model_path()}
    async with client_of(*engines, router=router, rollout_strategy=strategy) as client:
        turns = make_strategy(client, ids)
        trajectories = [Trajectory() for _ in range(24)]
        for text in ("one", " two", " three"):
            for number, trajectory in enumerate(trajectories):
                await turns.turn(trajectory, f"{number} {text}", SamplingParams())
    seen = [sessions(engine) for engine in engines]
    assert [len(keys) % 3 for keys in seen] == [0, 0]
    assert all(seen)
    assert not set(seen[0]) & set(seen[1])
    assert sorted(one.session_id or "" for one in trajectories) == sorted({*seen[0], *seen[1]})


async def test_the_example_keeps_each_conversation_at_one_worker() -> None:
    example = runpy.run_path(str(EXAMPLE))
    engines = [Engine(*[reply([5], "length", text="a")] * 48) for _ in range(2)]
    task = example["TASKS"]["count"]
    questions = [task.prompt(random.Random(seed)) for seed in (1, 2)]
    async with running_router(*engines) as router, httpx.AsyncClient() as client:
        plane = example["Plane"](router.url, client)
        for seed in range(24):
            await example["converse"](plane, task, questions, seed)
    seen = [sessions(engine) for engine in engines]
    assert all(seen)
    assert not set(seen[0]) & set(seen[1])
    assert list(Counter(seen[0] + seen[1]).values()) == [2] * 24


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
async def test_aborted_parts_are_continued_to_an_exact_whole(backend: str) -> None:
    engine = Engine(
        reply([3], "abort"), reply([], "abort", "2"), reply([4, 5], "abort", "2"), reply([6, 7], "length", "3")
    )
    params = SamplingParams(max_new_tokens=5, min_new_tokens=3, sampling_seed=11)
    async with client_of(engine, rollout_backend=backend) as client:
        answer = await client.generate(RolloutRequest(input_ids=[1, 2], params=params))
    assert answer.tokens == (3, 4, 5, 6, 7)
    assert answer.logprobs == (-0.375, -0.5, -0.625, -0.75, -0.875)
    assert answer.text == "<3><4><5><6><7>"
    assert answer.weight_versions == ("1", "2", "2", "3", "3")
    assert (answer.finish_reason, answer.weight_version, len(answer.parts)) == ("length", "3", 4)
    sent = [(body["input_ids"], body["sampling_params"]) for body in engine.bodies]
    assert [ids for ids, _ in sent] == [[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert [params["max_new_tokens"] for _, params in sent] == [5, 4, 4, 2]
    assert [params["min_new_tokens"] for _, params in sent] == [3, 2, 2, 0]
    seeds = [params["sampling_seed"] for _, params in sent]
    assert seeds[0] == 11
    assert len(set(seeds)) == (3 if backend == "vllm" else 1)
    assert (client.counters.aborted, client.counters.continued) == (3, 3)


class Speaker(Engine):
    """Samples one text, whose tokens are the indices of `pieces`, and looks for stop strings as vLLM does: in what this
    request samples, and not before `min_new_tokens` have been exceeded. Aborts the requests of `aborts_after`, in their
    order, after so many tokens."""

    def __init__(self, pieces: list[str], *aborts_after: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.aborts_after = list(aborts_after)

    async def _run(self, exchange: Exchange) -> None:
        body = json.loads(exchange.request.body)
        await exchange.answer(json.dumps(self.sample(len(body["input_ids"]) - 1, **body["sampling_params"])).encode())

    def sample(
        self, start: int, *, max_new_tokens: int, min_new_tokens: int, no_stop_trim: bool, stop: list[str], **_: Any
    ) -> Reply:
        tokens: list[int] = []
        text = ""
        most = self.aborts_after.pop(0) if self.aborts_after else len(self.pieces)
        while len(tokens) < max_new_tokens:
            if len(tokens) == most:
                return reply(tokens, "abort", text=text)
            seen = len(text)
            tokens.append(start + len(tokens))
            text += self.pieces[tokens[-1]]
            for one in stop if len(tokens) > min_new_tokens else ():
                if (found := text.find(one, max(0, seen - len(one) + 1))) >= 0:
                    answer = reply(tokens, text=text[: found + len(one) * no_stop_trim])
                    answer["meta_info"]["finish_reason"]["matched"] = one
                    return answer
        return reply(tokens, "length", text=text)


PIECES = ["x", "<", "st", "o", "p>", "<", "st", "op", " <sto", "pping", ">", "e", "nd<s", "", "top>no", "t", "he", "re"]


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize(
    ("stops", "least", "text"),
    [
        (["<stop>"], 0, "x"),
        (["<stop>"], 5, "x<stop><stop <stopping>end"),
        (["<stop>"], 15, "".join(PIECES)),
        (["pping>", "<stop>"], 5, "x<stop><stop <sto"),
        (["end<stop>", "p>no"], 5, "x<stop><stop <stopping>"),
        (["stop>not", "nd<s"], 5, "x<stop><stop <stopping>e"),
        (["missing", ">>", "<stoppi!"], 0, "".join(PIECES)),
    ],
)
async def test_a_stop_string_that_spans_two_parts_is_found(stops: list[str], least: int, text: str, trim: bool) -> None:
    params = SamplingParams(max_new_tokens=len(PIECES), min_new_tokens=least, stop=stops, no_stop_trim=not trim)
    request = RolloutRequest(input_ids=[1], params=params)
    async with client_of(whole := Speaker(PIECES)) as client:
        expected = await client.generate(request)
    assert len(whole.received) == 1
    if trim:
        assert expected.text == text
    cuts = [*((one,) for one in range(len(expected.tokens))), (2, 1), (4, 0, 0, 1), (1, 1, 1, 1, 1, 1, 1)]
    async with client_of(engine := Speaker(PIECES)) as client:
        for cut in cuts:
            engine.aborts_after = list(cut)
            answer = await client.generate(request)
            assert (answer.tokens, answer.text) == (expected.tokens, expected.text), cut
            assert (answer.finish_reason, answer.logprobs) == (expected.finish_reason, expected.logprobs), cut


async def test_only_the_beginning_of_a_stop_string_is_continued_token_by_token() -> None:
    engine = Speaker(PIECES, 3)
    params = SamplingParams(max_new_tokens=len(PIECES), stop=["<stop!", "absent"], sampling_seed=5)
    async with client_of(engine) as client:
        answer = await client.generate(RolloutRequest(input_ids=[1], params=params))
    assert (answer.finish_reason, len(answer.tokens)) == ("length", len(PIECES))
    sent = [body["sampling_params"] for body in engine.bodies]
    assert [one["max_new_tokens"] for one in sent] == [18, 1, 1, 13]
    assert len({one["sampling_seed"] for one in sent}) == 4
    assert (client.counters.aborted, client.counters.continued) == (1, 1)


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("partial", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("nothing", ["", []])
async def test_a_turn_that_goes_on_with_a_partial_sample_finds_a_stop_string_that_began_in_it(
    nothing: str | list[int], partial: int, trim: bool
) -> None:
    pieces = ["x", "<", "st", "o", "p>", "y", "z"]
    params = SamplingParams(max_new_tokens=len(pieces), stop=["<stop>"], no_stop_trim=not trim)
    engine = Speaker(pieces, partial)
    async with client_of(engine, rollout_continue_partial=False) as client:
        trajectory, strategy = Trajectory(), PlainStrategy(client, lambda text: [1] * len(text))
        first = await strategy.turn(trajectory, "p", params)
        if partial < 5:
            assert (first.finish_reason, trajectory.begun) == ("abort", "".join(pieces[:partial]))
            rest = replace(params, max_new_tokens=len(pieces) - partial)
            assert (await strategy.turn(trajectory, nothing, rest)).finish_reason == "stop"
    assert trajectory.tokens == [1, 0, 1, 2, 3, 4]
    assert trajectory.text == ("px" if trim else "px<stop>")
    assert trajectory.begun == ""


async def test_abort_all_ends_a_sample_that_is_continued_by_single_tokens() -> None:
    engine = Engine(reply([3], "abort", text="<"))
    params = SamplingParams(max_new_tokens=9, stop="<stop>")

    async def last_token(exchange: Exchange) -> None:
        aborting.append(asyncio.create_task(client.abort_all()))
        await until(lambda: engine.aborts)
        await exchange.answer(json.dumps(reply([4], "length", text="s")).encode())

    aborting: list[asyncio.Task[None]] = []
    engine.replies.append(last_token)
    async with client_of(engine) as client:
        answer = await client.generate(RolloutRequest(input_ids=[1], params=params))
        await aborting[0]
    assert (answer.tokens, answer.text, answer.finish_reason) == ((3, 4), "<s", "abort")


async def test_an_abort_with_no_tokens_left_to_ask_for_ends_the_sample() -> None:
    engine = Engine(reply([3, 4, 5, 6, 7], "abort"))
    async with client_of(engine) as client:
        answer = await client.generate(REQUEST)
    assert (answer.tokens, answer.finish_reason) == ((3, 4, 5, 6, 7), "length")
    assert len(engine.bodies) == 1


@pytest.mark.parametrize("request_", [REQUEST, RolloutRequest(text="a")])
async def test_a_partial_sample_is_the_answer_where_it_is_not_continued(request_: RolloutRequest) -> None:
    engine = Engine(reply([3], "abort"))
    async with client_of(engine) as client:
        answer = await client.generate(request_, continue_partial=None if request_.text else False)
    assert (answer.tokens, answer.finish_reason, len(engine.bodies)) == ((3,), "abort", 1)


async def test_an_answer_with_a_null_logprob_is_an_error() -> None:
    wrong = reply([7, 8])
    wrong["meta_info"]["output_token_logprobs"][1][0] = None
    async with client_of(Engine(wrong)) as client:
        with pytest.raises(BadAnswer, match=r"output_token_logprobs\[1\]"):
            await client.generate(REQUEST)


@pytest.mark.parametrize("status", ["400 Bad Request", "422 No", "429 Many", "500 Broken"])
async def test_an_error_is_raised_at_once_with_the_servers_words(status: str) -> None:
    engine = Engine(refusing(status, b'{"error":{"message":"top_k: must be -1"}}'))
    async with client_of(engine) as client:
        with pytest.raises(RequestRefused, match="top_k: must be -1") as raised:
            await client.generate(REQUEST)
    assert raised.value.status == int(status[:3])
    assert len(engine.bodies) == client.counters.refused == 1


async def test_503_is_sent_again_after_the_time_that_the_server_names() -> None:
    engine = Engine(*[refusing("503 Later", b"{}", "retry-after: 0")] * 3, reply([7]))
    async with client_of(engine) as client:
        assert (await client.generate(REQUEST)).tokens == (7,)
    assert len(engine.bodies) == 4
    assert client.counters.unavailable == 3


async def test_a_refused_connection_is_tried_again_until_the_deadline() -> None:
    engine = Engine(reply([7]))
    await engine.start()
    await engine.stop()  # it keeps its port
    config = RolloutConfig(rollout_router_port=engine.port)
    async with RolloutClient(config) as client:
        asked = asyncio.create_task(client.generate(REQUEST))
        await until(lambda: client.counters.unavailable >= 2)
        await engine.start()
        try:
            assert (await asked).tokens == (7,)
        finally:
            await engine.stop()
    clock = LoopClock()
    async with RolloutClient(RolloutConfig(rollout_router_port=engine.port, rollout_deadline_s=600)) as client:
        asked = asyncio.create_task(client.generate(REQUEST))
        await until(lambda: client.counters.unavailable >= 1)
        clock.advance(600)
        with pytest.raises(RolloutTimeout, match=r"no sample within 600 s; last failure: .*Connect"):
            await asked


async def test_an_interrupted_worker_is_asked_again_unless_configured_otherwise() -> None:
    engine = Engine(broken, reply([7]))
    async with client_of(engine) as client:
        assert (await client.generate(REQUEST)).tokens == (7,)
        assert client.counters.interrupted == 1
    engine = Engine(broken, reply([7]))
    async with client_of(engine, rollout_retry_interrupted=False) as client:
        with pytest.raises(RequestRefused, match="502"):
            await client.generate(REQUEST)
    assert len(engine.bodies) == 1


@pytest.mark.parametrize("raw", [b"SSH-2.0-OpenSSH_9.2\r\n", b"x" * 2**17], ids=["no HTTP", "an endless status line"])
async def test_a_server_that_does_not_speak_http_is_an_error_at_once(raw: bytes) -> None:
    server = FakeWorker(steps(raw, until_left))
    await server.start()
    try:
        async with RolloutClient(RolloutConfig(rollout_router_port=server.port, rollout_deadline_s=20)) as client:
            with pytest.raises(BadAnswer, match="HTTP"):
                await client.generate(REQUEST)
    finally:
        await server.stop()
    assert len(server.received) == 1


async def test_an_address_of_the_router_that_is_none_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match="rollout_router_ip: invalid URL"):
        async with RolloutClient(RolloutConfig(rollout_router_ip="no host")):
            pass


async def test_a_cancelled_call_frees_the_worker_and_its_place() -> None:
    engine = Engine()
    async with client_of(engine, rollout_concurrency=1) as client:
        asked = asyncio.create_task(client.generate(REQUEST))
        await until(lambda: bool(engine.running))
        waiting = asyncio.create_task(client.generate(REQUEST))
        asked.cancel()
        await until(lambda: engine.gone == 1 and bool(engine.running))  # the second has the place
        waiting.cancel()
        await until(lambda: engine.gone == 2)
        assert client.counters.running == 0


async def test_no_more_requests_than_the_engines_allow_are_sent() -> None:
    engine = Engine()
    async with client_of(engine, rollout_concurrency=2, rollout_num_engines=2) as client:
        group = asyncio.create_task(client.generate_group(REQUEST, 9, continue_partial=False))
        while not group.done():
            await until(lambda: len(engine.running) == min(4, 9 - client.counters.answered) or group.done())
            for held in engine.running:
                held.set()
            await asyncio.sleep(0)
        assert len(await group) == 9
    assert engine.most == 4


async def test_seeds_of_a_group() -> None:
    engine = Engine(*[reply([7])] * 6)
    async with client_of(engine, rollout_deterministic_inference=True, rollout_seed=5) as client:
        await client.generate_group(REQUEST, 3)
    assert sorted(body["sampling_params"]["sampling_seed"] for body in engine.bodies) == [5, 6, 7]
    engine = Engine(*[reply([7])] * 3)
    async with client_of(engine) as client:
        await client.generate_group(REQUEST, 3)
        assert all("sampling_seed" not in body["sampling_params"] for body in engine.bodies)
        with pytest.raises(ValueError, match="sampling_seed"):
            await client.generate_group(RolloutRequest(text="a", params=SamplingParams(sampling_seed=1)), 2)


async def test_the_first_error_of_a_group_cancels_the_others() -> None:
    engine = Engine()

    async def refuse_when_two_run(exchange: Exchange) -> None:
        await until(lambda: len(engine.running) == 2)
        await refusing("400 Bad")(exchange)

    engine.replies.append(refuse_when_two_run)
    async with client_of(engine) as client:
        with pytest.raises(RequestRefused):
            await client.generate_group(REQUEST, 3)
        await until(lambda: engine.gone == 2)


async def test_abort_all_ends_every_call_with_what_it_has() -> None:
    engines = [Engine(), Engine()]
    async with client_of(*engines, rollout_concurrency=4, router={"policy": "round_robin"}) as client:
        calls = [asyncio.create_task(client.generate(REQUEST)) for _ in range(6)]
        await until(lambda: all(len(engine.running) == 2 for engine in engines))
        await client.abort_all()
        answers = await asyncio.gather(*calls)
        assert [answer.finish_reason for answer in answers] == ["abort"] * 6
        assert sorted(answer.tokens for answer in answers) == [(), (), (7,), (7,), (7,), (7,)]
        assert all(engine.aborts >= 1 and not engine.running for engine in engines)
        assert client.counters.continued == 0
        engines[0].replies = engines[1].replies = [reply([8])]
        assert (await client.generate(REQUEST)).tokens == (8,)  # the client goes on as before


async def test_abort_all_ends_a_call_that_waits_to_be_sent_again() -> None:
    engine = Engine(reply([3], "abort"), refusing("503 Later", b"{}", "retry-after: 60"))
    async with client_of(engine) as client:
        call = asyncio.create_task(client.generate(REQUEST))
        await until(lambda: client.counters.unavailable == 1)
        await client.abort_all()
        answer = await call
    assert (answer.tokens, answer.finish_reason) == ((3,), "abort")


async def test_abort_all_names_a_worker_that_does_not_become_idle() -> None:
    engine = Engine()
    engine.answers_aborts = False
    clock = LoopClock()
    async with client_of(engine, rollout_abort_timeout_s=600) as client:
        call = asyncio.create_task(client.generate(REQUEST))
        await until(lambda: bool(engine.running))
        aborting = asyncio.create_task(client.abort_all())
        await until(lambda: engine.aborts >= 2)  # the first round has counted the requests
        clock.advance(600)
        with pytest.raises(RolloutTimeout, match=rf"{engine.url}: 1 requests; requests of this client: 1"):
            await aborting
        call.cancel()


async def test_turns_of_the_plain_strategy_keep_exact_tokens() -> None:
    engine = Engine(reply([7, 8]), reply([9]))
    async with client_of(engine) as client:
        trajectory, strategy = Trajectory(session_id="s"), make_strategy(client)
        await strategy.turn(trajectory, [1, 2], SamplingParams())
        await strategy.turn(trajectory, [3], SamplingParams())
        with pytest.raises(ValueError, match="encode"):
            await strategy.turn(trajectory, "text", SamplingParams())
    assert trajectory.tokens == [1, 2, 7, 8, 3, 9]
    assert trajectory.loss_mask == [0, 0, 1, 1, 0, 1]
    assert trajectory.logprobs == [0.0, 0.0, -0.875, -1.0, 0.0, -1.125]
    assert engine.bodies[1]["input_ids"] == [1, 2, 7, 8, 3]


async def test_turns_of_the_radix_strategy_get_exact_tokens_from_the_router() -> None:
    tokenizer = RouterContext(tokenizer_dir=model_path(), options={}).tokenizer
    ids: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    odd = [ids(letter)[0] for letter in "india"]  # not what the tokenizer makes of "india"
    engine = Engine(reply(odd, "length", text="india"), reply(ids("!"), "length", text="!"))
    router = {"middleware": ("radix",), "tokenizer": model_path()}
    async with client_of(engine, router=router, rollout_strategy="radix") as client:
        trajectory, strategy = Trajectory(), make_strategy(client)
        await strategy.turn(trajectory, "B ", SamplingParams())
        await strategy.turn(trajectory, " and", SamplingParams())
        assert trajectory.text == "B india and!"
        assert trajectory.tokens == [*ids("B "), *odd, *ids(" and"), *ids("!")]
        mask = [0] * len(ids("B ")) + [1] * 5 + [0] * len(ids(" and")) + [1]
        assert trajectory.loss_mask == mask
        assert trajectory.logprobs[len(ids("B ")) :][:5] == [-token / 8 for token in odd]
        assert [bool(value) for value in trajectory.logprobs] == [bool(one) for one in mask]
        engine.replies = [reply(odd, "length", text="not what the tokens say")]
        with pytest.raises(BadAnswer, match="does not hold this sample"):
            await strategy.turn(trajectory, "C", SamplingParams())
        assert trajectory.text == "B india and!"
        unversioned = reply(ids("!"), "length", text="!")
        del unversioned["meta_info"]["weight_version"]  # stored all the same
        engine.replies = [unversioned]
        await strategy.turn(trajectory, "C", SamplingParams())
        assert (trajectory.text, trajectory.loss_mask[-1]) == ("B india and!C!", 1)


async def test_sglang_is_registered_at_the_router_by_url_and_removed() -> None:
    engine = Engine(reply([7]))
    await engine.start()
    async with client_of() as client:
        config = RolloutConfig(
            rollout_backend="sglang",
            rollout_router_port=client.config.rollout_router_port,
            rollout_engine_urls=(engine.url,),
        )
        hooks = SglangHooks(config)
        await hooks.start({})
        assert (await client.generate(REQUEST)).tokens == (7,)
        await hooks.stop()
        async with aiohttp.ClientSession() as session, session.get(f"{config.router_url}/list_workers") as listed:
            assert await listed.json() == {"urls": []}
    await engine.stop()


async def test_engines_are_not_started_where_another_rollout_runs(tmp_path: Path) -> None:
    async with running_router() as other:
        port = int(other.url.rpartition(":")[2])
        hooks = VllmHooks(RolloutConfig(rollout_router_port=port, rollout_state_dir=str(tmp_path / "state")))
        with pytest.raises(EngineError, match="answers already: another rollout runs there"):
            await hooks.start({})
    assert not (tmp_path / "state").exists(), "nothing was started"
