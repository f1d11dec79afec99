"""What the status page gets from an API process: the data of one tenant, unchanged data once, and files that load
nothing from elsewhere."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import time
from importlib.resources import files
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api, Serve, session_of
from sqlalchemy import insert, update

from skyrl import __version__
from skyrl.api.access import tenant_of_key
from skyrl.api.ui import overview, server_view
from skyrl.base.types.activity import EngineActivity, ModelActivity, WaitsFor, encode_activity
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.base.wire.paths import TinkerPath
from skyrl.storage.db import keys
from skyrl.storage.db.checkpoints import Checkpoint, put
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.engine_state import state as engine_state
from skyrl.storage.db.futures import futures
from skyrl.storage.db.keys import Scope
from skyrl.storage.db.models import models
from skyrl.storage.db.run_steps import CURVE_POINTS, SampledSums, StepSums, add_passes, add_samples, end_step
from skyrl.storage.db.samplers import samplers
from skyrl.storage.db.sessions import sessions
from skyrl.storage.db.usage import count_training
from tests.postgres_server import ON_BOTH_SLOWLY

TENANT, OTHER = tenant_of_key("tml-one"), {"X-API-Key": "tml-two"}
HTML = {"Accept": "text/html,application/xhtml+xml"}


async def ask(api: Api, path: str, status: int = 200, key: str = "tml-one") -> Any:
    answer = await api.http.get(f"/ui/api/{path}", headers={"X-API-Key": key})
    assert answer.status_code == status, answer.text
    return answer.json()


async def new_run(api: Api, name: str = "my run", **headers: str) -> str:
    """Create a model; no engine runs, so it stays in creation."""
    session = (await api.post("create_session", {}, **headers)).json()["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "user_metadata": {"name": name}}
    answer = await api.post("create_model", wanted, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["model_id"]


def train(connection: Connection, run: str, steps: int) -> None:
    metrics = {"loss:sum": 4.0, "weights:sum": 8.0, "active_tokens:sum": 8.0, "kl:sum": 1.0, "clipped:sum": 4.0}
    for _ in range(steps):
        add_passes(connection, {run: StepSums.of_pass(10, metrics)}, 0.75)
        count_training(connection, {run: 10})
        end_step(run, 0.5, 1e-4)(connection)


def save(connection: Connection, run: str, name: str) -> None:
    path = TinkerPath(run, "weights", name)
    put(connection, Checkpoint(path, TENANT, "key", None, BASE, LoraSpec(4, 32.0, 1), 123, False, None, 1.0, None))


@ON_BOTH_SLOWLY
async def test_the_page_gets_what_the_tenant_has_and_nothing_of_another(api: Api, database: Database) -> None:
    run, theirs = await new_run(api), await new_run(api, "their secret", **OTHER)
    sampler, their_sampler = await api.sampler(), await api.sampler(**OTHER)
    for each in (run, theirs):
        database.write(lambda c, each=each: train(c, each, 3))
    database.write(lambda c: save(c, run, "first"))
    state = await ask(api, "state")
    [shown] = state["runs"]
    assert (shown["id"], shown["name"], shown["steps"]) == (run, "my run", 3)
    assert {
        name: shown["last_step"][name] for name in ("step", "loss", "gap", "clip_fraction", "learning_rate", "busy_s")
    } == {
        "step": 3,
        "loss": 0.5,
        "gap": 0.125,
        "clip_fraction": 0.5,
        "learning_rate": 1e-4,
        "busy_s": 1.25,
    }
    assert shown["last_step"]["tokens_per_second"] == 10 / 1.25
    [group] = state["samplers"]
    assert (group["run"], group["open"], [one["id"] for one in group["newest"]]) == (None, 1, [sampler])
    assert [(one["path"], one["name"]) for one in state["checkpoints"]] == [(f"tinker://{run}/weights/first", "my run")]
    assert [(line["run"], line["name"], line["trained"]) for line in state["usage"]] == [(run, "my run", 30)]
    one = await ask(api, f"runs/{run}")
    everything = str(state) + str(one) + str(await ask(api, "usage")) + str(await ask(api, "box"))
    for secret in (theirs, their_sampler, session_of(their_sampler), "their secret", tenant_of_key("tml-two")):
        assert secret not in everything
    assert (await ask(api, f"runs/{theirs}", 404))["detail"] == f"run_id: no run {theirs!r}"
    assert (await ask(api, "runs/unknown", 404))["detail"] == "run_id: no run 'unknown'"


@ON_BOTH_SLOWLY
async def test_a_download_of_the_command_line_is_no_run(api: Api, database: Database) -> None:
    run, download, plain = await new_run(api, "fox"), await new_run(api), await new_run(api)

    def change(connection: Connection) -> None:
        for model, metadata in ((download, {"created_by": "tinker checkpoint download"}), (plain, None)):
            connection.execute(update(models).where(models.c.id == model).values(user_metadata=metadata))
        save(connection, download, "download")

    database.write(change)
    assert {one["id"] for one in (await ask(api, "state"))["runs"]} == {run, plain}
    assert (await ask(api, f"runs/{download}"))["id"] == download, "who knows its id may look at it"


@ON_BOTH_SLOWLY
async def test_a_checkpoint_of_a_run_that_is_not_shown_has_its_name(
    api: Api, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_RUNS", 1)
    old, new = await new_run(api, "old"), await new_run(api, "new")
    for run in (old, new):
        database.write(lambda c, run=run: save(c, run, "first"))
        database.write(lambda c, run=run: train(c, run, 1))
    database.write(lambda c: c.execute(update(models).where(models.c.id == old).values(last_request_at=1.0)))
    state = await ask(api, "state")
    assert [run["name"] for run in state["runs"]] == ["new"]
    for lines in (state["checkpoints"], state["usage"]):
        assert {line["run"]: line["name"] for line in lines} == {old: "old", new: "new"}
    monkeypatch.setattr(overview, "MAX_USAGE", 1)
    assert (await ask(api, "state"))["usage"] == state["usage"][-1:]


@ON_BOTH_SLOWLY
async def test_samplers_stand_under_their_run_the_newest_ten_and_a_count(
    api: Api, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 saves of one run hide neither the base model's samplers nor those of another run. The box counts their
    versions from time to time."""
    assert (await ask(api, "box"))["adapters"]["servable"] == 0
    many, few, first = await new_run(api, "many"), await new_run(api, "few"), await api.sampler()

    def add(connection: Connection, run: str, number: int, at: float) -> None:
        values = {"id": f"{run}:sampler:{number}", "session_id": run.partition(":")[0], "tenant": TENANT}
        values |= {"seq_id": 1_000 + number, "base_model": BASE, "weights": AdapterVersion.of(run, number)}
        values |= {"status": "active", "created_at": at, "last_used_at": at}
        connection.execute(insert(samplers).values(**values))

    def add_all(connection: Connection) -> None:
        now = time.time()
        for number in range(1, 201):
            add(connection, many, number, now + number)
        for number in (1, 2):
            add(connection, few, number, now - number)
        sample = {"id": "sample", "kind": "EXTERNAL", "tenant": TENANT, "session_id": many.partition(":")[0]}
        sample |= {"sampling_session_id": f"{many}:sampler:3", "sample_seq_id": 0, "digest": b"", "body_format": "json"}
        connection.execute(insert(futures).values(**sample, status="pending", created_at=now))

    database.write(add_all)
    assert (await ask(api, "box"))["adapters"]["servable"] == 0
    monkeypatch.setattr(server_view, "COUNT_S", 0.0)
    assert (await ask(api, "box"))["adapters"]["servable"] == 202
    shown = (await ask(api, "state"))["samplers"]
    assert [(group["name"], group["open"], group["in_flight"]) for group in shown] == [
        ("many", 200, 1),
        (None, 1, 0),
        ("few", 2, 0),
    ]
    versions = [[one["weights"] for one in group["newest"]] for group in shown]
    assert versions[0] == [f"{many}@{number}" for number in range(200, 190, -1)]
    assert [one["id"] for one in shown[1]["newest"]] == [first]
    assert versions[2] == [f"{few}@1", f"{few}@2"]


@ON_BOTH_SLOWLY
async def test_the_curve_of_a_run_has_its_whole_history_in_few_points(api: Api, database: Database) -> None:
    long, short, none = await new_run(api, "long"), await new_run(api, "short"), await new_run(api, "none")

    def train_both(connection: Connection) -> None:
        for number in range(1, 201):
            add_passes(connection, {long: StepSums.of_pass(10, {"loss:sum": 8.0 * number, "weights:sum": 8.0})}, 1.5)
            end_step(long, 0.5)(connection)
        train(connection, short, 3)
        end_step(short, 0.25)(connection)  # a step without a pass

    database.write(train_both)
    runs = {run["id"]: run["curve"] for run in (await ask(api, "state"))["runs"]}
    assert len(runs[long]["step"]) == CURVE_POINTS
    assert (runs[long]["step"][0], runs[long]["step"][-1]) == (5, 200)
    assert (runs[long]["loss"][0], runs[long]["loss"][-1]) == (3.0, 198.0), "the mean of five steps"
    assert runs[short] == {
        "step": [1, 2, 3, 4],
        "loss": [0.5, 0.5, 0.5, None],
        "gap": [0.125, 0.125, 0.125, None],
    }
    assert runs[none] == {"step": [], "loss": [], "gap": []}


async def test_the_runs_with_the_newest_requests_alone_have_curves_and_a_health(
    api: Api, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_CURVES", 1)
    old, new = await new_run(api), await new_run(api)
    for run in (old, new):
        database.write(lambda c, run=run: train(c, run, 2))
    database.write(lambda c: c.execute(update(models).where(models.c.id == old).values(last_request_at=1.0)))
    state = await ask(api, "state")
    assert {run["id"]: run["curve"]["step"] for run in state["runs"]} == {new: [1, 2], old: []}
    assert {run["id"]: run["health"] is not None for run in state["runs"]} == {new: True, old: False}


@ON_BOTH_SLOWLY
async def test_a_run_that_leaves_its_usual_says_so_in_the_same_words_everywhere(api: Api, database: Database) -> None:
    run, young = await new_run(api), await new_run(api)

    def sample_and_train(connection: Connection) -> None:
        for number in range(36):
            sums = SampledSums(samples=20, truncated=1 if number < 30 else 9, surprise_sum=24.0, surprise_tokens=20)
            add_samples(connection, {(run, TENANT): sums})
            train(connection, run, 1)

    database.write(sample_and_train)
    health = {one["id"]: one["health"] for one in (await ask(api, "state"))["runs"]}
    assert health[young] == {"state": "too early", "sentences": [], "time": None}
    assert health[run]["state"] == "unusual"
    sentence = "truncated samples rose from 5 % to 45 % since step 31: max_tokens may be too small, or answers grow"
    [gap, truncated] = health[run]["sentences"]
    assert gap.startswith("the gap between sampler and trainer is 0.12 nats")
    assert truncated.startswith(sentence)
    shown = (await ask(api, f"runs/{run}"))["health"]
    assert [shown[name] for name in ("state", "sentences", "time")] == [*health[run].values()]
    lines = {line["name"]: (line["text"], line["usual"]) for line in shown["lines"]}
    assert lines["truncated samples"] == ("45 %", "5 %")
    assert lines["entropy of samples"] == ("1.20 nats", "1.20 nats")
    [reward] = [line for line in shown["lines"] if line["name"] == "reward"]
    assert (reward["value"], reward["text"]) == (None, "not known")
    assert reward["missing"].startswith("the server gets rewards only of agents' sessions")


@ON_BOTH_SLOWLY
async def test_a_run_has_its_history_and_checkpoints(api: Api, database: Database) -> None:
    run, other = await new_run(api), await new_run(api)
    database.write(lambda c: train(c, run, 4))
    for name in ("first", "second"):
        database.write(lambda c, name=name: save(c, run, name))
    database.write(lambda c: save(c, other, "of another run"))
    shown = await ask(api, f"runs/{run}")
    assert [step["step"] for step in shown["history"]] == [1, 2, 3, 4]
    assert {saved["run"] for saved in shown["checkpoints"]} == {run}
    assert len(shown["checkpoints"]) == 2
    assert [(line["run"], line["trained"]) for line in shown["usage"]] == [(run, 40)]
    later = await ask(api, f"runs/{run}?after=3")
    assert [step["step"] for step in later["history"]] == [4]
    assert (await ask(api, f"runs/{run}?after=-1", 400))["field"] == "after"


async def test_an_unchanged_state_is_sent_once(api: Api, database: Database) -> None:
    run = await new_run(api)
    end = {"status": "closed", "last_request_at": time.time() - 5 * 3600}  # its sentence then changes in 6 minutes
    database.write(lambda c: c.execute(update(models).values(end)))
    for path in ("state", f"runs/{run}", "usage"):
        first = await api.http.get(f"/ui/api/{path}")
        again = await api.http.get(f"/ui/api/{path}", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), path
    first = await api.http.get("/ui/api/state")
    database.write(lambda c: train(c, run, 1))
    changed = await api.http.get("/ui/api/state", headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200
    assert changed.json()["runs"][0]["steps"] == 1


async def test_usage_can_be_loaded_as_csv(api: Api, database: Database) -> None:
    run = await new_run(api)
    database.write(lambda c: train(c, run, 2))
    answer = await api.http.get("/ui/api/usage", params={"format": "csv", "days": 366})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    [line] = csv.DictReader(io.StringIO(answer.text))
    assert (line["run"], line["base_model"], line["trained"], line["sampled"]) == (run, BASE, "20", "0")
    assert (await ask(api, "usage?days=0", 400))["field"] == "days"
    assert (await ask(api, "usage?days=367", 400))["field"] == "days"


@pytest.fixture
def beat(database: Database) -> None:
    """The engine has been heard of now."""
    database.write(lambda c: c.execute(update(engine_state).values(heartbeat_at=time.time())))


def state_of(runs: list[dict[str, Any]], run: str) -> tuple[str, str]:
    [found] = [(one["state"], one["sentence"]) for one in runs if one["id"] == run]
    return found


@pytest.mark.usefixtures("beat")
async def test_a_run_says_where_it_stands(api: Api, database: Database) -> None:
    names = ("works", "waits", "idle", "gone", "left", "computes", "ended", "failed")
    runs = {name: await new_run(api, name) for name in names}
    now = time.time()
    activity = EngineActivity(
        {
            runs["works"]: ModelActivity(TENANT, WaitsFor.NOTHING, now - 8, "FORWARD_BACKWARD", 3, 0),
            runs["waits"]: ModelActivity(TENANT, WaitsFor.GAP, now - 8, "OPTIM_STEP", 4, 2),
            runs["left"]: ModelActivity(TENANT, WaitsFor.GAP, now - 90, "OPTIM_STEP", 4, 2),
            runs["computes"]: ModelActivity(TENANT, WaitsFor.NOTHING, now - 90, "FORWARD_BACKWARD", 3, 0),
        }
    )

    def change(connection: Connection) -> None:
        connection.execute(update(engine_state).values(activity=encode_activity(activity)))
        for name in ("idle", "gone", "ended"):
            old = update(models).where(models.c.id == runs[name]).values(last_request_at=now - 60)
            connection.execute(old)
        for name, status in (("ended", "closed"), ("failed", "failed")):
            connection.execute(update(models).where(models.c.id == runs[name]).values(status=status))
        silent = [runs[name].partition(":")[0] for name in ("gone", "left", "computes")]
        connection.execute(update(sessions).where(sessions.c.id.in_(silent)).values(heartbeat_at=now - 100))

    database.write(change)
    state = await ask(api, "state")
    shown = state["runs"]
    said = {name: state_of(shown, run) for name, run in runs.items()}
    assert {name: state for name, (state, _) in said.items()} == {
        "works": "working",
        "waits": "waiting",
        "idle": "idle",
        "gone": "finished or gone",
        "left": "finished or gone",
        "computes": "working",
        "ended": "ended",
        "failed": "failed",
    }
    assert "forward_backward" in said["works"][1]
    assert "command 4 of this model has not arrived" in said["waits"][1]
    assert said["idle"][1].startswith("the client sent its last command 6")
    assert "was last heard of 10" in said["gone"][1]
    assert "and waits for nothing; its session ends in 3 min" in said["gone"][1]
    assert (state["stuck"], state["slow"]) == ([], []), "a client that has gone silent is no reason for an alarm"


@pytest.mark.usefixtures("beat")
async def test_a_dead_engine_is_the_reason_for_server_and_runs(api: Api, database: Database) -> None:
    run = await new_run(api)
    assert (await ask(api, "state"))["server"] == {
        "version": __version__,
        "ready": True,
        "reasons": [],
        "scopes": ["admin", "sample", "train"],
    }
    database.write(lambda c: c.execute(update(engine_state).values(heartbeat_at=time.time() - 40)))
    api.services.served[0].readiness._readiness._found = None  # readiness is looked up once a second
    state = await ask(api, "state")
    assert state["server"]["ready"] is False
    silent = re.compile("the engine was last heard of 4[0-9] s ago")  # some of them have passed since
    assert silent.search(state["server"]["reasons"][0])
    assert state_of(state["runs"], run)[0] == "waiting"
    [stuck] = state["stuck"]
    assert stuck["sentence"].startswith("nothing can be trained now: the engine was last heard of 4")
    assert silent.search(stuck["sentence"])
    assert silent.search(state_of(state["runs"], run)[1])
    box = await ask(api, "box")
    assert "last heard of" in box["trainer"]["trouble"]
    assert box["pending"] == {"CREATE_MODEL": 1}


@pytest.mark.usefixtures("beat")
async def test_nothing_is_stuck_while_requests_are_young(api: Api, database: Database) -> None:
    await new_run(api)
    state = await ask(api, "state")
    assert state["stuck"] == []
    assert (state["pending"]["number"], state["pending"]["oldest_kind"]) == (1, "CREATE_MODEL")
    assert time.time() - state["pending"]["oldest_since"] < 60
    assert (await ask(api, "state", key="tml-two"))["pending"] == {
        "number": 0,
        "oldest_kind": None,
        "oldest_since": None,
    }


@pytest.mark.usefixtures("beat")
async def test_an_old_request_and_a_command_that_waits_for_the_client_are_stuck(api: Api, database: Database) -> None:
    old, gap, theirs = await new_run(api), await new_run(api), await new_run(api, **OTHER)
    now = time.time()
    waits = {run: ModelActivity(who, WaitsFor.GAP, now - 60, "OPTIM_STEP", 4, 2) for run, who in ((gap, TENANT),)}
    waits[theirs] = ModelActivity(tenant_of_key("tml-two"), WaitsFor.GAP, now - 60, "OPTIM_STEP", 4, 2)

    def change(connection: Connection) -> None:
        text = encode_activity(EngineActivity(waits))
        connection.execute(update(engine_state).values(activity=text))
        connection.execute(update(futures).where(futures.c.model_id == old).values(created_at=now - 400))

    database.write(change)
    state = await ask(api, "state")
    assert [(one["run"], one["since"]) for one in state["stuck"]] == [(gap, now - 60), (old, now - 400)]
    assert "command 4 of this model has not arrived" in state["stuck"][0]["sentence"]
    assert state["stuck"][1]["sentence"] == "create_model has not begun"
    assert (state["pending"]["number"], state["pending"]["oldest_since"]) == (2, now - 400)


async def test_only_a_key_with_the_scope_admin_sees_the_box(serve: Serve, database: Database) -> None:
    def make(scope: Scope) -> str:
        text, _ = database.write(lambda c: keys.create(c, tenant=None, name="k", scopes=[scope], expires_at=None))
        return text

    trainer, admin = make("train"), make("admin")
    async with serve(api_keys="managed") as api:
        for key, scope in ((trainer, "train"), (admin, "admin")):
            assert (await ask(api, "state", key=key))["server"]["scopes"] == [scope]
        assert "scope 'admin'" in (await ask(api, "box", 403, key=trainer))["detail"]
        box = await ask(api, "box", key=admin)
        assert {"server", "trainer", "pending", "models", "adapters", "disk", "database_bytes"} <= box.keys()
        assert "unknown here" in (await ask(api, "state", 401, key="tml-nobodys"))["detail"]


async def test_browsers_are_led_to_the_page_and_programs_are_not(api: Api) -> None:
    led = await api.http.get("/", headers=HTML)
    assert (led.status_code, led.headers["location"], led.headers["vary"]) == (307, "ui", "Accept")
    for accept in ("*/*", "application/json"):
        assert (await api.http.get("/", headers={"Accept": accept})).json()["paths"]["page"] == "/ui"


PAGE_FILES = sorted(
    file.name for file in files("skyrl.api.ui").iterdir() if file.name.endswith((".html", ".js", ".css"))
)


def loaded(answer: httpx.Response) -> set[str]:
    """Files that a file of the page loads."""
    return set(re.findall(r'(?:(?:href|src)="ui|from "\.)/([\w.]+)"', answer.text))


async def test_the_page_and_its_files_need_no_key_and_load_only_each_other(api: Api) -> None:
    del api.http.headers["X-API-Key"]
    found, waiting = {"index.html"}, {"/ui"}
    while waiting:
        path = waiting.pop()
        answer = await api.http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        waiting |= {f"/ui/{name}" for name in loaded(answer) - found}
        found |= loaded(answer)
    assert sorted(found) == PAGE_FILES
    for unknown in ("nothing.js", "__init__.py", "..%2f__init__.py"):
        assert (await api.http.get(f"/ui/{unknown}")).status_code == 404


VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""Files of uPlot 1.6.32 as npm has them, with their SHA-256."""


@pytest.mark.parametrize("name", VENDORED)
def test_a_file_of_uplot_is_the_published_one_and_its_licence_is_beside_it(name: str) -> None:
    directory = files("skyrl.api.ui")
    assert hashlib.sha256(directory.joinpath(name).read_bytes()).hexdigest() == VENDORED[name]
    assert directory.joinpath("uPlot.LICENSE").read_text().startswith("The MIT License (MIT)")


@pytest.mark.parametrize("name", [name for name in PAGE_FILES if name not in VENDORED])
def test_a_file_of_the_page_writes_text_only_as_text(name: str) -> None:
    text = files("skyrl.api.ui").joinpath(name).read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage|document\.cookie"
    )
    assert re.findall(forbidden, text) == []
    assert re.findall(r"(?:https?:)?//[\w-]+\.", text) == [], "nothing comes from elsewhere"
    assert re.findall(r"<script>|\son\w+=|\sstyle=|<style", text) == [], "the content policy would refuse it"


async def test_the_box_shows_the_numbers_of_each_inference_server(api: Api) -> None:
    assert (await api.http.get("/ui/api/box")).json()["vllm"] == []
    lines = [
        f'vllm:{name}{{engine="0",replica="1"}} {value}'
        for name, value in (("kv_cache_usage_perc", 0.25), ("num_requests_running", 3.0), ("num_requests_waiting", 1.0))
    ]
    lines += [
        f'vllm:skyrl_{name}{{engine="0",reason="{reason}",replica="1"}} {value}'
        for name, reason, value in (
            ("requests_waiting", "cache", 2.0),
            ("requests_waiting", "seats", 1.0),
            ("requests_waiting", "turn", 0.0),
            ("waiting_bound", "cache", 32768.0),
            ("waiting_bound", "seats", 256.0),
        )
    ]
    heads = [f"# TYPE {line.partition('{')[0]} gauge\n{line}\n" for line in lines]
    api.services.published_metrics.write("vllm-1", "".join(heads))
    shown = (await api.http.get("/ui/api/box")).json()["vllm"]
    why = [
        "2 wait for room in the key-value cache, 32,768 tokens, which also keeps some for the answers that run",
        "1 waits for an end among 256 running requests (max_num_seqs)",
    ]
    assert shown == [{"replica": 1, "kv_use": 0.25, "running": 3.0, "waiting": 1.0, "why": why}]


HEAD = "# HELP skyrl_samples_held_back x\n# TYPE skyrl_samples_held_back gauge\n"


async def test_the_box_shows_how_many_samples_wait_to_be_sent_in_all_processes(api: Api) -> None:
    assert (await api.http.get("/ui/api/box")).json()["held_back"] == 0
    for process in (1, 2):
        line = f'skyrl_samples_held_back{{process="api-{process}"}} {process}.0\n'
        api.services.published_metrics.write(f"api-{process}", f"{HEAD}{line}")
    assert (await api.http.get("/ui/api/box")).json()["held_back"] == 3
