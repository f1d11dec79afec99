"""References to saves in the checkpoint store, and the answers of a node that cannot bring one.

A reference takes the place of a directory in requests to load an adapter or a version of the full weights:
`skyrl-store:<store key>`. Knows which keys may be fetched, and reads no store.
"""

from __future__ import annotations

import re

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
