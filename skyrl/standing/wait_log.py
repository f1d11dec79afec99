"""Logs that requests of a tenant wait, so that the operator reads the sentence that the user reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from skyrl.standing.standing import Standing

logger = logging.getLogger(__name__)

EVERY_S = 60.0
"""A tenant's waits are logged at most this often."""
MAX_TENANTS = 10_000
"""Tenants of which the time of the last line is kept."""


class WaitLog:
    """One per API process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}
        """By tenant, when a wait was logged last."""

    def note(self, request_id: str, tenant: str, standing: Standing) -> None:
        """A poll was answered without a result. A request that is being worked on is not logged."""
        if standing.state == "active":
            return
        now = self._clock()
        if now - self._logged.get(tenant, -EVERY_S) < EVERY_S:
            return
        if len(self._logged) >= MAX_TENANTS:
            self._logged.clear()
        self._logged[tenant] = now
        logger.info("request %s of tenant %s waits: %s", request_id, tenant[:8], standing.sentence)
