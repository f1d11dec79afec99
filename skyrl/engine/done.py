"""What a barrier hands back when it has run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.db.database import Change


@dataclass(frozen=True)
class Done:
    """The JSON result of a barrier. `change` runs in the transaction that stores the result. `adapter` is the name and
    the directory of a new adapter version, for the inference servers."""

    result: dict[str, Any]
    change: Change | None = None
    adapter: tuple[str, Path] | None = None
