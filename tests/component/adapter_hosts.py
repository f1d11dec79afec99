"""A fake AdapterHost for tests of parts that use one. `test_adapter_host.py` tests the real one."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.types.weights import AdapterVersion


@dataclass
class HostWithAllAdapters:
    """A host that has the files of every version under `root`."""

    root: str = "/adapters"

    async def bring(self, adapter: AdapterVersion) -> str:
        return f"{self.root}/{adapter.name}"
