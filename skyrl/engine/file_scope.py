"""The models whose files an engine may delete, and the names of the files of its comparison at the start.

Knows which models are in an engine's scope. Knows no files.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from skyrl.base.config.base_models import BaseModelSlot
from skyrl.storage.checkpoint_store.versions import model_of
from skyrl.storage.db.database import Database
from skyrl.storage.db.scopes import models_in_scope

_PROBE = re.compile(r"start-check-\d+-?(.*)")


def new_probe(role: BaseModelSlot) -> str:
    """The name of a model for one comparison. It is new at each start: a server that has loaded a name never loads
    other files by it. Digits, because two causes of a failed start are compared without their numbers."""
    number = f"start-check-{secrets.randbelow(10**12)}"
    return f"{number}-{role.name}" if role.name else number


class FileScope:
    """The models whose files an engine may delete."""

    def __init__(self, role: BaseModelSlot, database: Database) -> None:
        self._role = role
        self._database = database

    def among(self, model_ids: Iterable[str]) -> set[str]:
        """Those of `model_ids` whose files belong to this engine. One query if the server has several engines, and none
        if it has one."""
        ids = set(model_ids)
        if self._role.scope.is_everything:
            return ids
        probes = {model_id: match[1] for model_id in ids if (match := _PROBE.fullmatch(model_id)) is not None}
        own = {model_id for model_id, name in probes.items() if self._owns_probe(name)}
        return own | self._database.read(lambda c: models_in_scope(c, ids - probes.keys(), self._role.scope))

    def has_group(self, group: str) -> bool:
        """Whether keys of the checkpoint store that begin with this group belong to this engine."""
        return bool(self.among([model_of(group)]))

    def _owns_probe(self, role_name: str) -> bool:
        return role_name == self._role.name or (not role_name and self._role.scope.has_rest)
