"""Where one inference server of a Ray cluster runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacedServer:
    """One inference server. `url` is None while it does not run; then `reason` says why, after the server's name.
    `sidecar_url` is that of the sidecar beside it, if it has one."""

    name: str
    kind: str
    url: str | None = None
    node: str | None = None
    incarnation: str | None = None
    reason: str = ""
    sidecar_url: str | None = None

    @property
    def sentence(self) -> str:
        """What it does, for people: `vllm-1 waits for 1 GPU: ...`."""
        return f"{self.name} {self.reason or f'starts on node {self.node}'}"

    @property
    def for_tenants(self) -> str:
        """The sentence without what it says of the operator's nodes."""
        return f"{self.name} {self.reason.partition(':')[0].partition(' on node')[0] or 'starts'}"
