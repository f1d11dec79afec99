"""An AdapterHost for tests of those who ask one. `test_adapter_host.py` has the tests of the real one."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.types.weights import AdapterVersion


@dataclass
class AllThere:
    """The host of a replica that has the files of every version below `root`."""

    root: str = "/adapters"

    async def bring(self, adapter: AdapterVersion) -> str:
        return f"{self.root}/{adapter.name}"
