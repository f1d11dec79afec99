"""An API process of a server with several base models: each request goes to the one that it names, and one that is
away is nobody else's business."""

from __future__ import annotations

import time
from pathlib import Path

import openai_requests
import pytest
from api_harness import Api, sample_body, tokens
from fake_upstream import FakeUpstream
from two_models import ENTRIES, JUDGE, STUDENT, TEACHER, serving

from skyrl.api.access import tenant_of_key
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.paths import CheckpointKind, parse_path
from skyrl.storage.db.checkpoints import Checkpoint, put
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training, publish_url
from tests.postgres_server import ON_BOTH


async def session(api: Api) -> str:
    return (await api.post("create_session", {})).json()["session_id"]


async def sampler_of(api: Api, session_id: str, base_model: str, seq_id: int) -> str:
    wanted = {"session_id": session_id, "sampling_session_seq_id": seq_id, "base_model": base_model}
    answer = await api.post("create_sampling_session", wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()["sampling_session_id"]


@ON_BOTH
async def test_each_sample_goes_to_the_vllm_of_its_base_model(
    two_models: Api, upstreams: dict[str, FakeUpstream]
) -> None:
    mine = await session(two_models)
    for number, (asked, base_model) in enumerate([("student", STUDENT), (TEACHER, TEACHER), (JUDGE, JUDGE)]):
        before = {name: len(server.requests) for name, server in upstreams.items()}
        promise = await two_models.sample(await sampler_of(two_models, mine, asked, number), 0)
        assert tokens(await two_models.result(promise["request_id"]))
        got = {name for name, server in upstreams.items() if len(server.requests) > before[name]}
        assert got == {base_model}
        assert upstreams[base_model].requests[-1].json["model"] == base_model


async def test_a_request_without_a_model_must_name_one(two_models: Api) -> None:
    answer = await two_models.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
    for name in ("student", TEACHER, JUDGE):
        assert name in answer.json()["error"]["message"]


async def test_token_ids_are_checked_against_the_vocabulary_of_the_base_model(two_models: Api) -> None:
    mine = await session(two_models)
    student, teacher = await sampler_of(two_models, mine, STUDENT, 0), await sampler_of(two_models, mine, TEACHER, 1)
    taken = await two_models.post("asample", sample_body(student, 0, prompt=[999]))
    assert taken.status_code == 200
    refused = await two_models.post("asample", sample_body(teacher, 0, prompt=[999]))
    assert refused.status_code == 400
    assert "999 is not in [0, 50)" in refused.text


async def test_a_base_model_that_is_away_stops_no_sample_of_another(
    two_models: Api, shared: Database, upstreams: dict[str, FakeUpstream]
) -> None:
    mine = await session(two_models)
    teacher = await sampler_of(two_models, mine, TEACHER, 0)
    shared.write(lambda c: publish_url(c, None, STUDENT))
    waiting = await two_models.sample(await sampler_of(two_models, mine, STUDENT, 1), 0)
    promise = await two_models.sample(teacher, 0)
    assert tokens(await two_models.result(promise["request_id"]))
    shared.write(lambda c: publish_url(c, upstreams[STUDENT].url, STUDENT))
    assert tokens(await two_models.result(waiting["request_id"]))


async def test_readyz_is_ready_while_one_base_model_is_and_names_the_others(two_models: Api, shared: Database) -> None:
    shared.write(lambda c: publish_training(c, ready=False, reason="its files are gone", key=STUDENT))
    answer = await two_models.http.get("/readyz")
    assert answer.status_code == 200
    told = answer.json()
    assert told["ready"] is True
    assert told["reasons"] == [f"{STUDENT}: training: its files are gone"]
    assert [told["base_models"][name]["ready"] for name in (STUDENT, TEACHER, JUDGE)] == [False, True, True]


async def test_capabilities_and_the_openai_list_have_all_base_models(two_models: Api) -> None:
    told = (await two_models.http.get("/api/v1/get_server_capabilities")).json()["supported_models"]
    assert {model["model_name"]: model["trainable"] for model in told} == {
        STUDENT: True,
        "student": True,
        TEACHER: False,
        JUDGE: False,
    }
    listed = (await two_models.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == [STUDENT, "student", TEACHER, JUDGE]


async def test_openai_requests_go_to_the_base_model_that_they_name(
    two_models: Api, upstreams: dict[str, FakeUpstream]
) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    for name in (TEACHER, JUDGE):
        upstreams[name].default = openai_requests.complete
        await two_models.http.post("/v1/completions", json=body | {"model": name})
        assert upstreams[name].requests[-1].json["model"] == name
    refused = await two_models.http.post("/v1/completions", json=body | {"model": TEACHER, "prompt": [999]})
    assert refused.status_code == 400
    assert "[0, 50)" in refused.text


@pytest.mark.parametrize(
    ("base_model", "status", "message"),
    [
        (TEACHER, 400, f"{TEACHER!r} is only sampled from here; base models that train: {STUDENT}, student"),
        ("acme/none", 400, f"'acme/none' is not served here; there is: {STUDENT}, student, {TEACHER}, {JUDGE}"),
    ],
)
async def test_a_model_that_cannot_be_trained_here_is_refused_with_those_that_can(
    two_models: Api, base_model: str, status: int, message: str
) -> None:
    wanted = {"session_id": await session(two_models), "model_seq_id": 0, "base_model": base_model}
    answer = await two_models.post("create_model", wanted)
    assert (answer.status_code, answer.json()["detail"]) == (status, f"base_model: {message}")


async def test_a_checkpoint_belongs_to_the_base_model_that_it_was_trained_from(
    two_models: Api, shared: Database
) -> None:
    mine = await session(two_models)
    for kind in ("weights", "sampler_weights"):
        shared.write(lambda c, kind=kind: put(c, checkpoint(kind)))
    wanted = {"session_id": mine, "sampling_session_seq_id": 0, "model_path": str(checkpoint("sampler_weights").path)}
    refused = await two_models.post("create_sampling_session", wanted | {"base_model": TEACHER})
    assert (refused.status_code, refused.json()["detail"]) == (
        400,
        f"base_model: {wanted['model_path']} was trained from {STUDENT!r}",
    )
    new = {"session_id": mine, "model_seq_id": 3, "path": str(checkpoint("weights").path), "base_model": TEACHER}
    refused = await two_models.post("load_weights", new)
    assert refused.status_code == 400
    assert f"{TEACHER!r} is only sampled from here" in refused.text


def checkpoint(kind: CheckpointKind) -> Checkpoint:
    """A checkpoint of the student; nobody reads its files."""
    adapter = AdapterVersion.of("run", 1) if kind == "sampler_weights" else None
    path, tenant = parse_path(f"tinker://run/{kind}/saved"), tenant_of_key("tml-one")
    lora = LoraSpec(rank=8, alpha=32.0, seed=1)
    return Checkpoint(path, tenant, f"run/{kind}", adapter, STUDENT, lora, 10, False, None, time.time(), None)


async def test_a_sample_of_a_base_model_that_is_gone_fails_with_the_list(
    shared: Database, tmp_path: Path, upstreams: dict[str, FakeUpstream]
) -> None:
    """The operator has left a base model out at a restart."""
    async with serving(shared, tmp_path, ENTRIES) as api:
        mine = await session(api)
        teacher = await sampler_of(api, mine, TEACHER, 0)
    second = {"base_model": "acme/second", "uses": ["sample"], "external_inference_url": upstreams[JUDGE].url}
    async with serving(shared, tmp_path, [ENTRIES[0], second]) as api:
        answer = await api.post("asample", sample_body(teacher, 0))
        assert answer.status_code == 400
        assert f"belongs to the base model {TEACHER!r}, which is not served here any more" in answer.text


async def test_a_sample_that_was_pending_at_a_restart_goes_to_its_own_base_model(
    shared: Database, tmp_path: Path, upstreams: dict[str, FakeUpstream], drain_at_once: None
) -> None:
    async with serving(shared, tmp_path, ENTRIES) as api:
        mine = await session(api)
        teacher = await sampler_of(api, mine, TEACHER, 0)
        shared.write(lambda c: publish_url(c, None, TEACHER))
        promise = await api.sample(teacher, 0)
    shared.write(lambda c: publish_url(c, upstreams[TEACHER].url, TEACHER))
    async with serving(shared, tmp_path, ENTRIES) as api:
        assert tokens(await api.result(promise["request_id"]))
    assert len(upstreams[TEACHER].requests) > 0
    assert upstreams[STUDENT].requests == []
