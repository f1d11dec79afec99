"""What becomes of a request whose answer began with another version of the full weights than it wants.

The answer itself goes to nobody. Does not wait, and does not send: the forwarding client does.
"""

from __future__ import annotations

from collections import Counter

from skyrl.base.types.weights import WeightsRef
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.server.sampling.error_messages import server_failure
from skyrl.server.sampling.loaded_weights import LoadedWeights, OtherWeights
from skyrl.server.sampling.progress import SampleWait
from skyrl.storage.db.faults import DatabaseError, reason


class OtherVersions:
    """`counts` has one counter per kind of event. `loaded` is None for a server whose weights are never replaced: none
    of its answers is compared."""

    def __init__(self, loaded: LoadedWeights | None, counts: Counter[str]) -> None:
        self._loaded = loaded
        self._counts = counts

    async def why_again(self, wanted: WeightsRef, other: OtherWeights) -> tuple[str, SampleWait]:
        """Why the request is sent again, and what it waits for: the server may have been started again, and gets the
        current weights soon. Raises FailedRequest if `wanted` are not current any more, or the server does not tell
        which weights it used."""
        assert self._loaded is not None
        try:
            replaced = await self._loaded.replaced(wanted)
        except DatabaseError as away:
            return f"{other}, and which weights are current is not known: {reason(away)}", SampleWait.AWAY
        if replaced is not None:
            self._counts["replaced_weights"] += 1
            raise FailedRequest(replaced, ErrorCategory.USER)
        if not other.versions:
            self._counts["malformed"] += 1
            raise server_failure(str(other))
        self._counts["other_weights"] += 1
        return f"the inference server does not have the current weights yet: {other}", SampleWait.LOADING
