"""The watch over the starts of a server's base models, where there are several: reads what each does, and stops the
processes of one that cannot start, while the others serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from skyrl.cli.launcher.base_model_start import BaseModelStart
from skyrl.cli.launcher.first_ready import FirstReady
from skyrl.cli.launcher.parts import Part, Parts
from skyrl.storage.db import engine_state
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.engine_state import EngineState
from skyrl.storage.db.repeats import Rounds

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class BaseModelsWatch:
    """`names` has the names of the base models' parts, by number."""

    def __init__(
        self, first_ready: FirstReady, parts: Parts, names: Mapping[int, Sequence[str]], database: Database
    ) -> None:
        self._first_ready = first_ready
        self._parts = parts
        self._names = names
        self._database = database

    def parts(self) -> list[Part]:
        return [
            Part("base models", supervise=self._look, duty="watching the starts of the base models"),
            Part("given up", supervise=self._give_up, duty="stopping base models that cannot start"),
        ]

    async def _look(self) -> None:
        """Read the rows until each base model was ready once or is given up."""
        rounds = Rounds("reading what the base models do", LOOK_S)
        while starting := [s for s in self._first_ready.starts.values() if not s.was_ready and s.failure is None]:
            try:
                states = await self._database.read_async(lambda c, starting=starting: _states(c, starting))
            except Exception as error:  # logged; the watch must go on
                rounds.failed(error)
            else:
                rounds.went_well()
                self._first_ready.look(states)
            await asyncio.sleep(LOOK_S)
        await asyncio.Event().wait()  # a part's duty ends with the server

    async def _give_up(self) -> None:
        while True:
            start = await self._first_ready.next_given_up()
            failure = start.failure
            assert failure is not None
            logger.error(
                "%s cannot start and is given up until the server starts again; the other base models serve: %s\n\n"
                "the end of %s:\n%s",
                start.name,
                failure,
                failure.log,
                failure.log_end,
            )
            await self._parts.drop(self._names[start.config.role.number])
            await self._publish(start, str(failure))

    async def _publish(self, start: BaseModelStart, reason: str) -> None:
        """Write into its row why it is missing, for the API. Tries until the database takes it."""
        rounds, key = Rounds("publishing that a base model cannot start", LOOK_S), start.config.role.state_keys[0]
        while True:
            try:
                await asyncio.to_thread(self._database.write, lambda c: engine_state.clear(c, reason, key))
            except Exception as error:  # logged; tried until the database takes it
                rounds.failed(error)
                await asyncio.sleep(LOOK_S)
            else:
                rounds.went_well()
                return


def _states(connection: Connection, starts: Sequence[BaseModelStart]) -> dict[int, EngineState]:
    roles = [start.config.role for start in starts]
    return {role.number: engine_state.read_state(connection, role.state_keys[:1]) for role in roles}
