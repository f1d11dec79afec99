"""`checkpoints/search`: the checkpoints that the caller may read, by type, owner, project, base model and metadata."""

from __future__ import annotations

from dataclasses import replace

from starlette.responses import Response

from skyrl.api.access import user_urn
from skyrl.api.call import Call, reply
from skyrl.api.routes.checkpoints import TYPES, checkpoint_json, seen_by_client
from skyrl.api.routes.sessions import MAX_LIMIT, MAX_LISTED, check_owner, microseconds, moment
from skyrl.api.routing import Routes
from skyrl.api.services import Services
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import CheckpointSearchCursor, CheckpointSearchRequest, SearchOwner
from skyrl.storage.db.checkpoint_search import CheckpointQuery, Place
from skyrl.storage.db.checkpoints import Seen

_URN = user_urn("")
_MAX_ROW = 2**63 - 1


def _seen(seen: Seen, body: CheckpointSearchRequest) -> Seen:
    """The kinds and owners that the request asks for, of those that the client's version of the SDK can read."""
    wide = body.owner is not None and body.owner.type != "own"
    kinds = seen.kinds
    if body.checkpoint_type is not None:
        if body.checkpoint_type not in TYPES.values():
            known = ", ".join(TYPES.values())
            raise RequestError(f"{body.checkpoint_type!r} is not known; there is: {known}", field="checkpoint_type")
        kinds = tuple(kind for kind in kinds if TYPES[kind] == body.checkpoint_type)
    return replace(seen, published=wide, kinds=kinds)


def _owners(owner: SearchOwner | None) -> tuple[str, ...] | None:
    """The tenants that the request names; None if it names none."""
    urns = check_owner(owner)
    return None if urns is None else tuple(urn.removeprefix(_URN) for urn in urns if urn.startswith(_URN))


def _position(cursor: CheckpointSearchCursor | None) -> tuple[int, int] | None:
    if cursor is None:
        return None
    row = cursor.last_checkpoint_uuid
    if not (row.isascii() and row.isdecimal() and len(row) < 20 and int(row) <= _MAX_ROW):
        raise RequestError("was not made by this server: pass next_cursor on", field="cursor.last_checkpoint_uuid")
    return microseconds(cursor.last_created_at, "cursor.last_created_at"), int(row)


def _cursor(last: Place) -> dict[str, str]:
    return {"last_created_at": moment(last[0]), "last_checkpoint_uuid": str(last[1])}


def checkpoint_search_routes(services: Services) -> Routes:
    routes = Routes("checkpoints")

    @routes.post("/checkpoints/search", scope="any", body=CheckpointSearchRequest)
    async def search_checkpoints(call: Call, body: CheckpointSearchRequest) -> Response:
        """Newest first. A base model is found by any of its names."""
        if not 1 <= body.limit <= MAX_LIMIT:
            raise RequestError(f"must be in [1, {MAX_LIMIT}], got {body.limit}", field="limit")
        for field in ("project_ids", "base_models"):
            if len(getattr(body, field) or ()) > MAX_LISTED:
                raise RequestError(f"must hold at most {MAX_LISTED}", field=field)
        named = body.base_models
        query = CheckpointQuery(
            seen=_seen(seen_by_client(call.request, "owned"), body),
            owners=_owners(body.owner),
            project_ids=None if body.project_ids is None else tuple(body.project_ids),
            base_models=None if named is None else services.served.all_names(named),
            user_metadata=body.user_metadata or {},
            after=_position(body.cursor),
        )
        async with services.search_turns.turn(call.tenant):
            found, last = await services.checkpoint_search.page(call.tenant, query, body.limit)
        return reply(
            {
                "checkpoints": [checkpoint_json(each) for each in found],
                "next_cursor": None if last is None else _cursor(last),
            }
        )

    return routes
