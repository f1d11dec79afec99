"""Models in training whose base model the server does not train any more: it was taken out of `base_models`, or is only
sampled from now.

They must not be restored onto another base model: the shapes may fit by chance. Only a server with several base models
can tell; a server with one has always taken models of any name.
"""

from __future__ import annotations

import logging

from skyrl.base.config.base_models import BaseModelSlot
from skyrl.base.types.requests import ENGINE_KINDS, Command
from skyrl.base.wire.errors import FailedRequest
from skyrl.storage.db import commands as rows
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.models import ModelRecord, living, set_model
from skyrl.training.engine.settlement import Settlement

logger = logging.getLogger(__name__)


def fail_foreign(database: Database, settlement: Settlement, role: BaseModelSlot) -> None:
    """Fail the models that are in the scope of this engine and of no base model that trains, and their commands. Raises
    DatabaseError and Displaced."""
    if role.own.is_everything or not role.scope.has_rest:
        return

    def read(connection: Connection) -> tuple[dict[str, ModelRecord], list[Command]]:
        foreign = {model.id: model for model in living(connection, role.scope) if model.base_model not in role.own}
        pending = rows.pending(connection, sorted(ENGINE_KINDS), scope=role.scope) if foreign else []
        return foreign, [command for command in pending if command.model_id in foreign]

    foreign, commands = database.read(read)
    if not foreign:
        return

    def why(command: Command) -> FailedRequest:
        return FailedRequest(f"model_id: {_sentence(foreign[str(command.model_id)])}")

    def fail_models(connection: Connection) -> None:
        for model_id in foreign:
            set_model(model_id, status="failed")(connection)

    settlement.refuse(commands, why, fail_models)
    for model in foreign.values():
        logger.error("%s", _sentence(model))


def _sentence(model: ModelRecord) -> str:
    return f"model {model.id!r} cannot go on: this server does not train its base model {model.base_model!r} any more"
