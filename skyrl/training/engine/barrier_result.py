"""The result of a barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.base.types.weights import AdapterVersion, FullWeights
from skyrl.storage.db.database import Change


@dataclass(frozen=True)
class BarrierResult:
    """`result` is the JSON for the client. `change` runs in the transaction that stores the result. `weights` are a
    new version, to bring to the inference servers."""

    result: dict[str, Any]
    change: Change | None = None
    weights: AdapterVersion | FullWeights | None = None
