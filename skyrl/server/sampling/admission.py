"""Bounds the samples that wait in this process, for all tenants together and for each tenant."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.base.wire.errors import RequestError
from skyrl.sampling.metrics import Refusal, RefusalMetrics

SHARE = 8
"""A tenant may hold up to SHARE times the capacity that is still free. One tenant alone gets 8/9 of the whole, two
tenants get 8/17 each. So there is always room for a tenant that holds little."""


@dataclass(slots=True)
class _TenantCount:
    requests: int = 0
    bytes: int = 0


class Admission:
    """Counts waiting samples in requests and bytes. A sample above the bound is refused and not recorded."""

    def __init__(self, max_requests: int, max_bytes: int, metrics: RefusalMetrics | None = None) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._metrics = metrics or RefusalMetrics()
        self.requests = 0
        self.bytes = 0
        self._tenants: dict[str, _TenantCount] = {}

    def enter(self, tenant: str, size: int) -> None:
        """Count a sample. Raises RequestError 429 if the bound is reached, or the share of the tenant."""
        full = self.requests >= self._max_requests
        if full or self.bytes + size > max(self._max_bytes, size):
            raise self._refusal(full, f"{self.requests} samples ({self.bytes} bytes) are waiting")
        held = self._tenants.get(tenant)
        if held is not None:
            full = held.requests >= SHARE * (self._max_requests - self.requests)
            if full or held.bytes >= SHARE * (self._max_bytes - self.bytes):
                waiting = f"{held.requests} samples ({held.bytes} bytes) of yours are waiting, which is your share"
                raise self._refusal(full, waiting)
        self.add(tenant, size)

    def add(self, tenant: str, size: int) -> None:
        """Count a sample that this process or another has admitted before. Never refuses."""
        held = self._tenants.setdefault(tenant, _TenantCount())
        held.requests += 1
        held.bytes += size
        self.requests += 1
        self.bytes += size

    def leave(self, tenant: str, size: int) -> None:
        held = self._tenants[tenant]
        held.requests -= 1
        held.bytes -= size
        if not held.requests:
            del self._tenants[tenant]
        self.requests -= 1
        self.bytes -= size

    def _refusal(self, full: bool, waiting: str) -> RequestError:
        """`full`: the number of samples is the reason; otherwise their bytes are."""
        reason: Refusal = "full" if full else "bytes"
        self._metrics.refused(reason)
        return RequestError(f"{waiting}; try again later", status=429, retry_after_s=1)
