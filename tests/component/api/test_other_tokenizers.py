"""A session that trains one base model and samples from another with another tokenizer: it is told once, and nothing is
refused; a token id outside of a vocabulary names the base model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import Api, Serve, sample_body
from fake_upstream import FakeUpstream
from two_models import ENTRIES, JUDGE, STUDENT, TEACHER, serving

from skyrl.storage.db.database import Database

TOKENS = {STUDENT: "abcd", TEACHER: "abcd", JUDGE: "wxyz!"}
SENTENCE = (
    f"this session trains {STUDENT!r} and samples from {JUDGE!r}, whose tokenizers differ: 0 of 5 token ids mean the "
    "same in both, and no other id may go from one to the other"
)


@pytest.fixture
async def api(shared: Database, tmp_path: Path, upstreams: dict[str, FakeUpstream]) -> AsyncIterator[Api]:
    """Student and teacher have one tokenizer, the judge has another."""
    judge = {"base_model": JUDGE, "uses": ["sample"], "external_inference_url": upstreams[JUDGE].url}
    entries: list[dict[str, Any]] = []
    for entry in (*ENTRIES, judge):
        name = str(entry["base_model"])
        directory = tmp_path / name
        directory.mkdir(parents=True)
        vocab = {token: number for number, token in enumerate(TOKENS[name])}
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
        entries.append(entry | {"tokenizer_id": str(directory)})
    async with serving(shared, tmp_path / "state", entries) as running:
        yield running


async def session(api: Api) -> str:
    return (await api.post("create_session", {})).json()["session_id"]


async def train(api: Api, session_id: str, base_model: str) -> str | None:
    """Begin to train; the sentence that the SDK logs."""
    wanted = {"session_id": session_id, "model_seq_id": 0, "base_model": base_model}
    return note_of(await api.post("create_model", wanted))


async def sample(api: Api, session_id: str, base_model: str, number: int = 0) -> str | None:
    """The same for a sampling client."""
    wanted = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": base_model}
    return note_of(await api.post("create_sampling_session", wanted))


def note_of(answer: httpx.Response) -> str | None:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-deprecation-note")


async def test_whichever_comes_second_the_session_is_told(api: Api) -> None:
    first, second = await session(api), await session(api)
    assert await train(api, first, "student") is None
    assert await sample(api, first, JUDGE) == SENTENCE
    assert await sample(api, second, JUDGE) is None
    assert await train(api, second, STUDENT) == SENTENCE


async def test_a_teacher_with_the_students_tokenizer_is_no_news(api: Api) -> None:
    mine = await session(api)
    assert await train(api, mine, STUDENT) is None
    assert await sample(api, mine, TEACHER) is None
    assert await sample(api, mine, STUDENT, 1) is None


async def test_a_session_that_only_samples_is_told_nothing(api: Api) -> None:
    mine = await session(api)
    await train(api, await session(api), STUDENT)
    assert [await sample(api, mine, name, number) for number, name in enumerate((TEACHER, JUDGE))] == [None, None]


async def test_a_token_id_outside_of_the_vocabulary_names_the_base_model(api: Api) -> None:
    mine = await session(api)
    sampler = {"session_id": mine, "sampling_session_seq_id": 0, "base_model": TEACHER}
    teacher = (await api.post("create_sampling_session", sampler)).json()["sampling_session_id"]
    reason = f"[0, 50), the vocabulary of {TEACHER!r}: the id may come from another base model's tokenizer"
    target = {"data": [50, 1], "dtype": "int64", "shape": [2, 1]}
    refused = {
        f"prompt: token id 999 is not in {reason}": {"prompt": [1, 999]},
        f"target_prompt_logprobs: token id 50 is neither -1 nor in {reason}": {"target_prompt_logprobs": target},
    }
    for message, changes in refused.items():
        answer = await api.post("asample", sample_body(teacher, 0, **changes))
        assert (answer.status_code, answer.json()["detail"]) == (400, message)
    answer = await api.http.post("/v1/completions", json={"model": TEACHER, "prompt": [999], "max_tokens": 1})
    assert answer.json()["error"]["message"].endswith(f"token id 999 is not in {reason}")


async def test_a_server_with_one_base_model_names_none(serve: Serve) -> None:
    async with serve() as one:
        answer = await one.post("asample", sample_body(await one.sampler(), 0, prompt=[1, 1000]))
    assert answer.json()["detail"] == "prompt: token id 1000 is not in [0, 1000)"
