"""What a resource declares of one route: method, path, what a request must show, and its body.

Knows no handler's work and no server. `Routes` collects these declarations; the HTTP table, the OpenAPI document and
the tests read them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from starlette.responses import Response

from skyrl.db.keys import Scope
from skyrl.wire.decoding import decode_json

Needs = Literal[Scope, "any", "open", "signed"]
"""What a request must show: a key with that scope; `any`: any key; `open`: nothing; `signed`: the signature that a link
of this server carries."""
KEYLESS: frozenset[Needs] = frozenset({"open", "signed"})
Bound = Literal["control", "sample", "training"]
"""Which bound holds for the bytes of a body: samples and training passes may be large, all other bodies are small."""
NEEDS: tuple[str, ...] = get_args(Needs)

Struct = type[msgspec.Struct]


@dataclass(frozen=True)
class Body:
    """A route's body. `schema` is what the OpenAPI document shows; the handler gets a `read_as`, which is `schema`
    unless it says another struct, or `bytes` for a handler that decodes the body itself."""

    schema: Struct
    read_as: type[Any] | None = None
    optional: bool = False
    """A request without a body counts as one with `{}`."""
    protobuf: bool = False
    """The route also takes the same message as protobuf."""
    bound: Bound = "control"

    @property
    def given_as(self) -> type[Any]:
        """The type that the handler gets."""
        return self.read_as or self.schema

    def decoded(self, content: bytes) -> Any:
        """A `given_as`. Raises RequestError for a body that is none."""
        if self.read_as is bytes:
            return content
        return decode_json(self.given_as, content or b"{}" if self.optional else content)


@dataclass(frozen=True, eq=False)
class Route:
    """One method of one path. `run` takes a `Call` and the parameters of path and query."""

    method: str
    path: str
    """From the root, with parameters in braces."""
    scope: Needs
    body: Body | None
    run: Callable[..., Awaitable[Response]]
    parameters: tuple[str, ...]
    """Names of the parameters that FastAPI reads from path and query."""

    @property
    def keyless(self) -> bool:
        return self.scope in KEYLESS
