"""References to saves in the checkpoint store, the answers of a node that cannot bring one, and where this machine has
the base model's files.

A reference takes the place of a directory in requests to load an adapter or a version of the full weights:
`skyrl-store:<store key>`. Knows which keys may be fetched, and reads no store."""

from __future__ import annotations

import re
from pathlib import Path

from skyrl.base.types.weights import STORE_SCHEME

NOT_STORED, STORE_AWAY = "AdapterNotStored", "AdapterStoreAway"
"""The types of errors in answers. Not stored: the store has no such adapter. Away: the store cannot be read now, or the
node's disk is full; the load may be tried again."""

BASE_MODEL = "skyrl-base-model"
"""In place of a directory: the base model's, which each node has at a place of its own."""

_PART = r"[A-Za-z0-9_=~-][A-Za-z0-9_.=~-]*"
_KEY = re.compile(rf"{_PART}/{_PART}")
"""Two names made by `safe_name`, none of which begins with a dot. So a key names no directory outside its root, and no
incomplete directory."""
MAX_KEY = 1024


def reference_to(key: str) -> str:
    return f"{STORE_SCHEME}{key}"


def is_reference(path: str) -> bool:
    return path.startswith(STORE_SCHEME)


def key_in(reference: str) -> str | None:
    """The store key of a reference; None if it is not one."""
    key = reference.removeprefix(STORE_SCHEME)
    return key if len(key) <= MAX_KEY and _KEY.fullmatch(key) else None


PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json"]
"""What vLLM reads of a version of the weights."""


def base_directory(path: str) -> Path:
    """The directory of a base model, which is a directory or a name of the model hub. vLLM has brought a model of the
    hub into the hub's cache; before that, the name itself is returned."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # without patterns, a folder that lacks only README.md counts as incomplete
        return Path(snapshot_download(path, allow_patterns=PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:  # nobody has asked for the base model's weights yet but a server that has them
        return Path(path)
