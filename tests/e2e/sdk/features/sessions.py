"""Sessions: open, describe, keep alive, finish."""

from __future__ import annotations

import time
from typing import Any

import tinker

from ..catalogue import feature
from ..user import MODEL, SECOND_NAME, WAIT_S, User, both, wait

GROUP = "Sessions"
HEARTBEAT_S = 10.0


@feature(GROUP, "A service client opens a session, which the list of sessions and the session itself show.")
def service_client(user: User) -> None:
    session = user.session_of(user.model)
    for listed in both(user.rest, "list_sessions", limit=100):
        assert session in listed.sessions
    for scope in ("owned", "accessible"):
        for found in both(user.rest, "get_session", session, access_scope=scope):
            assert user.model_id(user.model) in found.training_run_ids


@feature(GROUP, "`get_server_capabilities` names the served models and their context length.")
def server_capabilities(user: User) -> None:
    for answer in both(user.service, "get_server_capabilities"):
        check_capabilities(answer)


@feature(GROUP, "A REST client on its own asks without opening a session.", needs=("RestClient(base_url)",))
def REST_client_without_a_session(user: User) -> None:
    before = wait(user.rest.list_sessions(limit=100)).sessions
    alone = tinker.RestClient(base_url=user.url, api_key=user.key)
    check_capabilities(wait(alone.get_server_capabilities()))
    assert wait(alone.list_sessions(limit=100)).sessions == before


def check_capabilities(answer: Any) -> None:
    models = {model.model_name: model for model in answer.supported_models}
    assert {MODEL, SECOND_NAME} <= models.keys()
    assert getattr(models[MODEL], "max_context_length", 1) > 0


@feature(GROUP, "`user_metadata` of a session comes back.", needs=("types.GetSessionResponse(user_metadata)",))
def session_metadata(user: User) -> None:
    service = user.open(user_metadata={"purpose": "matrix", "n": "1"})
    session = user.session_of(user.train(service))
    assert wait(user.rest.get_session(session)).user_metadata == {"purpose": "matrix", "n": "1"}


@feature(GROUP, "A session's display name comes back.", needs=("ServiceClient(display_name)",))
def session_display_name(user: User) -> None:
    session = user.session_of(user.train(user.open(display_name="a named session")))
    assert wait(user.rest.get_session(session)).display_name == "a named session"


@feature(GROUP, "`with` and `close` finish a session; its runs stay listed.", needs=("ServiceClient.close",))
def finishing_a_session(user: User) -> None:
    with user.open() as service:
        run = user.model_id(user.train(service))
    assert raises(RuntimeError, service.create_lora_training_client, MODEL)
    assert wait(user.rest.get_training_run(run)).training_run_id == run
    other = user.open()
    user.train(other)
    wait(other.close("errored", detail="on purpose"))
    assert raises(RuntimeError, other.create_lora_training_client, MODEL)


@feature(GROUP, "A session that only sends heartbeats stays usable.", last=True)
def heartbeat(user: User) -> None:
    trainer, made_at = user.quiet
    time.sleep(max(0.0, made_at + HEARTBEAT_S + 1 - time.monotonic()))
    assert user.step(trainer) > 0


@feature(GROUP, "The SDK's telemetry is accepted.")
def telemetry(user: User) -> None:
    for owner in (user.service, user.rest, user.model, user.sampler, *user.administrators):
        assert owner.get_telemetry() is not None


@feature(GROUP, "`get_console_url` makes a link, without asking the server.", needs=("ServiceClient.get_console_url",))
def console_link(user: User) -> None:
    run = user.model_id(user.model)
    assert user.session_of(user.model) in user.service.get_console_url()
    assert run in user.model.get_console_url()


@feature(GROUP, "Moving a session into a project.", needs=("RestClient.assign_session_project",))
def session_project(user: User) -> None:
    service = user.open()
    run = user.model_id(user.train(service))
    session = run.partition(":train:")[0]
    project = f"project-of-{session}"
    both(user.rest, "assign_session_project", session, project)
    listed = wait(user.rest.list_training_runs(project_id=project))
    assert [found.training_run_id for found in listed.training_runs] == [run]
    assert listed.cursor.total_count == 1


@feature(GROUP, "A project named at the start holds the session.", needs=("RestClient.assign_session_project",))
def project_at_the_start(user: User) -> None:
    project = f"early-{time.time_ns()}"
    run = user.model_id(user.train(user.open(project_id=project)))
    listed = wait(user.rest.list_training_runs(project_id=project))
    assert [found.training_run_id for found in listed.training_runs] == [run]


@feature(GROUP, "Search by name, metadata and status, in pages.", needs=("RestClient.search_sessions",))
def session_search(user: User) -> None:
    mark = str(time.time_ns())
    found = []
    for number in range(2):
        service = user.open(display_name=f"Search {mark} {number}", user_metadata={"mark": mark})
        found.append(user.session_of(user.train(service)))
        if number == 0:
            wait(service.close("success"))
    search = tinker.types.SessionSearchRequest
    page = wait(user.rest.search_sessions(search(user_metadata={"mark": mark}, limit=1)))
    assert [session.session_id for session in page.sessions] == found[1:]
    second = wait(user.rest.search_sessions(search(user_metadata={"mark": mark}, limit=1, cursor=page.next_cursor)))
    assert [session.session_id for session in second.sessions] == found[:1]
    assert second.sessions[0].status.type == "client_finished"
    assert page.sessions[0].status.type == "active"
    named = wait(user.rest.search_sessions(search(display_name=f"search {mark}")))
    assert {session.session_id for session in named.sessions} == set(found)
    done: list[Any] = [tinker.types.session_status_query.ClientFinishedSessionStatusQuery(reasons=["success"])]
    finished = wait(user.rest.search_sessions(search(user_metadata={"mark": mark}, statuses=done)))
    assert [session.session_id for session in finished.sessions] == found[:1]


@feature(GROUP, "A session's trace is exported and downloads.", needs=("RestClient.export_session_trace",))
def session_trace(user: User) -> None:
    from urllib.request import urlopen

    for url in both(user.rest, "export_session_trace", user.session_of(user.model)):
        with urlopen(url, timeout=WAIT_S) as answer:
            assert answer.status == 200
            assert len(answer.read()) > 0


def raises(kind: type[Exception], called: Any, *args: Any) -> bool:
    try:
        wait(called(*args))
    except kind:
        return True
    return False
