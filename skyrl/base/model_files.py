"""The settings of a model as its small JSON files say them: config.json and those of its processor.

Reads one file per call. Imports neither torch nor transformers, so that the API can ask.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_of(base_model: str, name: str) -> dict[str, Any]:
    """The file `name` of a directory, or of a model of the hub that is on this machine. Empty if it cannot be read or
    holds no JSON object."""
    path: Any = Path(base_model) / name
    try:
        if not Path(base_model).is_dir():
            from huggingface_hub import try_to_load_from_cache  # takes 0.14 s, which most commands need not wait

            path = try_to_load_from_cache(base_model, name)
        values = json.loads(Path(path).read_text())
    except (OSError, TypeError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
