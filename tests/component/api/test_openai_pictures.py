"""Pictures in chats: checked here and forwarded as they came, or refused by their place in the request."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api, Serve
from fake_upstream import FakeUpstream, Received
from openai_requests import ONE, ask, complete, counted, data_of, events, piece, refusal
from test_pictures import OTHER, PICTURE, PROCESSOR, SEES

from skyrl.runtime.pictures import checker
from skyrl.sampling.quotas import Quotas
from skyrl.storage.db import quotas as quota_rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.usage import UsageKind
from tests.unit.picture_files import jpeg, png

CHAT = "/v1/chat/completions"
TOKENS = 6
"""Of PICTURE. OTHER has one."""


@pytest.fixture(autouse=True)
def answers(upstream: FakeUpstream) -> None:
    upstream.controls[CHAT] = complete


@pytest.fixture
async def sees(serve: Serve, tmp_path: Path) -> AsyncIterator[Api]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SEES))
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    async with serve(base_model=str(model), served_model_names=(BASE,)) as running:
        yield running


def uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | more}


def chat(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    return {"model": BASE, "messages": messages, "max_tokens": 4} | changes


def chats(upstream: FakeUpstream) -> list[Received]:
    return [request for request in upstream.requests if request.path == CHAT]


def message_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


async def test_pictures_go_on_as_they_came(sees: Api, upstream: FakeUpstream, database: Database) -> None:
    parts = (image(uri(PICTURE)), {"type": "text", "text": "And this?"}, image(uri(jpeg(), "image/jpeg")))
    answer = await ask(sees, chat(*parts), CHAT)
    assert answer.status_code == 200, answer.text
    (sent,) = chats(upstream)
    assert sent.json["messages"] == chat(*parts)["messages"]
    assert (await counted(sees, database))[UsageKind.PREFILL] == 2, "what the inference server counts, without cached"


async def test_streams_have_pictures_too(sees: Api, upstream: FakeUpstream) -> None:
    upstream.controls[CHAT] = events(piece("hi", 2, "stop"))
    shown = data_of(await ask(sees, chat(image(uri(PICTURE)), stream=True), CHAT))
    assert shown[-1] == "[DONE]"
    answer = await ask(sees, chat(image(uri(PICTURE[:-30])), stream=True), CHAT)
    assert refusal(answer) == (400, "messages[1].content[1].image_url", None)


async def test_what_the_inference_server_gets_is_written_here(sees: Api, upstream: FakeUpstream) -> None:
    """`detail` has no effect, and image/jpg is a wrong name that many clients use."""
    given = image(uri(jpeg(), "IMAGE/jpg"), detail="low")
    assert (await ask(sees, chat(given), CHAT)).status_code == 200
    (sent,) = chats(upstream)
    assert sent.json["messages"][1]["content"][1] == image(uri(jpeg(), "image/jpeg"))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an address": (image("http://127.0.0.1:9/a.png"), "image_url", "this server opens no address"),
    "a file": (image("file:///etc/passwd"), "image_url", "this server opens no address"),
    "another type": (image(uri(PICTURE, "image/gif")), "image_url", "must begin with"),
    "not base64": (image(uri(PICTURE)[:-8] + "....AAA="), "image_url", "is not base64"),
    "base64 without its end": (image(uri(PICTURE)[:-1]), "image_url", "is not base64"),
    "base64 with an end inside": (image(uri(b"a") + uri(PICTURE)[22:]), "image_url", "is not base64"),
    "no picture": (image(uri(b"GIF89a")), "image_url", "is neither a PNG nor a JPEG file"),
    "nothing": (image("data:image/png;base64,"), "image_url", "is neither a PNG nor a JPEG file"),
    "another format": (image(uri(PICTURE, "image/jpeg")), "image_url", "is said to be jpeg, and the file is png"),
    "truncated": (image(uri(PICTURE[:-30])), "image_url", "is not a complete and valid PNG file"),
    "too long": (image(uri(png(1, 201))), "image_url", "at most 200 times"),
    "no object": ({"type": "image_url", "image_url": uri(PICTURE)}, "image_url", "must be an object with a url"),
    "no url": ({"type": "image_url"}, "image_url", "must be an object with a url"),
    "another detail": (image(uri(PICTURE), detail="original"), "image_url.detail", "must be one of"),
    "a name for vLLM's cache": (image(uri(PICTURE)) | {"uuid": "x"}, "uuid", "not a field"),
    "another field": (image(uri(PICTURE), size=3), "image_url.size", "not a field"),
}


@pytest.mark.parametrize(("part", "field", "reason"), REFUSED.values(), ids=REFUSED)
async def test_a_picture_that_is_refused_is_named(
    sees: Api, upstream: FakeUpstream, part: dict[str, Any], field: str, reason: str
) -> None:
    answer = await ask(sees, chat(image(uri(OTHER)), part), CHAT)
    assert refusal(answer) == (400, f"messages[1].content[2].{field}", None)
    assert reason in message_of(answer)
    assert not chats(upstream)


async def test_too_many_pictures_are_refused(sees: Api, upstream: FakeUpstream) -> None:
    answer = await ask(sees, chat(*[image(uri(OTHER))] * 65), CHAT)
    assert refusal(answer) == (400, "messages[1].content[65].image_url", None)
    assert "holds 65 images and may hold 64" in message_of(answer)
    assert (await ask(sees, chat(*[image(uri(OTHER))] * 64), CHAT)).status_code == 200


async def test_a_model_of_text_takes_no_picture(api: Api, upstream: FakeUpstream) -> None:
    answer = await ask(api, chat(image(uri(PICTURE))), CHAT)
    assert refusal(answer) == (400, "messages[1].content[1].type", None)
    assert "must be 'text': the base model takes no images" in message_of(answer)
    assert not chats(upstream)


async def test_a_full_queue_of_checks_is_a_429(sees: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sees.services.picture_checks._checker, "_max_waiting", 0)
    answer = await ask(sees, chat(image(uri(PICTURE))), CHAT)
    assert refusal(answer) == (429, None, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_worker_that_does_not_start_is_a_503(sees: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(limits: object) -> None:
        raise OSError("no process is free")

    monkeypatch.setattr(checker.Decoder, "start", start)
    answer = await ask(sees, chat(image(uri(PICTURE))), CHAT)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


async def test_a_picture_is_decoded_once_however_often_it_is_sent(
    sees: Api, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    check = checker.PictureChecker.check

    async def counting(self: checker.PictureChecker, data: bytes, format: Any) -> tuple[int, int]:
        decoded.append(data)
        return await check(self, data, format)

    monkeypatch.setattr(checker.PictureChecker, "check", counting)
    for _ in range(2):
        assert (await ask(sees, chat(image(uri(PICTURE)), image(uri(PICTURE))), CHAT)).status_code == 200
    assert decoded == [PICTURE]
    for _ in range(2):
        await ask(sees, chat(image(uri(PICTURE, "image/jpeg"))), CHAT)
    assert decoded == [PICTURE] * 3, "what is refused is not remembered"


async def test_the_tokens_of_pictures_count_in_quotas_and_their_base64_does_not(
    sees: Api, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.write(lambda c: quota_rows.change(c, ONE, {"tokens_per_minute": 1_000_000}))
    await sees.services.quotas.refresh()
    asked: list[int] = []
    admit = Quotas.admit

    def noting(self: Quotas, tenant: str, request_id: str, tokens: int) -> Any:
        asked.append(tokens)
        return admit(self, tenant, request_id, tokens)

    monkeypatch.setattr(Quotas, "admit", noting)
    for part in (image(uri(OTHER)), image(uri(PICTURE))):
        assert (await ask(sees, chat(part), CHAT)).status_code == 200
    assert asked[1] - asked[0] == TOKENS - 1
    assert asked[0] == 100 + 4 + 1, "the context of the fake server bounds the text"
