"""Around the sidecar of a placed vLLM: the route by which its placement process learns of updates, and tells of those
before.

A vLLM that starts has its first weights, and its sidecar started with it. Only the placement process knows whether the
vLLMs were updated meanwhile, perhaps on a node that is gone.
"""

from __future__ import annotations

from skyrl.inference.remote.asgi import App, Message, Receive, Send, answer_json
from skyrl.inference.sidecar.errors import SidecarError
from skyrl.inference.sidecar.updates import Updates
from skyrl.runtime.web.admin import AdminKey

PATH = "/placed"


class PlacementRoute:
    """An ASGI application around the sidecar. `GET /placed` answers `{"updated": bool}`: whether this vLLM got new
    weights. `POST /placed` says that others got some before it started: it is not healthy until it is updated. Both
    need the admin key."""

    def __init__(self, sidecar: App, updates: Updates, key: AdminKey) -> None:
        self._sidecar = sidecar
        self._updates = updates
        self._key = key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._sidecar(scope, receive, send)
            return
        if (refusal := self._key.refusal(scope)) is not None:
            await answer_json(send, refusal[0], {"error": {"message": refusal[1]}})
            return
        try:
            if scope["method"] == "POST":
                await self._updates.outdate()
        except SidecarError as error:
            await answer_json(send, error.status, {"error": {"message": error.message}})
        else:
            await answer_json(send, 200, {"updated": self._updates.was_updated})
