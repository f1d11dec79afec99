"""Tells a client that its session trains one base model and samples from another whose token ids mean something else.

Recipes send token ids of one to the other, as in distillation. The ids may be in both vocabularies: then nothing fails,
and nothing is learned. Nothing is refused here: a judge, which gets text, may have any tokenizer.
"""

from __future__ import annotations

import asyncio

from skyrl.base.model_files import Shared, shared_ids
from skyrl.server.api.served import Served, ServedModel
from skyrl.storage.db.sessions import Sessions


class Tokenizers:
    """Compares each pair of base models once, when a session uses both."""

    def __init__(self, served: Served, sessions: Sessions) -> None:
        self._served = served
        self._sessions = sessions
        self._shared: dict[tuple[int, int], Shared | None] = {}

    async def note_sampled(self, session_id: str, model: ServedModel) -> str | None:
        """The sentence for a session that begins to sample from `model`, if there is something to say."""
        return await self._note(session_id, model, trains=False)

    async def note_trained(self, session_id: str, model: ServedModel) -> str | None:
        """The same for a session that begins to train `model`."""
        return await self._note(session_id, model, trains=True)

    async def _note(self, session_id: str, model: ServedModel, *, trains: bool) -> str | None:
        if len(self._served) == 1:
            return None
        trained, sampled = await self._sessions.base_models(session_id)
        for name in sorted(sampled if trains else trained):
            other = self._served.of(name)
            shared = None if other is model else await self._compared(model, other)
            if shared is not None and shared.same < shared.ids:
                return _sentence(model, other, shared) if trains else _sentence(other, model, shared)
        return None

    async def _compared(self, one: ServedModel, other: ServedModel) -> Shared | None:
        first, second = sorted((one.config, other.config), key=lambda config: config.role.number)
        pair = (first.role.number, second.role.number)
        if pair not in self._shared:
            files = [config.tokenizer_id or config.base_model_path for config in (first, second)]
            self._shared[pair] = await asyncio.to_thread(shared_ids, *files)
        return self._shared[pair]


def _sentence(trained: ServedModel, sampled: ServedModel, shared: Shared) -> str:
    return (
        f"this session trains {trained.name!a} and samples from {sampled.name!a}, whose tokenizers differ: "
        f"{shared.same} of {shared.ids} token ids mean the same in both, and no other id may go from one to the other"
    )
