"""Requests of users about themselves: identity, audit log, usage."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.request import Request, urlopen

from tinker import types

from ..catalogue import feature
from ..user import MODEL, User, both, wait

GROUP = "Account"
COUNTED_S = 300.0
"""Seconds until usage must count a sample, on a busy machine."""


def this_hour() -> tuple[datetime, datetime]:
    """The window of whole hours around the present moment."""
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return start - timedelta(hours=1), start + timedelta(hours=1)


@feature(GROUP, "With a token of the server for a key, `whoami` reads it.", needs=("RestClient.whoami",))
def whoami_with_a_token(user: User) -> None:
    asked = Request(f"{user.url}/api/v1/auth/token", data=b"{}", headers={"X-API-Key": user.key})
    with urlopen(asked, timeout=60) as answer:
        token = json.load(answer)["jwt"]
    service = user.open(api_key=token)
    assert user.session_of(user.train(service)) in wait(user.rest.list_sessions(limit=5)).sessions
    assert wait(service.create_rest_client().whoami()).user_urn.startswith("tml:user:")


@feature(
    GROUP,
    "With an API key there is no token to read, unless the server's `jwt_auth` is on.",
    needs=("RestClient.whoami",),
    refusal="JWT auth",
)
def whoami_with_an_API_key(user: User) -> None:
    wait(user.rest.whoami())


@feature(GROUP, "Checkpoints saved and deleted are in the audit log.", needs=("RestClient.get_audit_log",))
def audit_log(user: User) -> None:
    trainer, began = user.train(), datetime.now(UTC).date()
    path = wait(trainer.save_state("audited")).path
    wait(user.rest.delete_checkpoint_from_tinker_path(path))
    days = sorted({began, datetime.now(UTC).date()})  # two days if midnight has passed meanwhile
    for owner in user.administrators:
        # In older SDKs the coroutine runs only in the SDK's own loop.
        twins = [owner.holder.run_coroutine_threadsafe(owner.get_audit_log_async("checkpoints", day)) for day in days]
        for answers in (
            [wait(owner.get_audit_log("checkpoints", day)) for day in days],
            [wait(twin) for twin in twins],
        ):
            events = [entry.event for answer in answers for entry in answer.entries if entry.tinker_path == path]
            assert len(events) == len(set(events)) == 2


def counted(answer: Any, session: str) -> dict[str, int]:
    """Tokens by kind that a billing answer reports for a session."""
    tokens: dict[str, int] = {}
    for event in answer.data:
        if event.session_id == session and hasattr(event.event_info, "token_count"):
            assert event.base_model == MODEL
            kind = event.event_info.type
            tokens[kind] = tokens.get(kind, 0) + event.event_info.token_count
    return tokens


@feature(
    GROUP,
    "Tokens trained and sampled, by session and hour; no prices.",
    needs=("RestClient.get_billing_usage", "types.BillingUsageResponse"),
)
def billing_usage(user: User) -> None:
    service = user.open(user_metadata={"bill": "me"})
    trainer = user.train(service)
    wait(trainer.forward_backward(user.data, "cross_entropy"))
    session = user.session_of(trainer)
    sampler = wait(service.create_sampling_client(base_model=MODEL))
    params = types.SamplingParams(max_tokens=9, stop=[], temperature=1.0)
    wait(sampler.sample(user.prompt, 2, params))
    expected = {"training": len(user.tokens) - 1, "sampling_prefill": user.prompt.length, "sampling_sample": 18}
    start, end = this_hour()
    deadline = time.monotonic() + COUNTED_S
    while counted(wait(user.rest.get_billing_usage(start, end)), session) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    for owner in user.administrators:
        for answer in both(owner, "get_billing_usage", start, end):
            assert counted(answer, session) == expected
            assert answer.sessions[session].user_metadata == {"bill": "me"}
            assert all(getattr(event, "estimated_cost_usd", None) is None for event in answer.data)


@feature(
    GROUP,
    "Bytes of checkpoints kept.",
    needs=("RestClient.get_current_checkpoint_storage_usage",),
)
def checkpoint_storage(user: User) -> None:
    path = wait(user.train().save_state("stored")).path
    checkpoints = wait(user.rest.list_user_checkpoints(limit=1000)).checkpoints
    assert path in {checkpoint.tinker_path for checkpoint in checkpoints}
    for owner in user.administrators:
        for answer in both(owner, "get_current_checkpoint_storage_usage"):
            assert sum(item.checkpoint_count for item in answer.data) == len(checkpoints)
            assert sum(item.size_bytes for item in answer.data) == sum(c.size_bytes for c in checkpoints)
            assert all(item.estimated_monthly_cost_usd is None for item in answer.data)
