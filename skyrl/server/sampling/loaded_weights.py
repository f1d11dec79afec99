"""Whether weights can still be sampled from, on a server whose full weights are replaced while it serves.

The database says which weights are current. Each answer of the inference server says which weights it has used; the
exchanges compare. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from skyrl.base.types.weights import EVERYTHING, Scope, WeightsRef
from skyrl.storage.db import full_weights
from skyrl.storage.db.database import Database
from skyrl.storage.db.full_weights import WeightsReplaced, replaced_sentence


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by the weights of this version."""

    version: str
    start: int
    end: int


class OtherWeights(Exception):
    """An answer began with other weights than the ones that were asked for. Nobody may get it. `versions` began it;
    none are known if the server does not tell."""

    def __init__(self, versions: Iterable[str]) -> None:
        self.versions = sorted(set(versions))
        super().__init__(
            f"the answer began with the weights {', '.join(self.versions) or 'that the server did not tell'}"
        )


NOT_TOLD = msgspec.Raw(b"null")
_decode_spans = msgspec.json.Decoder(list[Span] | None).decode


def spans_in(told: msgspec.Raw) -> list[Span] | None:
    """What a choice tells of its versions; None if it tells nothing that can be read. Servers that never change their
    weights may have another field of this name."""
    try:
        return _decode_spans(told)
    except msgspec.DecodeError:
        return None


def check_began(spans: Iterable[list[Span] | None], wanted: str) -> None:
    """Raise OtherWeights unless one of an answer's sequences began with the wanted version.

    The sequences of a request begin one after another. If the weights change in between, the later ones begin with the
    new version, as the later tokens of the earlier ones do."""
    first = [of_sequence[0].version for of_sequence in spans if of_sequence]
    if wanted not in first:
        raise OtherWeights(first)


class LoadedWeights:
    """Reads the database at each call. `scope`: the names of the base model (`BaseModelSlot.own`)."""

    def __init__(self, database: Database, scope: Scope = EVERYTHING) -> None:
        self._database = database
        self._scope = scope

    async def replaced(self, weights: WeightsRef) -> str | None:
        """Why nobody can sample from `weights` any more; None if they are current."""
        now = await self._database.read_async(lambda c: full_weights.current(c, self._scope))
        return None if weights == now else replaced_sentence(weights, now)

    async def check(self, weights: WeightsRef, field: str) -> None:
        """Raises WeightsReplaced, naming `field`."""
        if (sentence := await self.replaced(weights)) is not None:
            raise WeightsReplaced(sentence, field=field)
