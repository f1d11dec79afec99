"""The status page: its files, which hold no data, and the answers from which its script fills it.

The files need no key. The script sends the key that the user typed as `X-API-Key`, and shows answers as text.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Literal

import msgspec
from fastapi import Query
from starlette.responses import Response

from skyrl.api.call import Call
from skyrl.api.routing import Routes
from skyrl.api.services import Services
from skyrl.api.ui.overview import MAX_DAYS, USAGE_COLUMNS, Overview
from skyrl.api.ui.server_view import ServerView
from skyrl.api.ui.usage_csv import as_csv
from skyrl.base.wire.errors import NotFound

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""The page loads nothing from elsewhere, runs no inline script, and no other page can frame it."""
PAGE = "index.html"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
MAX_STEP = 2**53
"""Browsers read no larger whole number exactly."""

_encode = msgspec.json.Encoder().encode


def page_routes(services: Services) -> Routes:
    routes = Routes("status page", prefix="")
    server_view = ServerView(services)
    contents = _files()

    def file_answer(name: str) -> Response:
        media_type = f"{_TYPES[PurePath(name).suffix]}; charset=utf-8"
        return Response(contents[name], headers=SECURITY, media_type=media_type)

    @routes.get("/ui", scope="open")
    async def page(call: Call) -> Response:
        """The page, without any data."""
        return file_answer(PAGE)

    @routes.get("/ui/{file}", scope="open")
    async def page_file(call: Call, file: str) -> Response:
        """A script or the style sheet of the page."""
        if file not in contents:
            raise NotFound("the status page has no such file", field="file")
        return file_answer(file)

    @routes.get("/ui/api/state", scope="any")
    async def state(call: Call) -> Response:
        """The caller's runs, samplers, agent sessions, checkpoints and usage."""
        return _unless_unchanged(call, await Overview(services, call.caller).state())

    @routes.get("/ui/api/runs/{run_id}", scope="any")
    async def run(call: Call, run_id: str, after: int = Query(0, ge=0, le=MAX_STEP)) -> Response:
        """One run of the caller, with its history: the steps after the step `after`."""
        return _unless_unchanged(call, await Overview(services, call.caller).run(run_id, after))

    @routes.get("/ui/api/agents/{agent_session}", scope="sample")
    async def agent(call: Call, agent_session: str, after: int = Query(0, ge=0, le=MAX_STEP)) -> Response:
        """One agent session of the caller, and its turns after the row `after`, with texts that may be cut."""
        return _unless_unchanged(call, await Overview(services, call.caller).agent_session(agent_session, after))

    @routes.get("/ui/api/agents/{agent_session}/turns/{agent_turn}", scope="sample")
    async def agent_tokens(call: Call, agent_session: str, agent_turn: str) -> Response:
        """The tokens that a turn has sampled, with their texts and logprobs."""
        return _unless_unchanged(call, await Overview(services, call.caller).agent_tokens(agent_session, agent_turn))

    @routes.get("/ui/api/usage", scope="any")
    async def usage(
        call: Call,
        days: int = Query(7, ge=1, le=MAX_DAYS),
        run: str | None = None,
        format: Literal["json", "csv"] = "json",
    ) -> Response:
        """The caller's tokens by day, run and base model; `format` is json or csv."""
        lines = await Overview(services, call.caller).usage(days, run)
        if format == "csv":
            return Response(as_csv(USAGE_COLUMNS, lines), headers=SECURITY, media_type="text/csv; charset=utf-8")
        return _unless_unchanged(call, {"days": days, "usage": lines})

    @routes.get("/ui/api/box", scope="admin")
    async def server(call: Call) -> Response:
        """Parts, queues, adapters and disk of the server: counts alone."""
        return _unless_unchanged(call, await server_view.shown_to(call.caller))

    return routes


def _files() -> dict[str, bytes]:
    """The page's files by name."""
    found = [file for file in files("skyrl.api.ui").iterdir() if PurePath(file.name).suffix in _TYPES]
    return {file.name: file.read_bytes() for file in found}


def _unless_unchanged(call: Call, value: Any) -> Response:
    """The answer with an ETag; 304 without a body if the client has it already."""
    body = _encode(value)
    etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = SECURITY | {"ETag": etag}
    if call.request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")
