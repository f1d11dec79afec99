"""The saves: a model's training state, weights to sample from, weights to export.

Named saves go to the checkpoint store. Weights to sample from are also written to the state directory, from which vLLM
loads them; unnamed ones are stored only there. Weights are an adapter, or those of the whole model. With Ray, vLLM may
run on another node: then weights to sample from go to the checkpoint store, named or not, under keys that follow from
their versions. An unnamed adapter is in memory until it is on the disk, or in that store. Exports may be encrypted with
age (age-encryption.org), so that only the recipients can read them.

Knows which rows a save writes. Deletes no checkpoint: the sweeper deletes files that no row refers to.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyrage

from skyrl.base.adapter_files import MAX_CONFIG_BYTES, file_shapes, most_bytes
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import Command
from skyrl.base.types.weights import AdapterVersion, FullWeights, Scope, WeightsRef
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import FailedRequest, RequestError
from skyrl.base.wire.paths import CheckpointKind, TinkerPath, check_name, sampling_session_id_of
from skyrl.base.wire.requests import SaveWeightsExternalRequest, SaveWeightsForSamplerRequest, SaveWeightsRequest
from skyrl.engine.save_limits import SaveLimits
from skyrl.storage.checkpoint_store.base import CheckpointStore, NotStored, StoreError
from skyrl.storage.checkpoint_store.directories import atomic_directory, link_files, remove, safe_name, sizes_of
from skyrl.storage.checkpoint_store.held import HeldVersions
from skyrl.storage.checkpoint_store.versions import version_directory, version_key
from skyrl.storage.db import audit, checkpoints, full_weights, usage
from skyrl.storage.db.checkpoints import Checkpoint
from skyrl.storage.db.database import Change, Connection, FencedDatabase, together
from skyrl.storage.db.models import ModelRecord, set_model
from skyrl.storage.db.samplers import Sampler, add_sampler, sampler_exists
from skyrl.trainer.protocol import AdapterDtype, Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExclusiveResult:
    """`result` is the JSON for the client. `change` runs in the transaction that stores the result. `weights` are a
    new version, to bring to the inference servers. `copy`: the version is held in memory; call this when the result is
    stored, to put its files on the disk. Until then a loss of power may lose the version."""

    result: dict[str, Any]
    change: Change | None = None
    weights: AdapterVersion | FullWeights | None = None
    copy: Callable[[], None] | None = None


MAX_TTL_S = 10 * 365 * 86_400


class Saves:
    """One method per kind of save. Raises FailedRequest or RequestError for the client's mistakes, StoreError for
    errors of the checkpoint store."""

    def __init__(
        self,
        config: ServerConfig,
        database: FencedDatabase,
        backend: Backend,
        store: CheckpointStore,
        held: HeldVersions,
    ) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        self._store = store
        self._held = held
        self._limits = SaveLimits(config, database)

    def weights(self, command: Command, body: bytes, model: ModelRecord) -> ExclusiveResult:
        """Save the training state: the weights and the optimizer."""
        request = decode_json(SaveWeightsRequest, body)
        path = self._path("weights", model, request)
        return self._store_named(command, model, request, path, lambda d: self._backend.save_state(model.id, d))

    def external(self, command: Command, body: bytes, model: ModelRecord) -> ExclusiveResult:
        """Save an adapter in PEFT's format, or a whole model in Hugging Face's. Encrypt each file if the request names
        recipients."""
        request = decode_json(SaveWeightsExternalRequest, body)
        path = self._path("external_weights", model, request)
        recipients = parse_recipients(request.age_encryption_recipients, "age_encryption_recipients")

        def write(directory: Path) -> None:
            self._backend.save_adapter(model.id, directory)
            if recipients:
                encrypt_files(directory, recipients)

        return self._store_named(command, model, request, path, write)

    def for_sampler(self, command: Command, body: bytes, model: ModelRecord) -> ExclusiveResult:
        """Save the next version of the weights: as a checkpoint if named, else as a sampling session."""
        request = decode_json(SaveWeightsForSamplerRequest, body)
        path = None
        if request.path is not None:
            path = self._path("sampler_weights", model, request)
        else:
            self._check_unnamed(model, request)
        travels, copy = self._config.weights_travel, None
        weights = self._take_version(model) if travels else self._unwritten_version(model)
        directory = version_directory(self._config.state_dir, weights)
        key = version_key(weights) if travels else None
        sizes = self._hold(model, weights, directory) if path is None else None
        if sizes is not None:
            copy = partial(self._copy, directory)
        elif key is None:
            self._write_version(weights, directory)
            sizes = sizes_of(directory)
        else:
            with self._store.writing(key) as scratch:
                self._backend.save_adapter(model.id, scratch, dtype=self._dtype_of(weights))
                sizes = sizes_of(scratch)
        count_version = _counted(model, weights, self._config.role.scope)
        if path is None:
            opened = self._open_session(model, request, weights, sum(sizes.values()), count_version)
            return replace(opened, copy=copy)
        if key is None:
            stored = self._store_named(
                command, model, request, path, lambda scratch: link_files(directory, scratch), weights=weights
            )
        else:
            stored = self._name(command, model, request, path, key, weights)
        return ExclusiveResult(stored.result, together(count_version, stored.change), weights)

    def _unwritten_version(self, model: ModelRecord) -> AdapterVersion | FullWeights:
        """The model's next version. A version of the adapter whose files are there is left out: an engine died before
        it recorded the version, which vLLM may have loaded, and the same name must not get other files. A version of
        the full weights is written anew, because the replicas get it anew."""
        version = _version_of(model, model.sampler_version + 1)
        while isinstance(version, AdapterVersion) and version_directory(self._config.state_dir, version).exists():
            version = _version_of(model, version.number + 1)
        return version

    def _take_version(self, model: ModelRecord) -> AdapterVersion | FullWeights:
        """The model's next version. A version that is stored or held already is left out: an engine died before it
        recorded the version, vLLM has refused it, or it was saved after the backup from which the database was
        restored. Nodes may have its files, and the same name must not get others.

        That the number is taken is recorded before the files are written. Their key follows from the number, and an
        engine that has lost its claim can record nothing: so it never writes to a key of its successor."""
        number = max(model.sampler_version, model.versions_taken) + 1
        while self._is_there(_version_of(model, number)):
            number += 1
        self._database.write(set_model(model.id, versions_taken=number))
        return _version_of(model, number)

    def _is_there(self, version: AdapterVersion | FullWeights) -> bool:
        try:
            self._store.files(version_key(version))
        except NotStored:
            return version_directory(self._config.state_dir, version).exists()
        return True

    def _hold(
        self, model: ModelRecord, weights: AdapterVersion | FullWeights, directory: Path
    ) -> dict[str, int] | None:
        """Put the files of an adapter into memory, where the vLLM that this server runs finds them, or from where nodes
        get them. Returns their sizes by name; None if they must be written to the disk, or to the store.

        Nodes keep what they got through this machine's loss of power. So the version's number is safe from that first:
        the same name must not get other files."""
        if isinstance(weights, FullWeights) or not self._config.modes.manages_inference:
            return None
        rank = max(model.lora.rank, *(rank for _, rank in model.lora.rank_pattern), 0)
        size = MAX_CONFIG_BYTES + most_bytes(file_shapes(self._backend.layers_of(model.lora), rank))

        def write(memory: Path) -> None:
            self._backend.save_adapter(model.id, memory, dtype=self._dtype_of(weights))

        if not self._config.weights_travel:
            return self._held.write(directory, size, write)
        with ThreadPoolExecutor(1) as beside:
            safe = beside.submit(self._database.sync)
            sizes = self._held.write(directory, size, write)
            safe.result()
        return sizes

    def _copy(self, directory: Path) -> None:
        """Put the files of a held version on the disk, or into the store, and make its row as safe. A failure is
        logged, and the sweep tries again."""
        try:
            self._held.copy(directory)
            self._database.sync()
        except (OSError, StoreError) as error:
            logger.warning("%s is in memory alone: it could not be copied: %s", directory, error)

    def _write_version(self, weights: AdapterVersion | FullWeights, directory: Path) -> None:
        if isinstance(weights, FullWeights):
            self._database.confirm_claim()  # the server that has it now may have written this version
            remove(directory)  # left by an engine that died between the rename and the commit
        with atomic_directory(directory) as scratch:
            self._backend.save_adapter(weights.model_id, scratch, dtype=self._dtype_of(weights))

    def _dtype_of(self, weights: AdapterVersion | FullWeights) -> AdapterDtype | None:
        """None: the backend takes what vLLM computes in."""
        return None if isinstance(weights, FullWeights) else self._config.adapter_dtype

    def _open_session(
        self,
        model: ModelRecord,
        request: SaveWeightsForSamplerRequest,
        weights: AdapterVersion | FullWeights,
        size_bytes: int,
        count_version: Change,
    ) -> ExclusiveResult:
        seq_id = request.sampling_session_seq_id
        assert seq_id is not None
        sampler = Sampler(
            id=sampling_session_id_of(model.session_id, seq_id),
            session_id=model.session_id,
            tenant=model.tenant,
            base_model=model.base_model,
            model_path=None,
            weights=weights,
        )

        def open_session(connection: Connection) -> None:
            count_version(connection)
            add_sampler(connection, sampler, seq_id, size_bytes)

        result = {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}
        return ExclusiveResult(result, open_session, weights)

    def _store_named(
        self,
        command: Command,
        model: ModelRecord,
        request: SaveWeightsRequest,
        path: TinkerPath,
        write: Callable[[Path], None],
        weights: WeightsRef | None = None,
    ) -> ExclusiveResult:
        """Store the files that `write` puts into a directory. Samples of this checkpoint use `weights`."""
        key = _new_key(command, path)
        with self._store.writing(key) as directory:
            write(directory)
        return self._name(command, model, request, path, key, weights)

    def _name(
        self,
        command: Command,
        model: ModelRecord,
        request: SaveWeightsRequest,
        path: TinkerPath,
        key: str,
        weights: WeightsRef | None,
    ) -> ExclusiveResult:
        """The checkpoint whose files are stored under `key`."""
        now = time.time()
        checkpoint = Checkpoint(
            path=path,
            tenant=model.tenant,
            store_key=key,
            weights=weights,
            base_model=model.base_model,
            lora=model.lora,
            size_bytes=sum(self._store.files(key).values()),
            public=False,
            user_metadata=request.user_metadata,
            created_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
        )
        event = "checkpoint_exported" if path.kind == "external_weights" else "checkpoint_created"

        def add_rows(connection: Connection) -> None:
            checkpoints.put(connection, checkpoint)
            usage.count_checkpoint(connection, model.tenant, model.session_id, model.id, model.base_model)
            audit.record(connection, model.tenant, event, tinker_path=str(path), model_id=model.id)

        return ExclusiveResult({"type": command.kind.lower(), "path": str(path)}, add_rows)

    def _path(self, kind: CheckpointKind, model: ModelRecord, request: SaveWeightsRequest) -> TinkerPath:
        """The path of a named save. Raises unless the name and the TTL are valid, the name is free, the tenant's stored
        bytes are below its quota, and the disk has space."""
        if request.path is None:
            raise RequestError("is missing: name the checkpoint", field="path")
        path = TinkerPath(model.id, kind, check_name(request.path))
        _check_ttl(request)
        self._limits.check_disk()
        self._limits.check_stored(model.tenant, besides=path)
        if not request.overwrite:
            taken = self._database.read(lambda c: checkpoints.stored_at(c, path))
            if taken is not None and not taken.is_expired:
                raise FailedRequest(f"path: {path} exists already; save with overwrite, or use another name")
        return path

    def _check_unnamed(self, model: ModelRecord, request: SaveWeightsForSamplerRequest) -> None:
        """Raises unless an unnamed save may open its sampling session. The request numbers the sampling session: with
        a number used twice, the client would sample from the older adapter."""
        if request.sampling_session_seq_id is None:
            raise RequestError("give a name, or sampling_session_seq_id for an unnamed save", field="path")
        if not 0 <= request.sampling_session_seq_id < 2**31:
            raise RequestError("must be in [0, 2**31)", field="sampling_session_seq_id")
        sampler_id = sampling_session_id_of(model.session_id, request.sampling_session_seq_id)
        if self._database.read(lambda c: sampler_exists(c, sampler_id)):
            raise FailedRequest(f"sampling_session_seq_id: sampling session {sampler_id} exists already")
        _check_ttl(request)
        self._limits.check_disk()
        self._limits.check_stored(model.tenant)
        self._limits.check_sampling_sessions(model.tenant)


def _version_of(model: ModelRecord, number: int) -> AdapterVersion | FullWeights:
    return FullWeights.of(model.id, number) if model.lora.is_full else AdapterVersion.of(model.id, number)


def _new_key(command: Command, path: TinkerPath) -> str:
    """A key in the checkpoint store that no other save writes to.

    So a save that replaces a checkpoint does not touch the old checkpoint's files. And a server that has lost its
    claim, but still ends the same command, does not touch the files that its successor has stored.
    """
    save = f"{command.request_id[-12:]}-{secrets.token_hex(4)}"
    return f"{safe_name(path.model_id)}/{safe_name(path.name)[:180]}-{save}"


def _check_ttl(request: SaveWeightsRequest) -> None:
    ttl_seconds = request.ttl_seconds
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_S:
        raise RequestError(f"must be in [1, {MAX_TTL_S}] or null, got {ttl_seconds}", field="ttl_seconds")


def _counted(model: ModelRecord, weights: AdapterVersion | FullWeights, scope: Scope) -> Change:
    """The change that makes this version the model's newest. Full weights replace those before."""
    count = set_model(model.id, sampler_version=weights.number)

    def change(connection: Connection) -> None:
        count(connection)
        if isinstance(weights, FullWeights):
            full_weights.drop_replaced(connection, weights, scope)

    return change


AGE_SUFFIX = ".age"
MAX_RECIPIENTS = 10
_age: Any = pyrage
Recipient: TypeAlias = Any
"""A public key of pyrage, which has no type hints."""


def parse_recipients(texts: Sequence[str] | None, field: str) -> list[Recipient]:
    """Native recipients (`age1...`) and SSH public keys. None, a request without encryption, gives an empty list.

    Raises RequestError that names the field and the invalid recipient. An empty list is an error, too: the client
    expects encryption.
    """
    if texts is None:
        return []
    if not 1 <= len(texts) <= MAX_RECIPIENTS:
        raise RequestError(f"must be 1 to {MAX_RECIPIENTS} recipients, or null for none, got {len(texts)}", field=field)
    recipients: list[Recipient] = []
    for index, text in enumerate(texts):
        kind = _age.ssh.Recipient if text.startswith("ssh-") else _age.x25519.Recipient
        try:
            recipients.append(kind.from_str(text))
        except _age.RecipientError as error:
            raise RequestError(
                # Without the text, which may be a secret key.
                f"is no age recipient ('age1...') and no SSH public key: {error}",
                field=f"{field}[{index}]",
            ) from error
    return recipients


def encrypt_files(directory: Path, recipients: Sequence[Recipient]) -> None:
    """Replace every file by its encrypted form, `<file>.age`."""
    for file in list(directory.iterdir()):
        _age.encrypt_file(str(file), str(file.with_name(file.name + AGE_SUFFIX)), list(recipients))
        file.unlink()
