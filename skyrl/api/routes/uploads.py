"""Uploads of adapters: start one, PUT its two files to signed links, finish it.

A file is streamed to the disk, within the size that the adapter's shapes allow, and from there to the checkpoint store.
Finishing checks the files against the base model's layers, as the engine has published them, and makes a checkpoint of
kind `external_weights` that can be sampled from and trained on. A process that dies in between loses only the file
that it was receiving: the client sends that file, or finishes, again. Does not know how files are checked
(`skyrl.base.adapter_files`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.bodies import ARRIVE_S, LEAST_BYTES_PER_S, declared_size
from skyrl.api.call import Call, reply, timestamp
from skyrl.api.routes.checkpoints import sdk_version
from skyrl.api.routes.models import lora_spec
from skyrl.api.routes.sessions import check_length
from skyrl.api.routing import Routes
from skyrl.api.services import Services
from skyrl.base.adapter_files import (
    MAX_CONFIG_BYTES,
    PEFT_JSON,
    Described,
    DoesNotFit,
    Target,
    check_adapter,
    decode_targets,
    file_shapes,
    most_bytes,
)
from skyrl.base.types.requests import new_session_id
from skyrl.base.wire.errors import NoSpace, RequestError
from skyrl.base.wire.paths import TinkerPath, model_id_of
from skyrl.base.wire.rank_pattern import FIELD as RANKS
from skyrl.base.wire.requests import UploadFinishRequest, UploadStartRequest
from skyrl.runtime.processes.host_resources import SPARE_DISK_BYTES
from skyrl.storage.checkpoint_store.base import CheckpointStore, NotStored, StoreError, in_store
from skyrl.storage.checkpoint_store.directories import link_files, safe_name, scratch_in
from skyrl.storage.db.checkpoints import Copy
from skyrl.storage.db.engine_state import read_layers
from skyrl.storage.db.uploads import FILES, UPLOAD_S, Upload

logger = logging.getLogger(__name__)

_HEADERS_SINCE = (0, 40)
"""The first version of the SDK that reads a link with the headers of its PUT. 0.39 reads the link alone."""
_HEADERS = {"Content-Type": "application/octet-stream"}
_NAME = "upload"
AT_ONCE = 2
"""Files stored and uploads finished at the same time, of all tenants in this process. Others wait, as copies do: each
takes a thread of `in_store`."""
_PIECE_BYTES = 2**20
_RETRY_S = 5.0


def upload_routes(services: Services) -> Routes:
    routes = Routes("checkpoints")
    store, scratch = services.checkpoint_store, services.config.state_dir / "scratch"
    turns = asyncio.Semaphore(AT_ONCE)
    of_upload: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
    arriving: set[str] = set()
    """The keys of files that this process receives now."""

    async def layers(upload: Upload) -> list[Target]:
        """The layers that the adapter must have."""
        keys = services.served.trainable(upload.base_model).config.role.state_keys
        text = await services.database.read_async(lambda c: read_layers(c, keys))
        if text is None:
            raise RequestError(
                "the engine has not told the base model's layers yet; try again when it is ready",
                status=503,
                retry_after_s=_RETRY_S,
            )
        return decode_targets(text, upload.lora)

    @routes.post("/external_weights_upload_start", scope="train", body=UploadStartRequest)
    async def external_weights_upload_start(call: Call, body: UploadStartRequest) -> Response:
        served = services.served.trainable(body.base_model)
        if served.config.full_finetuning:
            raise RequestError("adapters cannot be uploaded to a server that trains whole models", field="base_model")
        lora = lora_spec(body.lora_config, None, served)
        if lora.rank_pattern:
            raise RequestError("is not taken for uploads: all layers must have lora_config.rank", field=RANKS)
        check_length("destination_project_id", body.destination_project_id)
        now = time.time()
        upload = Upload(
            id=secrets.token_hex(16),
            tenant=call.tenant,
            base_model=body.base_model,
            lora=lora,
            project_id=body.destination_project_id or None,
            most_bytes=0,
            created_at=now,
            expires_at=now + UPLOAD_S,
        )
        targets = await layers(upload)
        if not targets:
            raise RequestError("asks for no layer that this server trains", field="lora_config")
        upload = replace(upload, most_bytes=await asyncio.to_thread(_most_bytes, targets, lora.rank))
        await services.uploads.start(upload, services.quotas.stored_bytes(call.tenant, upload.most_bytes))
        links = {
            file: services.urls.sign(call.request, f"/api/v1/uploads/{upload.id}/{file}", UPLOAD_S) for file in FILES
        }
        version = sdk_version(call.request)
        old = version is not None and version < _HEADERS_SINCE
        urls = {file: link.url if old else {"url": link.url, "headers": _HEADERS} for file, link in links.items()}
        expires_at = min(link.expires_at for link in links.values())
        return reply({"upload_id": upload.id, "urls": urls, "expires": timestamp(expires_at)})

    @routes.put("/uploads/{upload_id}/{file}", scope="signed")
    async def upload_file(call: Call, upload_id: str, file: str) -> Response:
        """Takes the place of what was sent to this link before."""
        upload = await services.uploads.find(upload_id, None)
        most = MAX_CONFIG_BYTES if file == PEFT_JSON else upload.most_bytes
        key, changes = upload.key(file), of_upload.setdefault(upload_id, asyncio.Lock())
        if key in arriving:  # one at a time, which bounds what clients put on the disk
            raise RequestError(f"{file} is being received already", status=429, retry_after_s=_RETRY_S)
        arriving.add(key)
        try:
            async with _received(call.request, scratch, file, most) as path, changes, turns:
                await services.uploads.find(upload_id, None)  # it may have been finished meanwhile
                await in_store(_store_file, store, key, path)
        except FileNotFoundError as error:  # an engine that starts deletes what was not complete
            raise RequestError(
                f"{file} was lost on its way; send it again", status=503, retry_after_s=_RETRY_S
            ) from error
        finally:
            arriving.discard(key)
        return reply({})

    @routes.post("/external_weights_upload_finish", scope="train", body=UploadFinishRequest)
    async def external_weights_upload_finish(call: Call, body: UploadFinishRequest) -> Response:
        """A second call gets the checkpoint of the first. After a refusal the client may send files again."""
        copy_key = f"upload-{body.upload_id}"
        async with of_upload.setdefault(body.upload_id, asyncio.Lock()), turns:
            path = await services.copies.made_by(copy_key, call.tenant)
            if path is None:
                path = await finish(await services.uploads.find(body.upload_id, call.tenant), copy_key)
        return reply({"tinker_path": str(path)})

    async def finish(upload: Upload, copy_key: str) -> TinkerPath:
        session_id = new_session_id()
        model_id = model_id_of(session_id, 0)
        made = Copy(
            path=TinkerPath(model_id, "external_weights", _NAME),
            tenant=upload.tenant,
            session_id=session_id,
            model_seq_id=0,
            store_key=f"{safe_name(model_id)}/{_NAME}-{secrets.token_hex(6)}",
            project_id=upload.project_id,
            copy_key=copy_key,
        )
        try:
            described, size = await in_store(_assemble, store, upload, await layers(upload), made.store_key)
        except DoesNotFit as error:
            raise RequestError(str(error), field="upload_id") from error
        try:
            check = services.quotas.stored_bytes(upload.tenant, size)
            path = await services.uploads.finish(upload, made, described.alpha, size, check)
        except RequestError:
            await discard(made.store_key)
            raise
        unused = [upload.key(file) for file in FILES] + [made.store_key] * (path != made.path)
        for key in unused:
            await discard(key)
        return path

    async def discard(key: str) -> None:
        """Remove files that no row names. The engine removes later what cannot be removed now."""
        try:
            await in_store(store.delete, key)
        except StoreError as error:
            logger.warning("uploaded files stay for now (%s): %s", key, error)

    return routes


def _most_bytes(targets: Sequence[Target], rank: int) -> int:
    return most_bytes(file_shapes(targets, rank))


@contextlib.asynccontextmanager
async def _received(request: Request, parent: Path, name: str, most: int) -> AsyncIterator[Path]:
    """The body as a file of this name, which is deleted after the block. Raises RequestError: 408 when it does not
    arrive in time, 413 when it has more than `most` bytes, 415 for an encoded one; NoSpace."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("send the file as it is, without content-encoding", status=415)
    declared = declared_size(request)
    too_large = RequestError(f"{name}: an adapter of this lora_config has at most {most} bytes", status=413)
    if declared is not None and declared > most:
        raise too_large
    directory = scratch_in(parent)
    await asyncio.to_thread(directory.mkdir, parents=True)
    try:
        await asyncio.to_thread(_check_space, directory, declared or most)
        wait_s = ARRIVE_S + (declared or most) / LEAST_BYTES_PER_S
        try:
            async with asyncio.timeout(wait_s):
                await _write(request, directory / name, too_large, most)
        except TimeoutError as error:
            raise RequestError(f"the file did not arrive in {wait_s:.0f} s", status=408) from error
        yield directory / name
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


async def _write(request: Request, path: Path, too_large: RequestError, most: int) -> None:
    size, pieces, held, more = 0, list[bytes](), 0, True
    with path.open("wb") as stream:
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the client went away before the file was complete")
            piece, more = message.get("body", b""), message.get("more_body", False)
            pieces.append(piece)
            size, held = size + len(piece), held + len(piece)
            if size > most:
                raise too_large
            if held >= _PIECE_BYTES or not more:
                await asyncio.to_thread(stream.writelines, pieces)
                await asyncio.to_thread(_check_space, path.parent, 0)  # other files arrive, too
                pieces, held = [], 0


def _check_space(directory: Path, size: int) -> None:
    if shutil.disk_usage(directory).free < SPARE_DISK_BYTES + size:
        raise NoSpace("the server's disk has no space for this file; tell its operator", retry_after_s=_RETRY_S)


def _store_file(store: CheckpointStore, key: str, path: Path) -> None:
    with store.writing(key) as directory:
        shutil.move(path, directory / path.name)


def _assemble(store: CheckpointStore, upload: Upload, targets: list[Target], key: str) -> tuple[Described, int]:
    """Store both files of an upload under `key`, if they fit. Returns what the adapter says of itself, and its bytes.
    Raises DoesNotFit and StoreError; then nothing is stored."""
    with contextlib.ExitStack() as stack:
        parts: list[Path] = []
        for file in FILES:
            try:
                parts.append(stack.enter_context(store.reading(upload.key(file))))
            except NotStored as error:
                raise DoesNotFit(f"{file} has not been uploaded") from error
        directory = stack.enter_context(store.writing(key))
        for part in parts:
            link_files(part, directory)
        described = check_adapter(directory, targets, upload.lora.rank)
        return described, sum(file.stat().st_size for file in directory.iterdir())
