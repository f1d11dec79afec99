"""The full weights of the replicas: which version they must have, and how they get it.

A replica that starts has the base model's weights. It is ready only with the wanted version, and a replica on which an
update has failed is lost until it has that version: so no replica is used with other weights, or with half of them.
Changes go through the replica's sidecar, by `skyrl.weights`. Knows no rows and no samples.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from skyrl.base.types.weights import FIRST_VERSION
from skyrl.inference.replica import NoAnswer, Replica
from skyrl.inference.vllm_client import VllmError
from skyrl.weights.protocol import WeightUpdate, publish
from skyrl.weights.workers import VersionOnDisk, Workers, WorkersFailed

logger = logging.getLogger(__name__)

UPDATE_S = 1800.0
"""How long one update of a replica may take. A replica that hangs is lost earlier."""


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """A version of the full weights. `version` is the replicas' name for it. `location` is the directory of its files
    on the replicas' machine, or a reference by which the replicas' nodes find them."""

    version: str
    location: str


class NotPublished(Exception):
    """No replica can take the version, and at least one has said why. The replicas have the weights from before."""


Update = WeightUpdate[str, str]


class FullWeightsOfReplicas:
    """`first` gives the version to begin with. `key` is the admin key of the replicas' sidecars."""

    def __init__(self, first: Callable[[], Awaitable[VersionFiles]], key: str) -> None:
        self._first = first
        self._key = key
        self._wanted: VersionFiles | None = None
        self._given: set[str] = set()
        """Ids of the replicas to which this process has given weights."""
        self._publishing = asyncio.Lock()

    async def wanted(self) -> VersionFiles:
        """The version that replicas must have. Raises NoAnswer while it is not known."""
        if self._wanted is None:
            try:
                first = await self._first()
            except Exception as error:  # no error of a callback may end the watch over the servers
                raise NoAnswer(f"the wanted version of the weights is not known yet: {error}") from error
            self._wanted = self._wanted or first  # a publication may have come first
        return self._wanted

    def is_on(self, replica: Replica) -> bool:
        """Whether the replica has the wanted version."""
        return self._wanted is not None and replica.weights == self._wanted.version

    async def bring(self, replica: Replica) -> None:
        """Give the replica the wanted version, unless it has it, and continue its generation. The wanted version may
        change meanwhile. A replica that has a version of this name from an earlier engine gets it anew: that engine may
        have died before it recorded the version, and the save that was then repeated may have written files that
        differ by rounding. Raises VllmError when the replica refuses, httpx.TransportError when it does not answer."""
        wanted = await self.wanted()
        replica.weights = None
        may_have = replica.id in self._given or wanted.version == FIRST_VERSION
        await self._asked(replica, self._bring(self._workers(replica), wanted, may_have), wanted.version)
        replica.weights = wanted.version
        self._given.add(replica.id)

    async def _bring(self, workers: Workers, wanted: VersionFiles, may_have: bool) -> None:
        """`may_have`: files of this name never differed from those of the wanted version."""
        if may_have and wanted.version in (await workers.versions()).values():
            try:
                # An engine that died in a publication has left it paused
                await workers.post("/continue_generation")
            except WorkersFailed as error:
                if not error.refused:
                    raise
                logger.warning("the weights are loaded anew: %s", error)
            else:
                return
        await publish(VersionOnDisk(workers), wanted.version, [wanted.location])

    async def publish(
        self,
        wanted: VersionFiles,
        ready: Callable[[], Sequence[Replica]],
        lose: Callable[[Replica, str], None],
        *,
        may_fail: bool,
    ) -> None:
        """Give all ready replicas a new version. They read it while they sample; then generation is paused in place for
        the moment in which the weights change, and samples in flight go on with the new weights.

        Ready replicas that cannot take the version are lost, and come back with the wanted version. With `may_fail`,
        raises NotPublished when no replica can take the version and one has said why; then it is not wanted.
        """
        async with self._publishing:
            replicas = list(ready())
            updates: dict[Replica, Update] = {
                each: WeightUpdate(VersionOnDisk(self._workers(each))) for each in replicas
            }
            failed = await self._each(updates, lambda replica, update: self._stage(replica, update, wanted))
            staged = {replica: update for replica, update in updates.items() if replica not in failed}
            refusals = [error for error in failed.values() if isinstance(error, VllmError)]
            if may_fail and refusals and not staged:
                raise NotPublished("; ".join(map(str, refusals)))
            self._wanted = wanted
            for replica in ready():  # also one that has got ready meanwhile, with the weights from before
                if replica not in staged:
                    why = failed.get(replica)
                    lose(replica, str(why) if why is not None else f"lacks the weights {wanted.version}")
            failed = await self._each(staged, lambda replica, update: self._apply(replica, update, wanted))
            for replica, error in failed.items():
                lose(replica, f"an update of the weights failed: {error}")
            logger.info("weights %s are on %d of %d replicas", wanted.version, len(staged) - len(failed), len(replicas))

    def _workers(self, replica: Replica) -> Workers:
        if replica.addresses.sidecar is None:  # the row is of an earlier start without sidecars
            raise NoAnswer(f"the sidecar of vLLM at {replica.addresses.admin} is not known yet")
        return Workers([replica.addresses.sidecar], self._key, UPDATE_S)

    async def _stage(self, replica: Replica, update: Update, wanted: VersionFiles) -> None:
        async def stage() -> None:
            await update.begin(wanted.version)
            await update.send(wanted.location)

        await self._asked(replica, stage(), wanted.version)

    async def _apply(self, replica: Replica, update: Update, wanted: VersionFiles) -> None:
        replica.weights = None
        try:
            await self._asked(replica, update.finish(), wanted.version)
        except (VllmError, httpx.TransportError):
            raise
        except Exception as error:  # the version is wanted by now: the replica must not stay in use
            logger.exception("an update of the weights failed")
            raise NoAnswer(f"vLLM at {replica.addresses.admin}: {error}") from error
        replica.weights = wanted.version

    async def _each(
        self, updates: Mapping[Replica, Update], call: Callable[[Replica, Update], Awaitable[None]]
    ) -> dict[Replica, Exception]:
        """Call all at once. The errors of those that failed."""
        outcomes = await asyncio.gather(*(call(*each) for each in updates.items()), return_exceptions=True)
        failed: dict[Replica, Exception] = {}
        for replica, outcome in zip(updates, outcomes, strict=True):
            if isinstance(outcome, VllmError | httpx.TransportError):
                failed[replica] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed

    async def _asked(self, replica: Replica, call: Coroutine[Any, Any, None], version: str) -> None:
        try:
            await replica.unless_lost(call, UPDATE_S)
        except WorkersFailed as error:
            message = "; ".join(error.failed.values())
            if error.refused:
                raise VllmError(f"take the weights {version}", 400, message) from error
            raise NoAnswer(f"vLLM at {replica.addresses.admin}, weights {version}: {message}") from error
