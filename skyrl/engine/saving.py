"""The saves: a model's training state, an adapter to sample from, an adapter to take elsewhere.

Named saves go to the checkpoint store. Adapters to sample from also lie in a local directory, because vLLM reads them
there; unnamed ones lie nowhere else. Knows which rows a save writes. Deletes nothing: what no row refers to is swept.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl.backends.base import Backend
from skyrl.config.server import ServerConfig
from skyrl.db import audit, checkpoints, usage
from skyrl.db.database import Change, Connection, Database
from skyrl.db.models import adapter_of, set_model
from skyrl.db.samplers import Sampler, add_sampler, sampler_exists
from skyrl.engine.done import Done
from skyrl.engine.encryption import encrypt_files, parse_recipients
from skyrl.engine.save_limits import SaveLimits
from skyrl.storage.adapters import adapter_location
from skyrl.storage.base import CheckpointStore
from skyrl.storage.directories import atomic_directory, link_files, remove, safe_name, sizes_of
from skyrl.types.command import Command
from skyrl.wire.errors import FailedRequest, RequestError
from skyrl.wire.paths import CheckpointKind, TinkerPath, adapter_name_of, check_name, sampling_session_id_of
from skyrl.wire.requests import (
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    decode_json,
)

MAX_TTL_S = 10 * 365 * 86_400


class Saves:
    """One method per kind of save. Raises FailedRequest or RequestError for the caller's mistakes, StoreError for the
    store's."""

    def __init__(self, config: ServerConfig, database: Database, backend: Backend, store: CheckpointStore) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        self._store = store
        self._limits = SaveLimits(config, database)

    def weights(self, command: Command, body: bytes, model: Any) -> Done:
        request = decode_json(SaveWeightsRequest, body)
        path = self._path("weights", model, request)
        return self._store_named(command, model, request, path, lambda d: self._backend.save_state(model.id, d))

    def external(self, command: Command, body: bytes, model: Any) -> Done:
        """An adapter as PEFT names it, each file encrypted if the request names recipients."""
        request = decode_json(SaveWeightsExternalRequest, body)
        path = self._path("external_weights", model, request)
        recipients = parse_recipients(request.age_encryption_recipients, "age_encryption_recipients")

        def write(directory: Path) -> None:
            self._backend.save_adapter(model.id, directory)
            if recipients:
                encrypt_files(directory, recipients)

        return self._store_named(command, model, request, path, write)

    def for_sampler(self, command: Command, body: bytes, model: Any) -> Done:
        request = decode_json(SaveWeightsForSamplerRequest, body)
        path = None
        if request.path is not None:
            path = self._path("sampler_weights", model, request)
        elif request.sampling_session_seq_id is None:
            raise RequestError("give a name, or sampling_session_seq_id for an unnamed save", field="path")
        else:
            self._check_number(model.session_id, request.sampling_session_seq_id)
            _check_ttl(request)
            self._limits.check_disk()
            self._limits.check_stored(model.tenant)
            self._limits.check_sampling_sessions(model.tenant)
        version = model.sampler_version + 1
        name = adapter_name_of(model.id, version)
        location = adapter_location(model.id, version)
        directory = self._config.state_dir / location
        remove(directory)  # left by an engine that died between the rename and the commit
        with atomic_directory(directory) as scratch:
            self._backend.save_adapter(model.id, scratch, dtype=self._config.adapter_dtype)
        bump = set_model(model.id, sampler_version=version)
        if path is not None:
            done = self._store_named(
                command,
                model,
                request,
                path,
                lambda scratch: link_files(directory, scratch),
                {"adapter_name": name, "directory": location},
            )
            return Done(done.result, _both(bump, done.change), adapter=(name, directory))
        assert request.sampling_session_seq_id is not None
        sampler = Sampler(
            id=sampling_session_id_of(model.session_id, request.sampling_session_seq_id),
            session_id=model.session_id,
            tenant=model.tenant,
            base_model=model.base_model,
            model_path=None,
            adapter_name=name,
            adapter_path=location,
        )
        seq_id, size_bytes = request.sampling_session_seq_id, sum(sizes_of(directory).values())

        def open_session(connection: Connection) -> None:
            bump(connection)
            add_sampler(connection, sampler, seq_id, size_bytes)

        result = {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}
        return Done(result, open_session, adapter=(name, directory))

    def _store_named(
        self,
        command: Command,
        model: Any,
        request: SaveWeightsRequest,
        path: TinkerPath,
        write: Callable[[Path], None],
        more: dict[str, Any] | None = None,
    ) -> Done:
        key = _new_key(command, path)
        with self._store.writing(key) as directory:
            write(directory)
        now = time.time()
        row = {
            "tenant": model.tenant,
            "model_id": path.model_id,
            "kind": path.kind,
            "name": path.name,
            "store_key": key,
            "base_model": model.base_model,
            **asdict(adapter_of(model)),
            "size_bytes": sum(self._store.files(key).values()),
            "public": False,
            "user_metadata": request.user_metadata,
            "created_at": now,
            "expires_at": None if request.ttl_seconds is None else now + request.ttl_seconds,
            **(more or {}),
        }
        event = "checkpoint_exported" if path.kind == "external_weights" else "checkpoint_created"

        def keep(connection: Connection) -> None:
            checkpoints.put(connection, row)
            usage.count_checkpoint(connection, model.tenant, model.session_id, model.base_model)
            audit.record(connection, model.tenant, event, tinker_path=str(path), model_id=model.id)

        return Done({"type": command.kind.lower(), "path": str(path)}, keep)

    def _path(self, kind: CheckpointKind, model: Any, request: SaveWeightsRequest) -> TinkerPath:
        """Where a save goes. Raises unless its name, its TTL and the place are good, and there is room for it."""
        if request.path is None:
            raise RequestError("is missing: name the checkpoint", field="path")
        path = TinkerPath(model.id, kind, check_name(request.path))
        _check_ttl(request)
        self._limits.check_disk()
        self._limits.check_stored(model.tenant, besides=path)
        if not request.overwrite:
            taken = self._database.read(lambda c: checkpoints.exists(c, path))
            if taken is not None and (taken.expires_at is None or taken.expires_at > time.time()):
                raise FailedRequest(f"path: {path} exists already; save with overwrite, or use another name")
        return path

    def _check_number(self, session_id: str, seq_id: int) -> None:
        """Numbers of sampling sessions name one adapter each: using one again would sample from the older one."""
        sampler_id = sampling_session_id_of(session_id, seq_id)
        if self._database.read(lambda c: sampler_exists(c, sampler_id)):
            raise FailedRequest(f"sampling_session_seq_id: sampling session {sampler_id} exists already")


def _new_key(command: Command, path: TinkerPath) -> str:
    """A place in the store that nobody else writes to. Replacing a checkpoint so never touches the one that is there,
    nor does a server that has lost its claim, and ends the same command late, touch what its successor has stored."""
    save = f"{command.request_id[-12:]}-{secrets.token_hex(4)}"
    return f"{safe_name(path.model_id)}/{safe_name(path.name)[:180]}-{save}"


def _check_ttl(request: SaveWeightsRequest) -> None:
    ttl_seconds = request.ttl_seconds
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_S:
        raise RequestError(f"must be in [1, {MAX_TTL_S}] or null, got {ttl_seconds}", field="ttl_seconds")


def _both(first: Change, second: Change | None) -> Change:
    def change(connection: Connection) -> None:
        first(connection)
        if second is not None:
            second(connection)

    return change
