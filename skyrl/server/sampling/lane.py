"""What the samples of one base model go through, and how a sample finds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skyrl.base.config.several import ByName
from skyrl.base.wire.errors import RequestError
from skyrl.server.pictures.ingress import PictureIngress
from skyrl.server.sampling.client import ForwardingClient
from skyrl.server.sampling.fair_order import FairOrder
from skyrl.server.sampling.forwarded_samples import ForwardedSamples
from skyrl.server.sampling.guards import FeatureGuard
from skyrl.server.sampling.job import ContextLimits
from skyrl.server.sampling.loaded_weights import LoadedWeights


@dataclass(frozen=True)
class Lane:
    """`base_name` is the inference servers' name for the base model. `client` is None if the engine samples, `order` if
    the inference servers ignore priorities, `loaded` if they never change their weights. `places` is how many adapters
    they run at a time, None if that is unknown. `why_away` says why no inference server runs, if that is known."""

    base_name: str
    limits: Callable[[], ContextLimits]
    client: ForwardingClient | None
    order: FairOrder | None
    guard: FeatureGuard
    pictures: PictureIngress
    forwarded: ForwardedSamples
    loaded: LoadedWeights | None = None
    places: int | None = None
    why_away: Callable[[], str] = lambda: ""


_SESSION = re.compile(rb'"sampling_session_id"\s*:\s*"([^"\\]{1,200})"')
_HEAD = 2**12
"""The SDK writes the fields of a sample in a fixed order, with this one near the beginning or the end."""


class Lanes:
    """The lanes of a server's base models, in the order of its configuration."""

    def __init__(self, lanes: Sequence[Lane], names: ByName) -> None:
        self._lanes = tuple(lanes)
        self._names = names

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def of(self, base_model: str, field: str) -> Lane:
        """The lane of the base model in a stored row. The only lane takes rows of every name: the operator may have
        given the base model another one since. Raises RequestError naming `field`."""
        if len(self._lanes) == 1:
            return self._lanes[0]
        number = self._names.number(base_model)
        if number is None:
            raise RequestError(
                f"belongs to the base model {base_model!r}, which is not served here any more; there is: "
                f"{', '.join(self._names.served)}",
                field=field,
            )
        return self._lanes[number]

    def with_sample(self, request_id: str) -> Lane | None:
        """The lane in which this process forwards a sample now."""
        return next((lane for lane in self._lanes if request_id in lane.forwarded), None)

    def guess(self, body: bytes, base_model_of: Callable[[str], str | None]) -> Lane | None:
        """The lane of a sample whose body is not decoded yet: only to decode it faster. `base_model_of` tells the base
        model of a sampling session that this process knows."""
        if len(self._lanes) == 1:
            return self._lanes[0]
        found = _SESSION.search(body, max(0, len(body) - _HEAD)) or _SESSION.search(body, 0, _HEAD)
        if found is None or (base_model := base_model_of(found[1].decode(errors="replace"))) is None:
            return None
        number = self._names.number(base_model)
        return None if number is None else self._lanes[number]
