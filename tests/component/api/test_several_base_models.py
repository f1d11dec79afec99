"""An API process of a server with several base models: each request goes to the one that it names, and the status page
has each of them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai_requests
import pytest
from api_harness import Api, Serve, sample_body, tokens
from fake_upstream import FakeUpstream
from two_models import ENTRIES, JUDGE, STUDENT, TEACHER, serving

from skyrl.api.access import tenant_of_key
from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor, encode_activity
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.paths import CheckpointKind, parse_path
from skyrl.inference.metrics import shown
from skyrl.storage.db.checkpoints import Checkpoint, put
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import beat, publish_training, publish_url
from skyrl.storage.db.futures import futures
from tests.postgres_server import ON_BOTH_SLOWLY


async def session(api: Api) -> str:
    return (await api.post("create_session", {})).json()["session_id"]


async def sampler_of(api: Api, session_id: str, base_model: str, seq_id: int) -> str:
    wanted = {"session_id": session_id, "sampling_session_seq_id": seq_id, "base_model": base_model}
    answer = await api.post("create_sampling_session", wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()["sampling_session_id"]


@ON_BOTH_SLOWLY
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


TOKENS = {STUDENT: "abcd", TEACHER: "abcd", JUDGE: "wxyz!"}
SENTENCE = (
    f"this session trains {STUDENT!r} and samples from {JUDGE!r}, whose tokenizers differ: 0 of 5 token ids mean the "
    "same in both, and no other id may go from one to the other"
)


@pytest.fixture
async def tokenized(shared: Database, tmp_path: Path, upstreams: dict[str, FakeUpstream]) -> AsyncIterator[Api]:
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


async def test_whichever_comes_second_the_session_is_told(tokenized: Api) -> None:
    first, second = await session(tokenized), await session(tokenized)
    assert await train(tokenized, first, "student") is None
    assert await sample(tokenized, first, JUDGE) == SENTENCE
    assert await sample(tokenized, second, JUDGE) is None
    assert await train(tokenized, second, STUDENT) == SENTENCE


async def test_a_teacher_with_the_students_tokenizer_is_no_news(tokenized: Api) -> None:
    mine = await session(tokenized)
    assert await train(tokenized, mine, STUDENT) is None
    assert await sample(tokenized, mine, TEACHER) is None
    assert await sample(tokenized, mine, STUDENT, 1) is None


async def test_a_session_that_only_samples_is_told_nothing(tokenized: Api) -> None:
    mine = await session(tokenized)
    await train(tokenized, await session(tokenized), STUDENT)
    assert [await sample(tokenized, mine, name, number) for number, name in enumerate((TEACHER, JUDGE))] == [None, None]


async def test_a_token_id_outside_of_the_vocabulary_names_the_base_model(tokenized: Api) -> None:
    mine = await session(tokenized)
    sampler = {"session_id": mine, "sampling_session_seq_id": 0, "base_model": TEACHER}
    teacher = (await tokenized.post("create_sampling_session", sampler)).json()["sampling_session_id"]
    reason = f"[0, 50), the vocabulary of {TEACHER!r}: the id may come from another base model's tokenizer"
    target = {"data": [50, 1], "dtype": "int64", "shape": [2, 1]}
    refused = {
        f"prompt: token id 999 is not in {reason}": {"prompt": [1, 999]},
        f"target_prompt_logprobs: token id 50 is neither -1 nor in {reason}": {"target_prompt_logprobs": target},
    }
    for message, changes in refused.items():
        answer = await tokenized.post("asample", sample_body(teacher, 0, **changes))
        assert (answer.status_code, answer.json()["detail"]) == (400, message)
    answer = await tokenized.http.post("/v1/completions", json={"model": TEACHER, "prompt": [999], "max_tokens": 1})
    assert answer.json()["error"]["message"].endswith(f"token id 999 is not in {reason}")


async def test_a_server_with_one_base_model_names_none(serve: Serve) -> None:
    async with serve() as one:
        answer = await one.post("asample", sample_body(await one.sampler(), 0, prompt=[1, 1000]))
    assert answer.json()["detail"] == "prompt: token id 1000 is not in [0, 1000)"


TENANT = tenant_of_key("tml-one")
OLD_S = 1000.0


async def ask(api: Api, path: str) -> Any:
    for model in api.services.served:  # readiness is looked up once a second
        model.readiness._readiness._found = None
    answer = await api.http.get(f"/ui/api/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def new_run(api: Api) -> str:
    session = (await api.post("create_session", {})).json()["session_id"]
    answer = await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": STUDENT})
    assert answer.status_code == 200, answer.text
    return answer.json()["model_id"]


async def test_each_base_model_has_its_use_and_its_reasons(two_models: Api, shared: Database) -> None:
    reason = "base_model: there is no directory /models/student"
    shared.write(lambda c: publish_training(c, ready=False, reason=reason, key=STUDENT))
    server = (await ask(two_models, "state"))["server"]
    assert server["ready"] is True
    assert server["base_models"] == [
        {"name": STUDENT, "uses": ["train", "sample"], "ready": False, "reasons": [f"training: {reason}"]},
        {"name": TEACHER, "uses": ["sample"], "ready": True, "reasons": []},
        {"name": JUDGE, "uses": ["sample"], "ready": True, "reasons": []},
    ]
    assert (await ask(two_models, f"runs/{await new_run(two_models)}"))["server"] == server


@ON_BOTH_SLOWLY
async def test_what_stands_still_is_said_with_its_base_model_and_hides_nothing_of_another(
    drain_at_once: None, two_models: Api, shared: Database
) -> None:
    """The teacher's vLLM is away: its old sample is not named, and the student's is."""
    run = await new_run(two_models)
    waits = ModelActivity(TENANT, WaitsFor.GAP, time.time() - 60, "OPTIM_STEP", 4, 2)
    shared.write(lambda c: beat(c, encode_activity(EngineActivity({run: waits})), STUDENT))
    for name in (STUDENT, TEACHER):
        shared.write(lambda c, name=name: publish_url(c, None, name))
        await two_models.sample(await two_models.sampler(base_model=name), 0)
    shared.write(lambda c: c.execute(futures.update().values(created_at=time.time() - OLD_S)))
    shared.write(lambda c: publish_url(c, "http://127.0.0.1:9", STUDENT))
    state = await ask(two_models, "state")
    assert [(one["run"], one["sentence"]) for one in state["stuck"]] == [
        (run, state["runs"][0]["sentence"]),
        (None, f"{TEACHER}: nothing can be sampled now: no inference server has been published"),
    ]
    assert [one["sentence"] for one in state["slow"]] == [f"{STUDENT}: 1 sample in flight has no result yet"]
    assert "command 4 of this model has not arrived" in state["runs"][0]["sentence"]
    assert state["pending"]["number"] == 3, "of all base models together"


async def test_the_box_has_the_parts_of_each_base_model(two_models: Api, shared: Database) -> None:
    shared.write(lambda c: beat(c, encode_activity(EngineActivity(run_s={"STEP": 2.0})), STUDENT))
    text = "# HELP vllm:num_requests_running R.\n# TYPE vllm:num_requests_running gauge\n"
    for number, model in enumerate(two_models.services.served):
        line = f'{text}vllm:num_requests_running{{engine="0",model_name="m"}} {number}\n'
        role = model.config.role
        two_models.services.published_metrics.write(f"{role.process('vllm')}-0", shown(line, 0, role.labels))
    box = await ask(two_models, "box")
    models = {model["name"]: model for model in box["base_models"]}
    assert list(models) == [STUDENT, TEACHER, JUDGE]
    assert models[STUDENT]["trainer"]["run_s"] == {"STEP": 2.0}
    assert [models[name]["trainer"] for name in (TEACHER, JUDGE)] == [None, None]
    assert [model["vllm"] for model in models.values()] == [
        [{"replica": 0, "why": [], "running": n}] for n in (0, 1, 2)
    ]
    assert [model["inference"]["published"] for model in models.values()] == [True, True, False]
    assert set(box) == {
        "server",
        "base_models",
        "api_processes",
        "pending",
        "held_back",
        "quotas",
        "disk",
        "database_bytes",
    }, "what belongs to a base model stands there alone"
    assert [model["ready"] for model in models.values()] == [True, True, True]


async def test_the_page_of_one_base_model_names_none(api: Api) -> None:
    box = await ask(api, "box")
    assert "base_models" not in box
    assert "base_models" not in box["server"]
    assert {"trainer", "inference", "models", "adapters", "vllm"} <= set(box)


async def test_usage_is_counted_for_each_base_model(two_models: Api) -> None:
    for name in (STUDENT, TEACHER):
        promise = await two_models.sample(await two_models.sampler(base_model=name), 0)
        assert (await two_models.result(promise["request_id"])).status_code == 200
    await two_models.usage.flush()
    lines = {line["base_model"]: line["sampled"] for line in (await ask(two_models, "usage"))["usage"]}
    assert lines == {STUDENT: 3, TEACHER: 3}
