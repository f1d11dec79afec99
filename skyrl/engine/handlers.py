"""The barriers: what each command that is no pass does to its model. Runs on the backend's thread, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from skyrl.backends.base import AdamParams, Backend, LoraSpec
from skyrl.config import ServerConfig
from skyrl.db import checkpoints
from skyrl.db.database import Database
from skyrl.db.models import Adapter, adapter_of, models, set_model
from skyrl.db.samplers import Sampler, add_sampler, find_sampler
from skyrl.engine.commands import Command
from skyrl.engine.storage import atomic_directory, remove, safe_name, size_of
from skyrl.futures.kinds import Kind
from skyrl.wire.errors import FailedRequest, RequestError
from skyrl.wire.paths import TinkerPath, adapter_name_of, check_name, parse_path, sampling_session_id_of
from skyrl.wire.requests import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    decode_json,
)

Change = Callable[[Connection], object]

MAX_TTL_S = 10 * 365 * 86_400


@dataclass(frozen=True)
class Done:
    """What a barrier leaves: the JSON result, what else belongs into its transaction, a new adapter for the sampler."""

    result: dict[str, Any]
    change: Change | None = None
    adapter: tuple[str, Path] | None = None


def lora_spec(adapter: Adapter) -> LoraSpec:
    return LoraSpec(
        adapter.lora_rank,
        adapter.lora_alpha,
        adapter.seed,
        adapter.train_attn,
        adapter.train_mlp,
        adapter.train_unembed,
    )


def model_is_gone(command: Command) -> FailedRequest:
    return FailedRequest(f"model_id: model {command.model_id!r} is not there any more")


def adam_params(request: OptimStepRequest) -> AdamParams:
    return AdamParams(**msgspec.structs.asdict(request.adam_params)) if request.adam_params else AdamParams()


def _check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_S:
        raise RequestError(f"must be in [1, {MAX_TTL_S}] or null, got {ttl_seconds}", field="ttl_seconds")


class Barriers:
    """One method per kind. Raises FailedRequest, RequestError or InvalidRequest for the caller's mistakes."""

    def __init__(self, config: ServerConfig, database: Database, backend: Backend) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        self._handlers: dict[Kind, Callable[[Command, bytes, Any], Done]] = {
            Kind.CREATE_MODEL: self._create_model,
            Kind.OPTIM_STEP: self._optim_step,
            Kind.SAVE_WEIGHTS: self._save_weights,
            Kind.SAVE_WEIGHTS_FOR_SAMPLER: self._save_for_sampler,
            Kind.LOAD_WEIGHTS: self._load_weights,
        }

    def run(self, command: Command, body: bytes) -> Done:
        model = self._database.read(lambda c: c.execute(select(models).where(models.c.id == command.model_id)).first())
        if model is None or model.status in ("closed", "failed"):
            raise model_is_gone(command)
        return self._handlers[command.kind](command, body, model)

    def _create_model(self, command: Command, body: bytes, model: Any) -> Done:
        self._backend.create_model(model.id, lora_spec(adapter_of(model)))
        return Done({"type": "create_model", "model_id": model.id}, set_model(model.id, status="ready"))

    def _optim_step(self, command: Command, body: bytes, model: Any) -> Done:
        params = adam_params(decode_json(OptimStepRequest, body))
        return Done({"type": "optim_step", "metrics": self._backend.optim_step(model.id, params)})

    def _save_weights(self, command: Command, body: bytes, model: Any) -> Done:
        request = decode_json(SaveWeightsRequest, body)
        if request.path is None:
            raise RequestError("is missing: name the checkpoint", field="path")
        path = TinkerPath(model.id, "weights", check_name(request.path))
        self._check_free(path, request.overwrite)
        _check_ttl(request.ttl_seconds)
        directory = self._directory(self._config.checkpoints_dir, command, path)
        remove(directory)  # left by an engine that died between the rename and the commit
        with atomic_directory(directory) as scratch:
            self._backend.save_state(model.id, scratch)
        saved = self._checkpoint_values(path, directory, model, request)
        return Done({"type": "save_weights", "path": str(path)}, lambda c: checkpoints.put(c, saved))

    def _save_for_sampler(self, command: Command, body: bytes, model: Any) -> Done:
        request = decode_json(SaveWeightsForSamplerRequest, body)
        path = None
        if request.path is not None:
            path = TinkerPath(model.id, "sampler_weights", check_name(request.path))
            self._check_free(path, request.overwrite)
        elif request.sampling_session_seq_id is None:
            raise RequestError("give a name, or sampling_session_seq_id for an unnamed save", field="path")
        else:
            self._check_unused(sampling_session_id_of(model.session_id, request.sampling_session_seq_id))
        _check_ttl(request.ttl_seconds)
        version = model.sampler_version + 1
        name = adapter_name_of(model.id, version)
        directory = self._config.adapters_dir / safe_name(model.id) / f"v{version:06d}"
        remove(directory)  # left by an engine that died between the rename and the commit
        with atomic_directory(directory) as scratch:
            self._backend.save_adapter(model.id, scratch)
        bump = set_model(model.id, sampler_version=version)
        if path is not None:
            saved = self._checkpoint_values(path, directory, model, request) | {"adapter_name": name}

            def keep(connection: Connection) -> None:
                bump(connection)
                checkpoints.put(connection, saved)

            result = {"type": "save_weights_for_sampler", "path": str(path)}
            return Done(result, keep, adapter=(name, directory))
        assert request.sampling_session_seq_id is not None
        sampler = Sampler(
            id=sampling_session_id_of(model.session_id, request.sampling_session_seq_id),
            session_id=model.session_id,
            tenant=model.tenant,
            base_model=model.base_model,
            model_path=None,
            adapter_name=name,
            adapter_path=str(directory),
        )
        seq_id = request.sampling_session_seq_id

        def open_session(connection: Connection) -> None:
            bump(connection)
            add_sampler(connection, sampler, seq_id)

        result = {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}
        return Done(result, open_session, adapter=(name, directory))

    def _load_weights(self, command: Command, body: bytes, model: Any) -> Done:
        request = decode_json(LoadWeightsRequest, body)
        path = parse_path(request.path)
        saved = self._database.read(lambda c: checkpoints.find_checkpoint(c, path, model.tenant))
        if saved is None or path.kind != "weights":
            raise FailedRequest(f"path: no training checkpoint {request.path!r}")
        creates = command.seq_id == 0
        if creates:
            self._backend.create_model(model.id, lora_spec(adapter_of(model)))
        try:
            self._backend.load_state(model.id, Path(saved.directory), optimizer=request.optimizer)
        except Exception:
            if creates:
                self._backend.delete_model(model.id)
            raise
        return Done(
            {"type": "load_weights", "path": request.path, "model_id": model.id},
            set_model(model.id, status="ready") if creates else None,
        )

    def _check_free(self, path: TinkerPath, overwrite: bool) -> None:
        if overwrite:
            return
        taken = self._database.read(lambda c: checkpoints.exists(c, path))
        if taken is not None and (taken.expires_at is None or taken.expires_at > time.time()):
            raise FailedRequest(f"path: {path} exists already; save with overwrite, or use another name")

    def _check_unused(self, sampling_session_id: str) -> None:
        """Numbers of sampling sessions name one adapter each: using one again would sample from the older one."""
        if self._database.read(lambda c: find_sampler(c, sampling_session_id)) is not None:
            raise FailedRequest(f"sampling_session_seq_id: sampling session {sampling_session_id} exists already")

    @staticmethod
    def _directory(root: Path, command: Command, path: TinkerPath) -> Path:
        """Unique per save, so that replacing a checkpoint never touches the one that is there."""
        return root / safe_name(path.model_id) / f"{safe_name(path.name)[:200]}-{command.request_id[-12:]}"

    @staticmethod
    def _checkpoint_values(
        path: TinkerPath,
        directory: Path,
        model: Any,
        request: SaveWeightsRequest | SaveWeightsForSamplerRequest,
    ) -> dict[str, Any]:
        now = time.time()
        return {
            "tenant": model.tenant,
            "model_id": path.model_id,
            "kind": path.kind,
            "name": path.name,
            "directory": str(directory),
            "base_model": model.base_model,
            **asdict(adapter_of(model)),
            "size_bytes": size_of(directory),
            "public": False,
            "user_metadata": request.user_metadata,
            "created_at": now,
            "expires_at": None if request.ttl_seconds is None else now + request.ttl_seconds,
        }
