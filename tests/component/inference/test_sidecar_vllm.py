"""The sidecar in front of one real vLLM with the tiny model. The tests share both, the vLLM also with
test_vllm_server.py; each leaves nothing in flight."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from vllm_world import CONTEXT, KEY, RunningServer

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import LoraSpec
from skyrl.rollout.top_p_tokens import top_p_inputs
from skyrl.trainer.protocol import Datum, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.component.sidecar_world import RunningSidecar, running_sidecar

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

GREEDY = {"temperature": 0, "max_new_tokens": 12}
LONG = {"max_new_tokens": 3_500, "ignore_eos": True}
PROMPT = [265, 296, 83, 315]


class Served(RunningSidecar):
    """The sidecar, and the address of its vLLM."""

    vllm_url: str

    async def of_vllm(self, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {KEY}"}
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.vllm_url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def completion(self, **body: Any) -> dict[str, Any]:
        """The one choice of vLLM's own answer."""
        defaults = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
        return (await self.of_vllm("/v1/completions", defaults | body))["choices"][0]

    async def sampled(self, **body: Any) -> Any:
        status, answer = await self.generate(**{"input_ids": PROMPT, "sampling_params": GREEDY} | body)
        assert status == 200, answer
        return answer

    async def refusal(self, **body: Any) -> str:
        status, answer = await self.generate(**body)
        assert status == 400, answer
        return answer["error"]["message"]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def served(served: RunningServer) -> AsyncIterator[Served]:
    async with running_sidecar(served.spec.url, vllm_api_key=KEY) as sidecar:
        assert (await sidecar.post("/health_generate"))[0] == 200
        own = Served(sidecar.app, sidecar.url, sidecar.session)
        own.vllm_url = served.spec.url
        yield own


async def until_running(served: Served, samples: int) -> None:
    """Wait until vLLM itself runs this many samples. It counts them with each step that it computes, so a sample of one
    token is asked for meanwhile."""
    end = time.monotonic() + 60
    while (running := await _running(served)) != samples:
        assert time.monotonic() < end, f"vLLM runs {running}, not {samples}"
        await asyncio.sleep(0.01)
        if samples == 0 and time.monotonic() > end - 50:
            await served.completion(max_tokens=1)


async def _running(served: Served) -> float:
    async with served.session.get(f"{served.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


async def test_greedy_ids_text_and_logprobs_are_vllms(served: Served) -> None:
    own = await served.completion()
    answer = await served.sampled(return_logprob=True)
    meta = answer["meta_info"]
    assert (answer["output_ids"], answer["text"]) == (own["token_ids"], own["text"])
    assert [pair[:2] for pair in meta["output_token_logprobs"]] == [
        [logprob, token] for logprob, token in zip(own["logprobs"]["token_logprobs"], own["token_ids"], strict=True)
    ]
    assert all(len(one) == 3 and one[2] is None for one in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 12)
    assert isinstance(meta["cached_tokens"], int)
    assert meta["weight_version"] == "default"


async def test_text_is_tokenized_by_vllm_and_wins_over_ids(served: Served) -> None:
    text = "the horse and the mouse"
    tokens = (await served.of_vllm("/tokenize", {"prompt": text}))["tokens"]
    answer = await served.sampled(text=text, input_ids=[5], return_prompt_token_ids=True)
    assert answer["meta_info"]["prompt_token_ids"] == tokens
    assert answer["output_ids"] == (await served.completion(prompt=tokens))["token_ids"]


async def test_scoring_samples_nothing_and_gives_the_prompts_logprobs(served: Served) -> None:
    own = await served.completion(prompt_logprobs=0, max_tokens=1)
    scored = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    rows = own["prompt_logprobs"]
    for start in range(len(PROMPT) + 1):
        answer = await served.sampled(sampling_params=scored, return_logprob=True, logprob_start_len=start)
        expected = [[rows[i][str(PROMPT[i])]["logprob"], PROMPT[i], None] for i in range(max(start, 1), len(PROMPT))]
        if start == 0:
            expected.insert(0, [None, PROMPT[0], None])
        elif expected:
            expected[0][0] = None
        meta = answer["meta_info"]
        assert meta["input_token_logprobs"] == expected
        assert (answer["output_ids"], answer["text"], meta["output_token_logprobs"]) == ([], "", [])
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["completion_tokens"] == 0
    message = await served.refusal(input_ids=PROMPT, return_logprob=True, logprob_start_len=5)
    assert message.startswith("logprob_start_len")


async def test_top_logprobs_and_named_tokens_with_text(served: Served) -> None:
    answer = await served.sampled(
        return_logprob=True,
        top_logprobs_num=3,
        logprob_start_len=0,
        return_text_in_logprobs=True,
        sampling_params=GREEDY | {"skip_special_tokens": False},
    )
    meta = answer["meta_info"]
    for (logprob, token, text), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[0] == [logprob, token, text]
        assert [one[0] for one in top] == sorted((one[0] for one in top), reverse=True)
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == answer["text"]
    assert meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [3] * (len(PROMPT) - 1)
    tokens = [token for _, token, _ in meta["output_top_logprobs"][0]]
    named = await served.sampled(return_logprob=True, token_ids_logprob=tokens[::-1])
    row = named["meta_info"]["output_token_ids_logprobs"][0]
    assert [token for _, token, _ in row] == tokens[::-1]
    for mine, likely in zip(row[::-1], meta["output_top_logprobs"][0], strict=True):
        assert mine[0] == pytest.approx(likely[0], abs=1e-5)


async def test_batches_are_prompt_major_and_greedy_children_are_equal(served: Served) -> None:
    other = PROMPT[::-1]
    batch = await served.sampled(
        input_ids=[PROMPT, other], sampling_params=GREEDY | {"n": 2}, rid=["x", "y"], return_logprob=True
    )
    own = [(await served.completion(prompt=prompt))["token_ids"] for prompt in (PROMPT, PROMPT, other, other)]
    assert [one["output_ids"] for one in batch] == own
    assert len({one["meta_info"]["id"] for one in batch}) == 4
    single = await served.sampled(input_ids=[PROMPT, other], rid="z")
    assert [one["meta_info"]["id"] for one in single] == ["z_0", "z_1"]


async def test_children_have_their_own_seeds(served: Served) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 8, "sampling_seed": 7, "ignore_eos": True}
    two = await served.sampled(sampling_params=params | {"n": 2})
    second = await served.sampled(sampling_params=params | {"sampling_seed": 8})
    assert two[1]["output_ids"] == second["output_ids"]
    assert two[0]["output_ids"] == (await served.sampled(sampling_params=params))["output_ids"]
    assert two[0]["output_ids"] != two[1]["output_ids"]


async def test_defaults_are_sglangs(served: Served) -> None:
    answer = await served.sampled(sampling_params={"ignore_eos": True, "max_new_tokens": None, "top_k": None})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    near = await served.sampled(input_ids=[5] * (CONTEXT - 24), sampling_params={"ignore_eos": True})
    assert near["meta_info"]["completion_tokens"] == 23


async def test_what_ends_a_sample_is_named(served: Served) -> None:
    tokens = (await served.sampled())["output_ids"]
    by_id = await served.sampled(sampling_params=GREEDY | {"stop_token_ids": [tokens[1], None]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[1]}
    assert by_id["output_ids"][-1] == tokens[1]
    text = (await served.sampled(sampling_params=GREEDY | {"max_new_tokens": 2}))["text"]
    stop = text[-2:]
    by_text = await served.sampled(sampling_params=GREEDY | {"stop": stop})
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = await served.sampled(sampling_params=GREEDY | {"stop": [stop], "no_stop_trim": True})
    assert kept["text"] == by_text["text"] + stop
    end = await served.sampled(sampling_params=GREEDY | {"logit_bias": {"2": 100}, "skip_special_tokens": False})
    assert end["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert end["output_ids"] == [2]


async def test_a_stream_ends_with_the_whole_answer(served: Served) -> None:
    whole = await served.sampled(return_logprob=True)
    content = await served.sampled(return_logprob=True, stream=True)
    lines = content.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    last = chunks[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    keys = ("output_token_logprobs", "finish_reason", "prompt_tokens", "completion_tokens")
    assert [last["meta_info"][key] for key in keys] == [whole["meta_info"][key] for key in keys]
    for earlier, later in zip(chunks, chunks[1:], strict=False):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    several = await served.sampled(input_ids=[PROMPT, PROMPT], stream=True)
    indexed = [json.loads(line[6:]) for line in several.decode().split("\n\n")[:-2]]
    ends = {one["index"]: one["output_ids"] for one in indexed if one["meta_info"]["finish_reason"]}
    assert ends == {0: whole["output_ids"], 1: whole["output_ids"]}


async def test_aborted_requests_are_answered_with_what_they_have(served: Served) -> None:
    for _ in range(3):
        if await aborted_in_turn(served):
            return
    pytest.fail("samples ended before they were to be aborted, three times")


async def aborted_in_turn(served: Served) -> bool:
    """Aborts six samples by their names, by the beginning of their names, and all. False if some reach their last token
    before: a busy machine may give this process no time for so long."""

    def start(**body: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(served.sampled(**{"sampling_params": LONG, "return_logprob": True} | body))

    one, two, other = start(rid="a-1"), start(rid="a-2"), start(rid="b-1")
    children = start(rid="c", sampling_params=LONG | {"n": 2})
    stream = start(rid="d", stream=True)
    await until_running(served, 6)
    assert await served.total() == 6
    assert (await served.post("/flush_cache"))[0] == 400

    def is_partial(answer: Any) -> bool:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert len(meta["output_token_logprobs"]) == len(answer["output_ids"]) == meta["completion_tokens"]
        return 0 < len(answer["output_ids"]) < LONG["max_new_tokens"]

    assert await served.post("/abort_request", {"rid": "a-1"}) == (200, b"")
    assert is_partial(await one)
    if await any_ended(served, two, other, children, stream):
        return False
    await served.post("/abort_request", {"rid": "a"})
    assert is_partial(await two)
    if await any_ended(served, other, children, stream):
        return False
    await served.post("/abort_request", {"abort_all": True})
    assert is_partial(await other)
    assert [is_partial(child) for child in await children] == [True, True]
    events = (await stream).decode().split("\n\n")
    assert is_partial(json.loads(events[-3][6:]))
    assert await served.total() == 0
    assert (await served.post("/flush_cache"))[0] == 200
    await served.sampled()  # nothing is left paused
    return True


async def any_ended(served: Served, *tasks: asyncio.Task[Any]) -> bool:
    """Whether samples have ended that nobody has aborted. Then ends the others, too."""
    ended = [task.result() for task in tasks if task.done()]
    assert not re.search(r"""type["']: ?["']abort""", str(ended)), "their names were not given"  # a text may say it
    if ended:
        await served.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*tasks)
    return bool(ended)


async def test_an_abort_right_after_the_request_is_not_lost(served: Served) -> None:
    """vLLM ignores aborts of requests that it has accepted but not registered."""
    for pause in range(4):
        asked = [asyncio.create_task(served.sampled(sampling_params=LONG)) for _ in range(8)]
        while await served.total() < len(asked):
            pass
        for _ in range(pause):
            await served.post("/v1/loads")
        await served.post("/abort_request", {"abort_all": True})
        answers = await asyncio.gather(*asked)
        assert {one["meta_info"]["finish_reason"]["type"] for one in answers} == {"abort"}
        assert await served.total() == 0


async def test_abort_all_reaches_what_passes_through(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3_500, "ignore_eos": True}
    asked = asyncio.create_task(served.post("/v1/completions", body, headers={"Content-Type": "application/json"}))
    await until_running(served, 1)
    await served.post("/abort_request", {"abort_all": True})
    status, answer = await asked
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert await served.total() == 0


async def test_a_client_that_leaves_ends_its_sample(served: Served) -> None:
    for stream in (False, True):
        asked = asyncio.create_task(served.sampled(sampling_params=LONG, stream=stream))
        await until_running(served, 1)
        asked.cancel()
        await until_running(served, 0)
        assert await served.total() == 0


async def test_pausing_passes_through_and_is_healthy(served: Served) -> None:
    asked = asyncio.create_task(served.sampled(sampling_params=LONG))
    await until_running(served, 1)
    assert (await served.post("/pause?mode=abort"))[0] == 200
    assert (await asked)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await served.post("/health_generate"))[0] == 200
    waiting = asyncio.create_task(served.sampled(rid="w"))
    while await served.total() < 1:
        pass
    await served.post("/abort_request", {"rid": "w"})
    assert (await waiting)["output_ids"] == []
    assert (await served.post("/resume"))[0] == 200
    assert len((await served.sampled())["output_ids"]) == 12


async def test_prompts_that_do_not_fit_get_sglangs_words(served: Served) -> None:
    assert f"longer than the model's context length ({CONTEXT} tokens)" in await served.refusal(input_ids=[5] * CONTEXT)
    message = await served.refusal(input_ids=[5] * (CONTEXT - 24), sampling_params={"max_new_tokens": 24})
    assert message.startswith(f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens.")
    assert f"total of {CONTEXT} tokens" in message
    await served.sampled(input_ids=[5] * (CONTEXT - 24), sampling_params={"max_new_tokens": 23})
    assert "context length" in await served.refusal(text="mouse " * CONTEXT)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input_ids", {"input_ids": [512]}),
        ("lora_path", {"lora_path": "unknown"}),
        ("top_logprobs_num", {"return_logprob": True, "top_logprobs_num": 500}),
        ("sampling_params.stop", {"sampling_params": {"stop": [f"stop {i}" for i in range(65)]}}),
        ("sampling_params.stop_token_ids", {"sampling_params": {"stop_token_ids": [512]}}),
        ("regex", {"sampling_params": {"regex": "["}}),
    ],
)
async def test_what_vllm_refuses_is_named_as_the_client_knows_it(
    served: Served, field: str, body: dict[str, Any]
) -> None:
    assert field in await served.refusal(**body)


async def test_outputs_can_be_held_to_a_grammar(served: Served) -> None:
    answer = await served.sampled(sampling_params={"regex": "(horse|mouse)", "max_new_tokens": 20})
    assert answer["text"] in ("horse", "mouse")


async def test_a_high_temperature_is_allowed(served: Served) -> None:
    answer = await served.sampled(sampling_params={"temperature": 5.0, "max_new_tokens": 4}, return_logprob=True)
    assert answer["meta_info"]["output_token_logprobs"]


async def test_what_the_server_is(served: Served) -> None:
    for path in ("/model_info", "/get_model_info"):
        _, info = await served.post(path)
        assert (info["model_path"], info["model_type"]) == (str(model_path()), "qwen3")
        assert info["weight_version"] == "default"
    for path in ("/server_info", "/get_server_info"):
        _, info = await served.post(path)
        assert (info["model_path"], info["dtype"], info["internal_states"]) == (str(model_path()), "float32", [])
        assert info["enable_return_routed_experts"] is False
        assert [info[size] for size in ("tp_size", "pp_size", "ep_size", "num_gpus")] == [1, 1, 1, 1]
    headers = {"Authorization": "Bearer None"}
    for path in ("/health", "/v1/loads?include=core", "/get_load", "/weight_version", "/get_weight_version"):
        async with served.session.get(served.url + path, headers=headers) as answer:
            assert answer.status == 200, path


async def chatted(served: Served, **body: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "Not this."}], "temperature": 0, "max_tokens": 12} | body
    async with served.session.post(f"{served.url}/v1/chat/completions", json=asked) as answer:
        return answer.status, await answer.json()


async def test_a_chat_after_ids_samples_what_generate_samples(served: Served) -> None:
    """As a session server of a trainer sends it at every turn. vLLM alone would render the messages."""
    own = await served.sampled(return_logprob=True)
    asked = {"input_ids": PROMPT, "return_meta_info": True, "logprobs": True, "no_stop_trim": False}
    status, answer = await chatted(served, **asked)
    assert status == 200, answer
    choice, meta = answer["choices"][0], answer["choices"][0]["meta_info"]
    assert [one[1] for one in meta["output_token_logprobs"]] == own["output_ids"]
    logprobs = [one[0] for one in own["meta_info"]["output_token_logprobs"]]
    assert [one[0] for one in meta["output_token_logprobs"]] == pytest.approx(logprobs, abs=1e-4)
    assert choice["message"]["content"] == own["text"]
    same = ("finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "weight_versions")
    assert [meta[name] for name in same] == [own["meta_info"][name] for name in same]
    status, plain = await chatted(served)
    assert plain["choices"][0]["message"]["content"] != own["text"]
    status, several = await chatted(served, **asked, n=2, temperature=1.0, seed=5)
    metas = [one["meta_info"] for one in several["choices"]]
    assert [meta["prompt_tokens"] for meta in metas] == [len(PROMPT)] * 2
    assert len({meta["id"] for meta in metas}) == 2


async def test_a_stream_of_a_chat_after_ids_tells_them(served: Served) -> None:
    own = await served.sampled()
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 12, "stream": True}
    body = asked | {"input_ids": PROMPT}
    async with served.session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        *lines, done, _ = (await answer.text()).split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert (done, chunks[0]["prompt_token_ids"]) == ("data: [DONE]", PROMPT)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or []] == own["output_ids"]
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]


async def test_a_completion_has_sglangs_fields(served: Served) -> None:
    own = await served.sampled(return_logprob=True)

    async def completed(**body: Any) -> Any:
        asked = {"input_ids": PROMPT, "temperature": 0, "max_tokens": 12} | body
        async with served.session.post(f"{served.url}/v1/completions", json=asked) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["choices"][0]

    choice = await completed(return_meta_info=True, logprobs=0)
    ours, theirs = (one["meta_info"]["output_token_logprobs"] for one in (choice, own))
    assert [one[1] for one in ours] == [one[1] for one in theirs]
    assert (await completed(regex="(horse|mouse)", max_tokens=20))["text"] in ("horse", "mouse")
    assert (await completed(input_ids=None, prompt="a", ebnf='root ::= "cat"'))["text"] == "cat"
    whole = await completed(stop=[own["text"][3:5]], no_stop_trim=True)
    assert whole["text"] == own["text"][:5]


async def test_what_vllm_would_ignore_or_refuse_names_the_clients_field(served: Served) -> None:
    for body, words in (
        ({"input_ids": [512]}, "Token id 512 is out of vocabulary (parameter=input_ids)"),
        ({"input_ids": [5] * CONTEXT}, f"longer than the model's context length ({CONTEXT} tokens)"),
        ({"sampling_seed": 5}, "sampling_seed: is not supported at /v1/chat/completions; give seed"),
        ({"guided_regex": "a"}, "guided_regex: "),
        ({"top_kk": 5}, "top_kk: is not a field of vLLM's /v1/chat/completions"),
        ({"lora_path": "unknown"}, "The model `unknown` does not exist"),
    ):
        status, answer = await chatted(served, **body)
        assert status in (400, 404), answer
        assert words in answer["error"]["message"]
    status, answer = await chatted(served, metadata={"a": "b"}, separate_reasoning=True, return_hidden_states=False)
    assert status == 200


async def test_an_aborted_chat_answers_with_the_meta_info_of_what_it_has(served: Served) -> None:
    asked = {"input_ids": PROMPT, "return_meta_info": True, "logprobs": True, "max_tokens": 3_500, "ignore_eos": True}
    running = asyncio.create_task(chatted(served, **asked))
    await until_running(served, 1)
    await served.post("/abort_request?abort_all=true")
    _, answer = await running
    meta = answer["choices"][0]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 3_500


async def test_a_new_version_is_in_the_next_answer(served: Served) -> None:
    headers = {"Content-Type": "application/json"}
    for version in ("7", "default"):
        assert (await served.post("/update_weight_version", {"new_version": version}, headers=headers))[0] == 200
        assert (await served.sampled())["meta_info"]["weight_version"] == version


async def test_other_routes_are_vllms_byte_for_byte(served: Served) -> None:
    own = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "stream": True, "request_id": "same"}

    async def both(method: str, path: str, **options: Any) -> list[tuple[int, bytes]]:
        found = []
        for url, headers in ((served.vllm_url, own), (served.url, {})):
            async with served.session.request(method, url + path, headers=headers, **options) as answer:
                found.append((answer.status, await answer.read()))
        return found

    for method, path, options in (
        ("GET", "/version", {}),
        ("GET", "/nothing?a=b", {}),
        ("DELETE", "/v1/models", {}),
        ("POST", "/v1/completions", {"data": b"{"}),
        ("POST", "/tokenize", {"json": {"prompt": "the mouse"}}),
    ):
        theirs, ours = await both(method, path, **options)
        assert ours == theirs, path
    (_, theirs), (_, ours) = await both("POST", "/v1/completions", json=body)
    assert _streamed(ours) == _streamed(theirs)


def _streamed(stream: bytes) -> tuple[str, str]:
    """The text and the finish reason of a stream. vLLM sends one or several tokens in a chunk, as they come."""
    *events, done = stream.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


async def test_all_samples_of_a_large_group_are_answered(served: Served) -> None:
    answers = await served.sampled(input_ids=[PROMPT] * 16, sampling_params={"n": 4, "max_new_tokens": 3})
    assert len(answers) == 64
    assert await served.total() == 0


async def test_the_trainer_scores_samples_over_what_vllm_drew_them_from(served: Served) -> None:
    """By the keys of a pass, and by the tokens that vLLM kept; at temperature 1 over the whole vocabulary not."""
    params = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_new_tokens": 60, "ignore_eos": True}
    params |= {"custom_params": {"return_top_p_token_ids": True}}
    answers = [
        await served.sampled(sampling_params={**params, "sampling_seed": seed}, return_logprob=True) for seed in (1, 2)
    ]
    config = load_config({"base_model": str(model_path()), "backend_config": {"trainer.micro_batch_tokens": 512}})
    backend = LoraBackend(config)
    backend.create_model("m", LoraSpec(rank=1, alpha=1.0, seed=0))
    plain: list[Datum] = []
    recorded: list[Datum] = []
    for answer in answers:
        tokens = [*PROMPT, *answer["output_ids"]]
        before = len(PROMPT) - 1
        inputs = {
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.array([0.0] * before + [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]),
            "advantages": np.array([0.0] * before + [1.0] * 60),
        }
        kept = top_p_inputs([answer], tokens)
        sizes = np.diff(kept["top_p_token_offsets"])
        assert (sizes[:before] == 0).all()
        assert 1 <= sizes[before:].min() < sizes.max() <= 20
        plain.append(Datum(np.array(tokens[:-1]), inputs))
        recorded.append(Datum(np.array(tokens[:-1]), {**inputs, **kept}))

    def ratios(data: list[Datum], **keys: float) -> dict[str, float]:
        training_pass = TrainingPass("m", data, "importance_sampling", keys)
        backend.check(training_pass)
        (result,) = backend.run([training_pass])
        assert not isinstance(result, Exception)
        return result.metrics

    by_keys = await asyncio.to_thread(ratios, plain, sampling_temperature=0.7, top_k=20, top_p=0.9)
    by_tokens = await asyncio.to_thread(ratios, recorded, sampling_temperature=0.7)
    for found in (by_keys, by_tokens):
        assert found["ratio:mean"] == pytest.approx(1, abs=1e-3)
        assert found["ratio:max"] == pytest.approx(1, abs=1e-2)
        assert found["outside_tokens:sum"] == 0
    assert abs((await asyncio.to_thread(ratios, plain))["kl:mean"]) > 0.03


async def test_kept_tokens_come_with_the_last_chunk_and_larger_sets_than_vllm_tells_are_refused(served: Served) -> None:
    params = {"top_k": 5, "max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 4}
    params |= {"custom_params": {"return_top_p_token_ids": True}}
    whole = await served.sampled(sampling_params=params, return_logprob=True)
    _, events = await served.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True, stream=True)
    *begun, last = (json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {"))
    assert all("top_p_token_ids" not in chunk["meta_info"] for chunk in begun)
    for name in ("top_p_token_ids", "top_p_token_offsets"):
        assert last["meta_info"][name] == whole["meta_info"][name]
    words = await served.refusal(input_ids=PROMPT, sampling_params={**params, "top_k": 51}, return_logprob=True)
    assert words.startswith("sampling_params.custom_params.return_top_p_token_ids: ")
    assert "--max-logprobs" in words
