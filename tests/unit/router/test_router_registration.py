"""The routes of registration in each dialect, called as the proxy calls them."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from skyrl.http.messages import Reply
from skyrl.router.policies import LeastInFlight
from skyrl.router.pool import WorkerPool
from skyrl.router.registration import MAX_LABEL_BYTES, RegistrationRoutes, is_registration

URL = "http://10.0.0.1:3000"


class Caller:
    """Calls routes of a new pool. `sent` is bytes, or what is sent as JSON."""

    def __init__(self, max_workers: int = 8) -> None:
        self.pool = WorkerPool(LeastInFlight(), max_workers=max_workers)
        self._routes = RegistrationRoutes(self.pool)

    def reply(self, method: str, target: str, sent: Any = b"") -> Reply:
        path, _, query = target.partition("?")
        body = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        return self._routes.answer(method, path, query.encode(), body)

    def __call__(self, method: str, target: str, sent: Any = b"") -> tuple[int, Any]:
        reply = self.reply(method, target, sent)
        assert reply.headers[0] == (b"content-type", b"application/json")
        return reply.status, json.loads(reply.body)

    def urls(self) -> list[str]:
        return [worker.url for worker in self.pool.workers]


@pytest.fixture
def call() -> Caller:
    return Caller()


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        (f"/add_worker?url={quote(URL, safe='')}/", b""),
        (f"/add_worker?worker_url={URL}", b"not read"),
        ("/add_worker", {"url": URL + "/"}),
        ("/add_worker", {"worker_url": URL.upper()}),
        ("/add_worker", {"url": URL, "worker_url": URL}),
        (f"/workers?url={URL}", b""),
        ("/workers", {"url": URL, "worker_type": "regular"}),
        ("/workers", {"worker_url": URL, "capabilities": ["chat"], "bootstrap_port": None, "api_key": None}),
    ],
)
def test_every_form_of_registration(call: Caller, target: str, sent: Any) -> None:
    for _ in range(2):
        status, answer = call("POST", target, sent)
        assert status == (200 if target.startswith("/add") else 202)
        assert answer["worker_id"] == call.pool.workers[0].id
    assert call.urls() == [URL]


def test_the_answers_of_a_registration(call: Caller) -> None:
    call.pool.begin(call.pool.add("http://other"))
    _, old = call("POST", "/add_worker", {"url": URL})
    assert (old["status"], old["worker_urls"]) == ("success", {"http://other": 1, URL: 0})
    reply = call.reply("POST", "/workers", {"url": URL})
    new = json.loads(reply.body)
    assert (new["status"], new["url"]) == ("accepted", URL)
    assert new["location"] == f"/workers/{new['worker_id']}"
    assert dict(reply.headers)[b"location"].decode() == new["location"]
    assert new["worker"]["id"] == new["worker_id"]
    assert call("GET", new["location"]) == (200, new["worker"])


def test_fields_of_a_registration_come_back(call: Caller) -> None:
    fields = {"url": URL, "completions_url": "http://10.0.0.1:8000/", "model_id": "m", "zone": "a"}
    call("POST", "/workers", fields)
    _, listed = call("GET", "/workers")
    (worker,) = listed["workers"]
    assert {name: worker[name] for name in fields} == fields | {"completions_url": "http://10.0.0.1:8000"}
    call("POST", "/workers", {"url": URL, "revive": "registration"})
    assert call.pool.workers[0].held


def test_a_worker_that_is_starting_waits_for_its_first_good_probe(call: Caller) -> None:
    status, answer = call("POST", "/workers", {"url": URL, "starting": True})
    assert (status, answer["worker"]["routable"]) == (202, False)
    call.pool.probe_answered(call.pool.workers[0])
    _, answer = call("POST", f"/workers?url={URL}&starting=true")
    assert answer["worker"]["routable"] is True, "one that is known stays as it is"
    status, answer = call("POST", "/workers", {"url": URL, "starting": True, "zone": "a"})
    assert (status, answer["error"]["message"]) == (400, "zone: cannot be given together with starting")


def test_fields_of_the_query_and_of_the_body_are_both_taken(call: Caller) -> None:
    call("POST", "/workers?zone=a", {"url": URL, "rack": 2})
    assert call.pool.workers[0].labels == {"zone": "a", "rack": 2}


def test_fields_of_the_body_count_beside_a_url_in_the_query(call: Caller) -> None:
    body = {"url": None, "zone": "a", "revive": "registration"}
    assert (call("POST", f"/add_worker?url={URL}&zone=a", body))[0] == 200
    assert call.pool.workers[0].labels == {"zone": "a", "revive": "registration"}
    assert (call("POST", "/add_worker?url=", {"url": URL}))[0] == 200
    for path, wrong in (
        (f"/workers?url={URL}&zone=a", {"zone": "b"}),
        (f"/workers?url={URL}", {"url": URL + "0"}),
        (f"/remove_worker?url={URL}&ended=true", {"ended": False}),
    ):
        status, answer = call("POST", path, wrong)
        assert (status, "differs in query and body" in answer["error"]["message"]) == (400, True)
    assert call.urls() == [URL]


def test_a_query_sets_a_worker_out_of_routing_and_removes_none(call: Caller) -> None:
    worker = call.pool.add(URL)
    status, answer = call("PUT", f"/workers/{worker.id}?disabled=true&reason=mine")
    assert (status, answer["worker"]["disabled_reason"]) == (200, "mine")
    assert (call("PUT", f"/workers/{worker.id}?disabled=false", {"is_dead": True}))[0] == 200
    assert (worker.disabled, worker.is_dead) == (None, True)
    for query in ("disabled=no", "disbaled=true", "is_dead=1"):
        assert (call("PUT", f"/workers/{worker.id}?{query}", {"disabled": True}))[0] == 400
    status, answer = call("DELETE", f"/workers/{worker.id}?ended=true")
    assert (status, answer["error"]["message"].partition(":")[0]) == (400, "ended=true")
    assert call.urls() == [URL]


def test_a_list_has_the_fields_of_every_dialect(call: Caller) -> None:
    worker = call.pool.add(URL)
    call.pool.begin(worker)
    call.pool.refused(worker)
    assert call("GET", "/list_workers") == (200, {"urls": [URL]})
    status, answer = call("GET", "/workers")
    assert (status, answer["total"]) == (200, 1)
    assert answer["stats"] == {"prefill_count": 0, "decode_count": 0, "regular_count": 1}
    (listed,) = answer["workers"]
    slime = {"url": URL, "worker_type": "regular", "active_requests": 1, "is_healthy": False}
    gateway = {"id": worker.id, "load": 1, "connection_mode": "HTTP", "priority": 50, "cost": 1.0, "metadata": {}}
    assert listed.items() >= (slime | gateway).items()


def test_slime_removes_the_worker_whose_url_it_finds_in_the_list(call: Caller) -> None:
    call.pool.add("http://other")
    call.pool.add(URL)
    _, answer = call("GET", "/workers")
    (found,) = [worker["id"] for worker in answer["workers"] if worker["url"].rstrip("/") == URL]
    status, removed = call("DELETE", f"/workers/{found}")
    assert (status, removed["status"], removed["worker_id"]) == (202, "accepted", found)
    assert call.urls() == ["http://other"]


@pytest.mark.parametrize("name", [URL, quote(URL, safe=""), URL + "/"])
def test_a_worker_is_found_by_its_url_quoted_or_not(call: Caller, name: str) -> None:
    worker = call.pool.add(URL)
    status, listed = call("GET", f"/workers/{name}")
    assert (status, listed["id"]) == (200, worker.id)
    assert (call("DELETE", f"/workers/{name}"))[0] == 202
    status, answer = call("DELETE", f"/workers/{name}")
    assert status == 404
    assert URL in answer["error"]["message"]


@pytest.mark.parametrize(("target", "sent"), [(f"/remove_worker?url={URL}/", b""), ("/remove_worker", {"url": URL})])
def test_removing_by_url_is_idempotent(call: Caller, target: str, sent: Any) -> None:
    call.pool.add(URL)
    for _ in range(2):
        status, answer = call("POST", target, sent)
        assert (status, answer["status"]) == (200, "success")
    assert call.urls() == []


def test_a_worker_that_drains_is_listed_until_its_last_request(call: Caller) -> None:
    """Its requests can still be aborted by a client that walks over the list."""
    worker = call.pool.add(URL)
    call.pool.begin(worker)
    call("POST", f"/remove_worker?url={URL}")
    _, answer = call("GET", "/workers")
    assert [(listed["is_healthy"], listed["state"]) for listed in answer["workers"]] == [(False, "draining")]
    call.pool.end(worker)
    assert (call("GET", "/workers"))[1]["workers"] == []


@pytest.mark.parametrize("path", ["/add_worker", "/workers", "/remove_worker"])
@pytest.mark.parametrize(
    ("query", "sent", "field"),
    [
        ("", b"", "url"),
        ("?url=", {}, "url"),
        ("", {"url": None}, "url"),
        ("", {"url": 5}, "url"),
        ("", {"worker_url": ["http://a"]}, "worker_url"),
        ("", {"url": "http://a", "worker_url": "http://b"}, "url and worker_url differ"),
        ("", b"{", "body"),
        ("", b"\xff", "body"),
        ("", b"[" * 100_000, "body"),
        ("", [URL], "body"),
    ],
)
def test_a_missing_url_is_refused_with_its_name(call: Caller, path: str, query: str, sent: Any, field: str) -> None:
    status, answer = call("POST", path + query, sent)
    assert status == 400
    assert answer["error"]["message"].startswith(field)
    assert call.urls() == []


@pytest.mark.parametrize("path", ["/add_worker", "/workers"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "10.0.0.1:3000"),
        ("url", "ftp://a"),
        ("url", "http://a:99999"),
        ("url", "http://[::1"),
        ("url", "http://a:0"),
        ("url", "http://a b"),
        ("url", "http://a/\u00e9"),
        ("url", "http://user@a"),
        ("url", "http://a?b"),
        ("completions_url", 5),
        ("completions_url", "nonsense"),
        ("worker_type", "prefill"),
        ("worker_type", ["regular"]),
        ("api_key", "secret"),
        ("revive", "never"),
        ("revive", []),
        ("starting", "perhaps"),
        ("is_healthy", True),
        ("zone", "x" * MAX_LABEL_BYTES),
    ],
)
def test_a_bad_field_is_refused_with_its_name(call: Caller, path: str, field: str, value: Any) -> None:
    status, answer = call("POST", path, {"url": URL, field: value})
    assert status == 400
    assert answer["error"]["message"].startswith("body" if field == "zone" else field)
    assert "secret" not in json.dumps(answer)
    assert call.urls() == []


def test_workers_over_the_bound_are_refused() -> None:
    call = Caller(max_workers=1)
    call("POST", "/workers", {"url": "http://a"})
    status, answer = call("POST", "/workers", {"url": "http://b"})
    assert status == 400
    assert "1 workers" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/readiness", "/readyz", "/ready"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_readiness_follows_the_pool(call: Caller, method: str, path: str) -> None:
    reply = call.reply(method, path)
    assert reply.status == 503
    assert dict(reply.headers)[b"retry-after"] == b"1"
    worker = call.pool.add(URL)
    status, answer = call(method, path)
    assert (status, answer["healthy_workers"], answer["total_workers"]) == (200, 1, 1)
    call.pool.refused(worker)
    status, answer = call(method, path)
    assert (status, answer["status"], answer["total_workers"]) == (503, "not ready", 1)


def test_the_router_lives_without_workers(call: Caller) -> None:
    """An orchestrator that restarts a router because its workers are away would only make it worse."""
    assert (call("GET", "/liveness"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/add_worker", "POST"),
        ("PUT", "/workers", "GET, POST"),
        ("POST", "/workers/some-id", "GET, PUT, DELETE"),
        ("POST", "/list_workers", "GET"),
        ("DELETE", "/health", "GET, HEAD, POST"),
    ],
)
def test_another_method_does_not_reach_a_worker(call: Caller, method: str, path: str, allowed: str) -> None:
    reply = call.reply(method, path)
    assert (reply.status, dict(reply.headers)[b"allow"].decode()) == (405, allowed)


@pytest.mark.parametrize("path", ["/", "/generate", "/workersx", "/v1/workers", "/health_generate", "/add_worker/"])
def test_other_paths_are_left_to_the_proxy(path: str) -> None:
    assert not is_registration(path)
