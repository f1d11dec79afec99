"""The server cuts `max_tokens` to the context, as Tinker's clients expect, and tells the user."""

from __future__ import annotations

import logging

import httpx
import pytest
import tinker
from api_harness import Api, sample_body
from fake_upstream import FakeUpstream
from tinker._base_client import _log_deprecation_note

from skyrl.sampling import service

NOTE = "x-deprecation-note"
CONTEXT, PROMPT = 100, [5, 6, 7]


async def sample(api: Api, sampler: str, seq_id: int, max_tokens: int | None) -> httpx.Response:
    params = {} if max_tokens is None else {"max_tokens": max_tokens}
    answer = await api.post("asample", sample_body(sampler, seq_id, sampling_params=params))
    assert answer.status_code == 200, answer.text
    return answer


async def test_the_first_cut_sample_of_a_sampling_session_carries_a_note(
    api: Api, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    sampler, other = await api.sampler(), await api.sampler()
    first = await sample(api, sampler, 0, 1_000_000)
    assert first.json()["max_tokens"] == CONTEXT - len(PROMPT)
    note = first.headers[NOTE]
    assert note.startswith("sampling_params.max_tokens: 1000000 is more than the 97 tokens that fit ")
    with caplog.at_level(logging.WARNING, logger="tinker"):
        _log_deprecation_note(first)
    assert note in caplog.text, "the SDK shows the note to its user"

    second = await sample(api, sampler, 1, 98)
    assert second.json()["max_tokens"] == 97
    assert NOTE not in second.headers, "a sampling session gets the note once"
    assert NOTE in (await sample(api, other, 0, 98)).headers, "each sampling session gets the note"
    assert (await api.http.get("/statusz")).json()["samples"]["max_tokens_cut"] == 3
    await upstream.until(lambda server: len(server.completions) == 3)
    assert {request.json["max_tokens"] for request in upstream.completions} == {97}


@pytest.mark.parametrize("max_tokens", [None, 1, 97])
async def test_a_sample_that_fits_carries_no_note(api: Api, max_tokens: int | None) -> None:
    answer = await sample(api, await api.sampler(), 0, max_tokens)
    assert answer.json().keys() == {"request_id", "sample_sequence_ids"}
    assert NOTE not in answer.headers
    assert (await api.http.get("/statusz")).json()["samples"]["max_tokens_cut"] == 0


async def test_the_server_remembers_a_limited_number_of_told_sessions(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_REMEMBERED", 1)
    first, second = await api.sampler(), await api.sampler()
    has_note = [
        NOTE in (await sample(api, sampler, i, 1000)).headers for i, sampler in enumerate([first, first, second, first])
    ]
    assert has_note == [True, False, True, True]


async def test_the_sdk_accepts_a_promise_with_an_extra_field() -> None:
    """The server's promise has one field more than the SDK knows."""
    promise = {"request_id": "r", "sample_sequence_ids": ["a"], "max_tokens": 97}
    assert tinker.types.UntypedAPIFuture.model_validate(promise).request_id == "r"
