"""Images in requests to an API process: checked, stored once, forwarded, and forwarded again after a restart."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import BASE, SAMPLE, Api, Serve, sample_body, scrape, tokens
from fake_upstream import FakeUpstream, error, never
from test_forwarding_pictures import generated, requests, script
from test_forwarding_pictures import next_reply as next_generation

from skyrl.base.pictures.picture import digest_of
from skyrl.base.pictures.places import KnownPicture
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.training import decode_forward_backward
from skyrl.engine.execution import PassPictures
from skyrl.sampling import pictures as generation
from skyrl.storage.db import pictures as picture_rows
from skyrl.storage.db.database import Connection, Database
from tests.unit.picture_files import png

IMAGE = 99
PICTURE, OTHER = png(64, 96), png(32, 32, seed=1)
"""Six tokens, and one."""
SEES = {"model_type": "qwen3_vl", "vision_config": {"depth": 1}, "image_token_id": IMAGE}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
}


def image(data: bytes = PICTURE, **more: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png"} | more


def prompt(*chunks: dict[str, Any] | list[int]) -> dict[str, Any]:
    return {"chunks": [{"tokens": chunk} if isinstance(chunk, list) else chunk for chunk in chunks]}


ABOUT = prompt([5], image(), [6, 7])


@pytest.fixture
def seeing(tmp_path: Path) -> dict[str, Any]:
    """The options of a server whose base model sees."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SEES))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return {"base_model": str(directory), "served_model_names": (BASE,)}


@pytest.fixture
async def seeing_api(
    serve: Serve, seeing: dict[str, Any], upstream: FakeUpstream, drain_at_once: None
) -> AsyncIterator[Api]:
    script.clear()
    upstream.controls[generation.PATH] = next_generation
    async with serve(**seeing) as running:
        yield running


async def refused(api: Api, given: dict[str, Any], **changes: Any) -> httpx.Response:
    sampler = await api.sampler()
    return await api.post("asample", sample_body(sampler, 0, **{"prompt": given} | changes))


def rows(database: Database, table: str) -> int:
    return database.read(lambda c: c.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())


def tenant_of(database: Database) -> str:
    return database.read(lambda c: c.exec_driver_sql("SELECT DISTINCT tenant FROM futures").scalar_one())


def bodies(database: Database) -> list[bytes]:
    query = "SELECT body FROM futures WHERE body IS NOT NULL"
    return [bytes(body) for body in database.read(lambda c: c.exec_driver_sql(query).scalars().all())]


async def test_an_image_is_forwarded_as_its_tokens_and_its_file(seeing_api: Api, upstream: FakeUpstream) -> None:
    upstream.controls[generation.PATH] = generated(6)
    sampler = await seeing_api.sampler()
    promise = await seeing_api.sample(sampler, 0, prompt=ABOUT, prompt_logprobs=True)
    assert tokens(await seeing_api.result(promise["request_id"])) == [[0, 1, 2]]
    (sent,) = requests(upstream)
    assert sent["token_ids"] == [5, IMAGE, 6, 7]
    (part,) = sent["content_parts"]
    assert base64.b64decode(part["url"].removeprefix("data:image/png;base64,")) == PICTURE
    assert part["uuid"] == digest_of(PICTURE)


async def test_sixteen_requests_about_one_image_store_it_once(
    seeing_api: Api, upstream: FakeUpstream, database: Database
) -> None:
    script.extend([never] * 16)
    sampler = await seeing_api.sampler()
    for seq_id in range(16):
        await seeing_api.sample(sampler, seq_id, prompt=prompt([5], image(), [6], image(OTHER), [7]))
    assert (rows(database, "pictures"), rows(database, "picture_uses")) == (2, 32)
    seen = await scrape(seeing_api)
    assert (seen["skyrl_images_total{outcome=stored}"], seen["skyrl_images_total{outcome=known}"]) == (2, 30)
    assert (seen["skyrl_images_in_check{}"], seen["skyrl_image_check_seconds_count{}"]) == (0, 2)
    assert all(len(body) < 1000 for body in bodies(database))


async def test_a_file_that_was_deleted_in_the_moment_of_its_next_use_is_stored_again(
    seeing_api: Api, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.extend([never] * 2)
    sampler = await seeing_api.sampler()
    await seeing_api.sample(sampler, 0, prompt=ABOUT)
    find = picture_rows.find

    def find_and_lose(connection: Connection, tenant: str, digests: Collection[str]) -> dict[str, KnownPicture]:
        found = find(connection, tenant, digests)
        database.write(lambda c: c.exec_driver_sql("DELETE FROM pictures"))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(picture_rows, "find", find_and_lose)
        await seeing_api.sample(sampler, 1, prompt=ABOUT)
    stored = database.read(lambda c: picture_rows.files(c, tenant_of(database), [digest_of(PICTURE)]))
    assert stored == {digest_of(PICTURE): PICTURE}


async def test_the_repeat_of_a_request_is_known(seeing_api: Api) -> None:
    script.append(never)
    sampler = await seeing_api.sampler()
    first = await seeing_api.sample(sampler, 0, prompt=ABOUT)
    assert (await seeing_api.sample(sampler, 0, prompt=ABOUT))["request_id"] == first["request_id"]
    other = await seeing_api.post("asample", sample_body(sampler, 0, prompt=prompt([5], image(OTHER), [6])))
    assert other.status_code == 400
    assert "used before" in other.text


async def test_a_sample_with_an_image_is_forwarded_again_by_the_next_process(
    serve: Serve, seeing: dict[str, Any], upstream: FakeUpstream, drain_at_once: None
) -> None:
    script.clear()
    upstream.controls[generation.PATH] = never
    async with serve(**seeing) as api:
        sampler = await api.sampler()
        promise = await api.sample(sampler, 0, prompt=ABOUT)
        while not requests(upstream):  # noqa: ASYNC110 - the upstream sets no event
            await asyncio.sleep(0.01)
    upstream.controls[generation.PATH] = generated(6)
    async with serve(**seeing) as api:
        assert tokens(await api.result(promise["request_id"])) == [[0, 1, 2]]
    first, again = requests(upstream)
    assert again == first


async def test_a_file_that_was_sent_before_may_be_named_by_its_digest(seeing_api: Api, upstream: FakeUpstream) -> None:
    upstream.controls[generation.PATH] = generated(6)
    pointer = {"type": "image_asset_pointer", "format": "png", "location": f"sha256:{digest_of(PICTURE)}"}
    sampler = await seeing_api.sampler()
    unknown = await seeing_api.post("asample", sample_body(sampler, 0, prompt=prompt([5], pointer)))
    assert unknown.status_code == 400
    assert "prompt.chunks[1]: is not stored on this server any more" in unknown.text
    for seq_id, given in enumerate((ABOUT, prompt([5], pointer, [6, 7]))):
        promise = await seeing_api.sample(sampler, seq_id, prompt=given)
        assert tokens(await seeing_api.result(promise["request_id"])) == [[0, 1, 2]]
    first, second = requests(upstream)
    assert second["content_parts"] == first["content_parts"]


async def test_no_tenant_can_name_the_image_of_another(seeing_api: Api) -> None:
    script.append(never)
    await seeing_api.sample(await seeing_api.sampler(), 0, prompt=ABOUT)
    pointer = {"type": "image_asset_pointer", "format": "png", "location": f"sha256:{digest_of(PICTURE)}"}
    two = {"X-API-Key": "tml-two"}
    body = sample_body(await seeing_api.sampler(**two), 0, prompt=prompt([5], pointer))
    answer = await seeing_api.post("asample", body, **two)
    assert answer.status_code == 400
    assert "prompt.chunks[1]: is not stored on this server any more" in answer.text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "expected tokens": (
        prompt([5], image(expected_tokens=7)),
        "prompt.chunks[1].expected_tokens: is 7, and this image of 64 x 96 pixels has 6 tokens",
    ),
    "no base64": (prompt(image(data=b"") | {"data": "%"}), "prompt.chunks[0].data: is not base64"),
    "another format": (prompt([5], image(b"GIF89a" * 9)), "prompt.chunks[1]: is neither a PNG nor a JPEG file"),
    "cut off": (prompt([5], [6], image(PICTURE[:-40])), "prompt.chunks[2]: "),
    "wrong format": (prompt(image(format="jpeg")), "prompt.chunks[0].format: is 'jpeg', and the file is 'png'"),
    "address": (prompt({"location": "http://10.0.0.1/a.png", "format": "png"}), "no address is opened"),
    "file": (prompt({"location": "/etc/passwd", "format": "png"}), "prompt.chunks[0].location: '/etc/passwd' is no"),
    "audio": (prompt({"dmel": "AAAA"}), "prompt.chunks[0]: is neither text nor an image"),
    "too long": (prompt([5], *[image()] * 20), "leave no room to sample in a context of 100"),
    "token of images": (prompt([5, IMAGE], image()), "prompt: token id 99 stands for images"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
async def test_a_wrong_image_is_refused_by_its_name_and_not_recorded(
    seeing_api: Api, database: Database, given: dict[str, Any], message: str
) -> None:
    answer = await refused(seeing_api, given)
    assert answer.status_code == 400
    assert message in answer.json()["detail"]
    assert rows(database, "futures") == 0


async def test_a_model_of_text_refuses_images_by_name(api: Api) -> None:
    answer = await refused(api, ABOUT)
    assert answer.status_code == 400
    assert "prompt.chunks[1]: is an image, and the base model takes text only" in answer.json()["detail"]


async def test_the_bound_on_stored_images_is_answered_with_429(
    serve: Serve, seeing: dict[str, Any], upstream: FakeUpstream, drain_at_once: None
) -> None:
    upstream.controls[generation.PATH] = never
    large = [png(700, 500, seed=seed) for seed in range(2)]  # a megabyte each
    async with serve(**seeing, max_stored_image_bytes=3 * 2**19) as api:
        sampler = await api.sampler()
        chunks = [image(data) for data in large]
        assert (await api.post("asample", sample_body(sampler, 0, prompt=prompt(chunks[0])))).status_code == 200
        full = await api.post("asample", sample_body(sampler, 1, prompt=prompt(chunks[1])))
        assert (full.status_code, full.headers["retry-after"]) == (429, "5")


async def test_an_inference_server_without_the_route_is_named(seeing_api: Api, upstream: FakeUpstream) -> None:
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    upstream.controls[generation.PATH] = error(403, message)
    promise = await seeing_api.sample(await seeing_api.sampler(), 0, prompt=ABOUT)
    answer = await seeing_api.result(promise["request_id"], **SAMPLE)
    assert "start vLLM with --enable-scale-out" in answer.text


# Training commands


async def trained_model(api: Api) -> str:
    session = (await api.post("create_session", {})).json()["session_id"]
    await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE})
    return f"{session}:train:0"


def pass_about(model: str, seq_id: int, *files: bytes) -> dict[str, Any]:
    data = [{"model_input": prompt([5], image(file), [6]), "loss_fn_inputs": {}} for file in files]
    return {
        "model_id": model,
        "seq_id": seq_id,
        "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"},
    }


async def test_a_training_body_is_stored_without_its_files(seeing_api: Api, database: Database) -> None:
    model = await trained_model(seeing_api)
    answer = await seeing_api.post("forward_backward", pass_about(model, 1, *[PICTURE] * 16, OTHER))
    assert answer.status_code == 200, answer.text
    assert (rows(database, "pictures"), rows(database, "picture_uses")) == (2, 2)
    body = max(bodies(database), key=len)
    assert base64.b64encode(PICTURE) not in body
    decoded = decode_forward_backward(body, "json", forward_only=False)
    assert [image.location for (image,) in decoded.images] == [f"sha256:{digest_of(PICTURE)}"] * 16 + [
        f"sha256:{digest_of(OTHER)}"
    ]
    again = await seeing_api.post("forward_backward", pass_about(model, 1, *[PICTURE] * 16, OTHER))
    assert again.json() == answer.json()


async def test_a_training_command_with_a_wrong_image_is_recorded_and_fails_in_its_turn(
    seeing_api: Api, database: Database, seeing: dict[str, Any]
) -> None:
    model = await trained_model(seeing_api)
    for seq_id, file in enumerate((PICTURE[:-40], b"GIF89a"), 1):
        assert (await seeing_api.post("forward_backward", pass_about(model, seq_id, file))).status_code == 200
    pictures = PassPictures(database, VisionConfig.of(seeing["base_model"]))
    messages = []
    for body in bodies(database)[-2:]:
        with pytest.raises(RequestError) as refused:
            pictures.data_of(decode_forward_backward(body, "json", forward_only=False), tenant_of(database))
        messages.append(refused.value.message)
    assert messages[0].startswith("data[0].model_input.chunks[1]: is not a complete and valid PNG file")
    assert messages[1].startswith("data[0].model_input.chunks[1]: is neither a PNG nor a JPEG file")


async def test_the_tokens_of_images_count_for_the_quota(
    serve: Serve, seeing: dict[str, Any], database: Database, drain_at_once: None
) -> None:
    async with serve(**seeing, quota_tokens_per_minute=100) as api:
        model = await trained_model(api)
        for seq_id in (1, 2):
            await api.post("forward_backward", pass_about(model, seq_id, *[PICTURE] * 10))  # 80 tokens
    query = "SELECT not_before IS NOT NULL FROM futures WHERE kind = 'FORWARD_BACKWARD' ORDER BY n"
    assert database.read(lambda c: c.exec_driver_sql(query).scalars().all()) == [0, 1]
