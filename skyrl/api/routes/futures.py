"""Long polls, for one request or for all samples of a client, and the cancelling of a sample.

Results go out as the bytes that are stored; a client that cannot read protobuf gets them as JSON.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from skyrl.api.call import BytesResponse, Call, reply
from skyrl.api.routing import Routes
from skyrl.api.services import Services
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.requests import CancelFutureRequest, RetrieveFutureRequest, RetrieveFuturesRequest
from skyrl.base.wire.results import to_json
from skyrl.base.wire.training import PROTOBUF
from skyrl.runtime.processes.logs import LimitedLog
from skyrl.storage.futures.completion_feed import Completion, Target, TargetGone

logger = logging.getLogger(__name__)

HOLD_S = 30.0
"""How long a poll is held at most. The SDK stops reading at 45 s."""

SHORTEST_HOLD = 0.8
"""The shortest hold, as a part of HOLD_S. Random holds spread thousands of polls that arrived together."""

ERROR_HOLD_S = 1.0
"""How long a poll that fails is held before its answer of 500: the SDK polls again at once."""

MAX_CLONE = 2**33
"""Far above the number of any copy of a sampling client. The numbers of its samples still fit 64 bits."""


async def _try_again(services: Services, waits: LimitedLog, request_id: str, tenant: str) -> Response:
    """The answer for a request without an outcome. The SDK logs the reason when a request waits for long, and so does
    this process, for the operator."""
    answer = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    with suppress(KeyError):  # its session has ended just now: the next poll tells
        kind = await services.futures.kind_of(request_id, tenant)
        status = await services.statuses.of_request(request_id, kind, tenant)
        if status.state != "active":
            waits.say(logging.INFO, tenant, f"tenant {tenant[:8]} waits: {status.sentence}", request_id)
        answer |= {"queue_state": status.state, "queue_state_reason": status.sentence}
    return reply(answer, 408)


def _completion(ended: Completion) -> dict[str, Any]:
    if ended.size is None:
        return {"state": "failed", "request_id": ended.request_id}
    return {"state": "finished", "request_id": ended.request_id, "response_payload_uncompressed_size": ended.size}


def _check_fields(body: RetrieveFuturesRequest) -> None:
    if body.target.type != "sampling_session":
        raise RequestError(f"{body.target.type!r} is not known; there is: sampling_session", field="target.type")
    if not 0 <= body.target.cloned_sampler_id < MAX_CLONE:
        raise RequestError(f"must be in [0, {MAX_CLONE})", field="target.cloned_sampler_id")
    if not 0 <= body.prev_cursor < 2**62:
        raise RequestError("must be 0 or a cursor that was answered before", field="prev_cursor")
    if body.timeout is not None and not body.timeout >= 0:
        raise RequestError("must not be negative", field="timeout")


def future_routes(services: Services) -> Routes:
    routes = Routes("futures")
    waits = LimitedLog(logger)

    @routes.post("/retrieve_future", scope="any", body=RetrieveFutureRequest)
    async def retrieve_future(call: Call, body: RetrieveFutureRequest) -> Response:
        tenant = call.tenant
        try:
            hold_s = HOLD_S * random.uniform(SHORTEST_HOLD, 1.0)
            outcome = await services.futures.wait(body.request_id, tenant, hold_s)
        except KeyError:
            # After a 410 the SDK sends a lost sample again. It cannot send a training command again.
            status = 410 if call.received.get("x-tinker-request-type") == "Sample" else 404
            detail = f"request_id: no request {body.request_id!r}"
            return reply({"detail": detail, "field": "request_id", "request_id": call.id}, status)
        except Exception:  # whatever it is, the SDK asks again at once
            await asyncio.sleep(ERROR_HOLD_S)
            raise
        if outcome is None:
            return await _try_again(services, waits, body.request_id, tenant)
        if outcome.error is not None:
            return reply({"error": outcome.error, "category": outcome.error_category or "unknown"})
        if outcome.result_format != "json" and PROTOBUF in call.received.get("accept", ""):
            return BytesResponse(outcome.result, PROTOBUF)
        return BytesResponse(to_json(outcome.result, outcome.result_format), "application/json")

    @routes.post("/retrieve_futures", scope="sample", body=RetrieveFuturesRequest)
    async def retrieve_futures(call: Call, body: RetrieveFuturesRequest) -> Response:
        """The samples of one sampling client that have ended since a cursor. Clients fetch the results one by one."""
        tenant = call.tenant
        _check_fields(body)
        sampler = await services.sampling.open_sampler(
            body.target.sampling_session_id, tenant, "target.sampling_session_id"
        )
        target = Target(sampler.session_id, sampler.id, body.target.cloned_sampler_id)
        hold_s = HOLD_S if body.timeout is None else min(body.timeout, HOLD_S)
        try:
            cursor, ended = await services.futures.ends.poll(target, body.prev_cursor, hold_s)
        except TargetGone as error:
            raise NotFound(f"the session of {sampler.id!r} has ended", field="target.sampling_session_id") from error
        return reply({"cursor": cursor, "completions": [_completion(completion) for completion in ended]})

    @routes.post("/cancel_future", scope="any", body=CancelFutureRequest)
    async def cancel_future(call: Call, body: CancelFutureRequest) -> Response:
        await services.sampling.cancel_future(body.request_id, call.tenant)
        return reply({})

    return routes
