"""What a barrier hands back when it has run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.db.database import Change
from skyrl.types.weights import AdapterVersion


@dataclass(frozen=True)
class Done:
    """The JSON result of a barrier. `change` runs in the transaction that stores the result. `adapter` is a new
    adapter version, for the inference servers."""

    result: dict[str, Any]
    change: Change | None = None
    adapter: AdapterVersion | None = None
