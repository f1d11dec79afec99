"""What the status page gets from an API process with several base models: each stands for itself, and what is of the
server is said once."""

from __future__ import annotations

import time
from typing import Any

from api_harness import Api
from two_models import JUDGE, STUDENT, TEACHER

from skyrl.api.access import tenant_of_key
from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor, encode_activity
from skyrl.inference.metrics import shown
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import beat, publish_training, publish_url
from skyrl.storage.db.futures import futures
from tests.postgres_server import ON_BOTH

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


@ON_BOTH
async def test_what_stands_still_is_said_with_its_base_model_and_hides_nothing_of_another(
    two_models: Api, shared: Database
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
    assert [model["vllm"] for model in models.values()] == [[{"replica": 0, "running": n}] for n in (0, 1, 2)]
    assert [model["inference"]["published"] for model in models.values()] == [True, True, False]
    assert set(box) == {
        "server",
        "base_models",
        "api_processes",
        "pending",
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
