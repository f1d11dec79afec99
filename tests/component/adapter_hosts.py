"""Fake AdapterHosts for tests of parts that use one. `test_adapter_host.py` tests the real one."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.adapter_host import AdapterUnavailable


@dataclass
class HostWithAllAdapters:
    """A host that has the files of every version under `root`."""

    root: str = "/adapters"
    copies: bool = False

    async def bring(self, adapter: AdapterVersion) -> str:
        return f"{self.root}/{adapter.name}"


@dataclass
class UnreachableHost:
    """A host whose first `times` calls fail, because the files cannot be brought to it."""

    times: float = float("inf")
    copies: bool = False

    async def bring(self, adapter: AdapterVersion) -> str:
        if self.times > 0:
            self.times -= 1
            raise AdapterUnavailable(adapter, OSError("no route to 10.0.0.7"))
        return await HostWithAllAdapters().bring(adapter)
