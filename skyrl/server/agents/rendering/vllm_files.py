"""Single files of the installed vLLM that import nothing of vLLM: its copies of releases' own code for their chats."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from skyrl.server.agents.rendering.renderer import CannotRender


@cache
def module_of(path: str) -> Any:
    """The module in a file, whose `path` is that within vLLM's package. Raises CannotRender if there is none."""
    found = importlib.util.find_spec("vllm")
    places = [] if found is None else found.submodule_search_locations or []
    file = next((file for place in places if (file := Path(place) / path).is_file()), None)
    spec = None if file is None else importlib.util.spec_from_file_location(f"skyrl_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise CannotRender(f"vLLM's {path} is not on this machine")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
