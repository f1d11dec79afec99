"""Two engines of one server: base models `first` and `second`, both tiny, on one database and one state directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine_harness import Harness, harness_in

from skyrl.base.tiny import model_path

FIRST, SECOND = "first", "second"
ENTRIES = [{"base_model": str(model_path()), "served_model_names": [name]} for name in (FIRST, SECOND)]


@asynccontextmanager
async def two_harnesses(state_dir: Path, **flags: Any) -> AsyncIterator[tuple[Harness, Harness]]:
    """The harnesses of both base models. No engine is started yet."""
    both = {"base_models": ENTRIES, **flags}
    async with harness_in(state_dir, number=0, **both) as first, harness_in(state_dir, number=1, **both) as second:
        yield first, second
