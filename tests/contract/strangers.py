"""Requests of another tenant to every route, with the expected answers. `test_isolation` sends them, and the fuzzer
builds its good bodies from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl.api.access import tenant_of_key, user_urn
from skyrl.api.error_answers import MESSAGES
from skyrl.api.routes.agent_sessions import ROUTE as AGENT_SESSIONS
from skyrl.api.routes.chats import PREFIXES

BASE = "acme/base"
OWNER, STRANGER = "tml-owner", "tml-stranger"
TENANT = tenant_of_key(OWNER)
SAMPLE = {"X-Tinker-Request-Type": "Sample"}
KINDS = ("weights", "sampler_weights", "external_weights")
CHECKPOINT = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"
LINK = "/{model_id}/{kind}/{name}/{save}/{file}"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
GENERATE = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
MESSAGE = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 4}}


@dataclass(frozen=True)
class Try:
    """One request of a stranger, and the expected status. `{names}` stand for ids of the owner, `{my_session}` for the
    stranger's own session."""

    body: dict[str, Any] = field(default_factory=dict)
    query: str = ""
    status: int = 404
    headers: dict[str, str] = field(default_factory=dict)
    owner: int = 200
    """The status that the owner gets for the same request. It shows that only the caller makes the difference."""
    kind: str = "weights"


def command(**more: Any) -> list[Try]:
    return [Try({"model_id": "{model_id}", "seq_id": 1} | more)]


PATHS = [Try(kind=kind) for kind in KINDS]
COPY = {"source_path": "{path}", "session_id": "{my_session}", "model_seq_id": 9}
LOAD = {"session_id": "{my_session}", "model_seq_id": 8, "path": "{path}"}
SAMPLER = {"session_id": "{my_session}", "sampling_session_seq_id": 9}
TARGET = {"type": "sampling_session", "sampling_session_id": "{sampler_id}", "cloned_sampler_id": 0}

LOSS = {
    "session_id": "{session_id}",
    "custom_loss_seq_id": 0,
    "name": "mine",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}]},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}],
            },
        ]
    },
}

TRIED: dict[tuple[str, str], list[Try]] = {
    ("GET", "/api/v1/sessions/{session_id}"): [Try(), Try(query="access_scope=accessible")],
    ("GET", "/api/v1/sessions/{session_id}/trace_export"): [Try()],
    ("GET", "/api/v1/samplers/{sampler_id}"): [Try()],
    ("GET", "/api/v1/training_runs/{model_id}"): [Try(), Try(query="access_scope=accessible")],
    ("GET", "/api/v1/training_runs/{model_id}/checkpoints"): [Try(), Try(query="access_scope=accessible")],
    ("GET", "/ui/api/runs/{run_id}"): [Try()],
    ("GET", "/ui/api/agents/{agent_session}"): [Try()],
    ("GET", "/ui/api/agents/{agent_session}/turns/{agent_turn}"): [Try()],
    **{
        (method, f"{AGENT_SESSIONS}/{{session_id}}{path}"): [Try(body)]
        for method, path, body in (
            ("GET", "", {}),
            ("GET", "/turns", {}),
            ("GET", "/trajectory", {}),
            ("POST", "/reward", {"reward": 0.5}),
            ("POST", "/end", {}),
            ("DELETE", "", {}),
        )
    },
    ("POST", "/api/v1/session_heartbeat"): [Try({"session_id": "{session_id}"})],
    ("PUT", "/api/v1/sessions/{session_id}/project"): [Try({"project_id": "mine"})],
    ("POST", "/api/v1/get_info"): [Try({"model_id": "{model_id}"})],
    ("POST", "/api/v1/weights_info"): [Try({"tinker_path": "{path}"}, kind=kind) for kind in KINDS],
    ("POST", "/api/v1/create_sampling_session"): [
        Try({"session_id": "{session_id}", "sampling_session_seq_id": 7, "base_model": BASE}),
        Try(SAMPLER | {"model_path": "{path}"}, kind="sampler_weights"),
    ],
    ("POST", "/api/v1/join_sampling_session"): [Try({"sampling_session_id": "{sampler_id}"})],
    ("POST", "/api/v1/asample"): [Try(MESSAGE | {"sampling_session_id": "{sampler_id}", "seq_id": 5})],
    ("POST", "/api/v1/retrieve_future"): [
        Try({"request_id": "{future}"}, owner=408),
        Try({"request_id": "{sample}"}, status=410, headers=SAMPLE, owner=408),
    ],
    ("POST", "/api/v1/retrieve_futures"): [Try({"target": TARGET, "prev_cursor": 0, "timeout": 0})],
    ("POST", "/api/v1/cancel_future"): [
        Try({"request_id": "{future}"}, owner=400),
        Try({"request_id": "{sample}"}),
    ],
    ("POST", "/api/v1/create_model"): [Try({"session_id": "{session_id}", "model_seq_id": 7, "base_model": BASE})],
    ("POST", "/api/v1/create_custom_loss"): [Try(LOSS)],
    ("POST", "/api/v1/forward"): command(),
    ("POST", "/api/v1/forward_backward"): command(),
    ("POST", "/api/v1/optim_step"): command(),
    ("POST", "/api/v1/save_weights"): command(path="n"),
    ("POST", "/api/v1/save_weights_for_sampler"): command(path="n"),
    ("POST", "/api/v1/save_weights_external"): command(path="n"),
    ("POST", "/api/v1/load_weights"): [
        *command(path="{path}"),
        Try(LOAD),
        Try(LOAD | {"session_id": "{session_id}"}),
        Try(LOAD | {"model_seq_id": 7, "source_tenant": TENANT}),
    ],
    ("POST", "/api/v1/unload_model"): command(),
    ("POST", "/api/v1/copy_weights"): [
        Try(COPY, headers={"X-Idempotency-Key": "once"}),
        Try(COPY | {"session_id": "{session_id}", "model_seq_id": 10}),
        Try(COPY | {"model_seq_id": 11}, kind="sampler_weights"),
        Try({"source_path": "{path}", "destination_project_id": "p"}),
    ],
    ("POST", "/api/v1/external_weights_upload_finish"): [Try({"upload_id": "{upload}"}, owner=400)],
    ("GET", f"{CHECKPOINT}/archive"): [Try(kind=kind, owner=302) for kind in KINDS[:2]],
    ("GET", f"{CHECKPOINT}/external_weights_urls"): [Try(kind=KINDS[2])],
    ("PUT", f"{CHECKPOINT}/ttl"): [Try({"ttl_seconds": 7200}, kind=kind) for kind in KINDS],
    ("POST", f"{CHECKPOINT}/publish"): PATHS,
    ("DELETE", f"{CHECKPOINT}/publish"): PATHS,
    ("DELETE", CHECKPOINT): PATHS,
    ("POST", "/api/v1/sessions/{session_id}/finish"): [Try()],
} | {
    (method, f"{prefix}/{path}"): [
        Try(body | named, kind=kind, owner=200 if kind == KINDS[1] else 404) for kind in KINDS
    ]
    for prefix in PREFIXES
    for method, path, body, named in (
        ("GET", "models/{model}", {}, {}),
        ("POST", "completions", {"prompt": "x"}, {"model": "{path}"}),
        ("POST", "chat/completions", CHAT, {"model": "{path}"}),
    )
}
TRIED |= {
    ("POST", path): [
        Try(body | {"model": "{path}"}, kind=kind, owner=200 if kind == KINDS[1] else 404) for kind in KINDS
    ]
    for path, body in (
        (MESSAGES, CHAT | {"max_tokens": 4}),
        (f"{MESSAGES}/count_tokens", CHAT),
        ("/v1/responses", {"input": "x"}),
        ("/inference/v1/generate", GENERATE),
        ("/oai/api/inference/v1/generate", GENERATE),
    )
}
LISTS: dict[tuple[str, str], list[Try]] = {
    ("GET", AGENT_SESSIONS): [Try(), Try(query="state=open&limit=200")],
    ("GET", "/ui/api/state"): [Try()],
    ("GET", "/ui/api/usage"): [Try(), Try(query="run={model_id}"), Try(query="format=csv&days=366")],
    **{("GET", f"{prefix}/models"): [Try()] for prefix in PREFIXES},
    ("GET", "/api/v1/sessions"): [Try(), Try(query="access_scope=accessible")],
    ("GET", "/api/v1/training_runs"): [Try(), Try(query="access_scope=accessible"), Try(query="project_id={project}")],
    ("GET", "/api/v1/checkpoints"): [Try(), Try(query="access_scope=accessible")],
    ("GET", "/api/v1/audit"): [Try(), Try(query="event_type=checkpoints")],
    ("GET", "/api/v1/billing/usage/events"): [
        Try(query="starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z")
    ],
    ("GET", "/api/v1/billing/usage/checkpoints/current"): [Try(), Try(query="project_id={project}")],
    ("POST", "/api/v1/sessions/search"): [
        Try({"limit": 200}),
        Try({"limit": 200, "session_id": "{session_id}"}),
        Try({"limit": 200, "project_ids": ["{project}"]}),
        Try({"limit": 200, "owner": {"type": "accessible"}}),
        Try({"limit": 200, "owner": {"type": "user", "owner_urns": [user_urn(TENANT)]}}),
    ],
    ("POST", "/api/v1/checkpoints/search"): [
        Try({"limit": 200}),
        Try({"limit": 200, "project_ids": ["{project}"]}),
        Try({"limit": 200, "base_models": [BASE]}),
        Try({"limit": 200, "owner": {"type": "accessible"}}),
        Try({"limit": 200, "owner": {"type": "user", "owner_urns": [user_urn(TENANT)]}}),
    ],
}
"""Routes that answer every tenant with the tenant's own objects."""
HARMLESS = {
    ("GET", "/"),
    ("GET", "/ui"),
    ("GET", "/ui/{file}"),
    ("GET", "/ui/api/box"),
    ("GET", "/api/v1/auth/apikey/me"),
    ("DELETE", "/api/v1/auth/apikey/me"),
    ("POST", "/api/v1/auth/token"),
    ("GET", "/api/v1/get_server_capabilities"),
    ("GET", "/api/v1/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/statusz"),
    ("POST", "/api/v1/client/config"),
    ("POST", "/api/v1/client/dynamic_config"),
    ("POST", "/api/v1/create_session"),
    ("POST", "/api/v1/external_weights_upload_start"),
    ("POST", AGENT_SESSIONS),
    ("POST", "/api/v1/telemetry"),
}
"""Routes that name no tenant's objects. The test sends them all ids of the owner, which must not affect the owner."""
SIGNED = {
    ("GET", f"/api/v1/downloads/archives{LINK}"),
    ("GET", f"/api/v1/downloads/files{LINK}"),
    ("GET", "/api/v1/downloads/traces/{session_id}"),
    ("PUT", "/api/v1/uploads/{upload_id}/{file}"),
}
"""Routes that need a signed link for exactly one object; without it they answer 403."""
