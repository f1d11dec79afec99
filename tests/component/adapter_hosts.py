"""An AdapterHost for tests of those who ask one. `test_adapter_host.py` has the tests of the real one."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.inference.adapter_host import AdapterUnavailable
from skyrl.types.weights import AdapterVersion


@dataclass
class AllThere:
    """The host of a replica that has the files of every version below `root`."""

    root: str = "/adapters"

    async def bring(self, adapter: AdapterVersion) -> str:
        return f"{self.root}/{adapter.name}"


@dataclass
class Away:
    """A host that has no way to the files, the first `times` times that it is asked."""

    times: float = float("inf")

    async def bring(self, adapter: AdapterVersion) -> str:
        if self.times > 0:
            self.times -= 1
            raise AdapterUnavailable(adapter, OSError("no route to 10.0.0.7"))
        return await AllThere().bring(adapter)
