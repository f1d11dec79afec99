"""The declaration of one route: method, path, the scope that it needs, and its body.

Does not know what a handler does. `Routes` collects these declarations; the HTTP table, the OpenAPI document and
the tests read them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec
from starlette.responses import Response

from skyrl.base.wire.decoding import decode_json
from skyrl.storage.db.keys import Scope

RouteScope = Literal[Scope, "agent", "any", "open", "signed"]
"""What a route requires: a key with that scope; `agent`: the key of an agent session, or one with the scope `sample`;
`any`: any accepted key, but an agent session's; `open`: nothing; `signed`: a link that this server has signed."""
KEYLESS: frozenset[RouteScope] = frozenset({"open", "signed"})
Bound = Literal["control", "sample", "training"]
"""Which bound holds for the bytes of a body. Samples and training passes may be large, all other bodies are small."""
ROUTE_SCOPES: tuple[str, ...] = get_args(RouteScope)

Struct = type[msgspec.Struct]


@dataclass(frozen=True)
class Body:
    """A route's body. The OpenAPI document shows `schema`. The handler gets the body as `read_as` if given, else as
    `schema`; `read_as=bytes` is for a handler that decodes the body itself."""

    schema: Struct
    read_as: type[Any] | None = None
    optional: bool = False
    """A request without a body counts as one with the body `{}`."""
    protobuf: bool = False
    """The route also takes the same message as protobuf."""
    bound: Bound = "control"

    @property
    def handler_type(self) -> type[Any]:
        """The type that the handler gets."""
        return self.read_as or self.schema

    def decoded(self, content: bytes) -> Any:
        """The body as `handler_type`. Raises RequestError for a body that does not fit."""
        if self.read_as is bytes:
            return content
        return decode_json(self.handler_type, content or b"{}" if self.optional else content)


@dataclass(frozen=True, eq=False)
class Route:
    """One method of one path. `run` takes a `Call` and the parameters of path and query."""

    method: str
    template: str
    """As FastAPI reads it: the path from the root, with parameters in braces. `{name:path}` matches slashes, too."""
    scope: RouteScope
    body: Body | None
    run: Callable[..., Awaitable[Response]]
    parameters: tuple[str, ...]
    """Names of the parameters that FastAPI reads from path and query."""

    @cached_property
    def path(self) -> str:
        """From the root, with parameters in braces."""
        return self.template.replace(":path}", "}")

    @property
    def is_direct(self) -> bool:
        """Whether the HTTP table calls it without FastAPI: nothing is to be read from path and query."""
        return "{" not in self.template and not self.parameters

    @property
    def keyless(self) -> bool:
        return self.scope in KEYLESS
