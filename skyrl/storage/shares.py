"""Each tenant's share of what all tenants fill together, and its use for the database's disk.

`is_over` is the one rule. `SavesDisk` says when it can matter for checkpoints. `DiskShares` counts, in one API process,
the bytes that each tenant's requests have put into the database: bodies and results until they are deleted, and rows
that stay. It knows sizes and times; it does not know which rows they are, and after a restart it begins at zero: what
was stored before counts as taken from the disk.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skyrl.base.wire.errors import OverQuota

SHARE = 8
"""A tenant may hold up to SHARE times the capacity that is still free. One tenant alone gets 8/9 of the whole, two
tenants get 8/17 each. So there is always room for a tenant that holds little."""

LEAST_BYTES = 64 * 2**20
"""What a tenant may hold on a disk however full it is: others may have filled it."""

ROW_BYTES = 1024
"""About what a row takes beside its body, with its indexes."""
SESSIONS_S = 24 * 3600.0
"""How long a session's row counts. It stays longer, so that a tenant's runs stay listed."""
SHARE_OF_DISK = "share_of_disk"
"""The name of this bound among the quotas."""
RETRY_S = 5.0
LOOK_S = 0.5
"""How long a look at the disk holds."""
STEPS = 64
"""Bytes leave in steps of this part of the time for which they are kept."""


def is_over(held: float, free: float) -> bool:
    """Whether a tenant that holds so much has its share."""
    return held >= SHARE * max(0.0, free)


def is_over_on_disk(held: float, free: float) -> bool:
    """`is_over` for bytes on a disk, of which a tenant may always have LEAST_BYTES."""
    return held >= LEAST_BYTES and is_over(held, free)


@dataclass(frozen=True, slots=True)
class SavesDisk:
    """The disk that has the checkpoints, in or above `directory`. `spare_bytes` of it count as taken."""

    directory: Path
    spare_bytes: int

    def tight(self) -> float | None:
        """The free bytes, if so few that one tenant may have more than its share; else None."""
        disk = shutil.disk_usage(next(path for path in (self.directory, *self.directory.parents) if path.is_dir()))
        free = disk.free - self.spare_bytes
        return free if is_over_on_disk(disk.used, free) else None


class DiskShares:
    """Of one API process. `directory` is on the disk of the database, None if that is another machine's: then nothing
    is refused. `spare_bytes` of the disk count as taken. A request's rows stay for `requests_s` after its end, an agent
    session's for `agents_s`."""

    def __init__(
        self,
        directory: Path | None = None,
        spare_bytes: int = 0,
        requests_s: float = 3600.0,
        agents_s: float = 8 * 86400.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._spare_bytes = spare_bytes
        self._requests_s, self._agents_s = requests_s, agents_s
        self._clock = clock
        self._held: dict[str, int] = {}
        self._leaving: dict[float, dict[str, int]] = {}
        """By time: how many bytes of each tenant are deleted then."""
        self._free, self._looked_at = math.inf, -math.inf

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def check(self, tenant: str, *, short: bool = False) -> None:
        """Raises OverQuota (429) if the tenant has its share. Nothing was recorded then, and waiting helps. Requests
        that are `short` may have LEAST_BYTES more: larger ones may wait for them."""
        if self._held.get(tenant, 0) < LEAST_BYTES:
            return
        self._forget()
        held = self.held(tenant)
        if is_over_on_disk(held - LEAST_BYTES if short else held, self._free_bytes()):
            raise OverQuota(
                SHARE_OF_DISK,
                f"the requests, results and sessions of this API key's tenant have {held} bytes on the server's disk, "
                f"which is its share: requests with their results are deleted {self._requests_s:.0f} s after their "
                f"end (result_retention_s), agent sessions {self._agents_s:.0f} s after; try again later",
                retry_after_s=RETRY_S,
            )

    def hold(self, tenant: str, size: int) -> None:
        """A request of so many bytes was recorded. Call `ended` when it has ended."""
        self._held[tenant] = self._held.get(tenant, 0) + size

    def ended(self, tenant: str, held: int, kept: int) -> None:
        """A request that held so many bytes has ended, and `kept` bytes of it stay for a while."""
        self.hold(tenant, kept - held)
        self._leave(tenant, kept, self._requests_s)

    def keep_agents(self, tenant: str, size: int) -> None:
        """Rows of an agent session were added."""
        self.hold(tenant, size)
        self._leave(tenant, size, self._agents_s)

    def keep_session(self, tenant: str, size: int) -> None:
        """The row of a session, or of a sampling session, was added."""
        self.hold(tenant, size)
        self._leave(tenant, size, SESSIONS_S)

    def _leave(self, tenant: str, size: int, after_s: float) -> None:
        if math.isinf(after_s):  # kept for ever
            return
        step = after_s / STEPS
        at = (math.floor((self._clock() + after_s) / step) + 1) * step
        if at not in self._leaving:
            self._forget()
            self._leaving[at] = defaultdict(int)
        self._leaving[at][tenant] += size

    def _forget(self) -> None:
        now = self._clock()
        for at in [at for at in self._leaving if at <= now]:
            for tenant, size in self._leaving.pop(at).items():
                if left := self._held.get(tenant, 0) - size:
                    self._held[tenant] = left
                else:
                    self._held.pop(tenant, None)

    def _free_bytes(self) -> float:
        if self._directory is not None and (now := self._clock()) >= self._looked_at + LOOK_S:
            self._free, self._looked_at = shutil.disk_usage(self._directory).free - self._spare_bytes, now
        return self._free
