"""Links that need no API key, and the routes behind them: downloads of saved weights, and a session's timeline.

A link is valid for an hour. One to weights leads to an archive or to exported files of one save: it stops working when
that save is deleted or replaced. Files are streamed from the checkpoint store; none is held in memory. A timeline is
for Perfetto."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import NamedTuple

from starlette.responses import Response, StreamingResponse

from skyrl.api.call import Call, reply, timestamp
from skyrl.api.routing import Routes
from skyrl.api.services import Services
from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.paths import TinkerPath, parse_path
from skyrl.storage.checkpoint_store.archive import Member, gzip_size, gzip_stored, tar, tar_size
from skyrl.storage.checkpoint_store.base import MANIFEST, in_store, manifest_of
from skyrl.storage.db.checkpoints import Checkpoint

LINK_S = 3600.0
"""How long links are valid. The SDK asks for new ones five minutes before the end."""
ARCHIVED = (PEFT_JSON, PEFT_TENSORS)
"""The files of an adapter's archive, which other programs load. Only this server can use the optimizer's files."""
OPTIMIZER = ("optimizer-", "state.json")
"""How the names of the other files of a whole model begin."""
_LINKS = "/api/v1/downloads"
_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"


class _StoredCheckpoint(NamedTuple):
    """A checkpoint whose files are in the checkpoint store, under `store_key`."""

    checkpoint: Checkpoint
    store_key: str

    @property
    def save(self) -> str:
        """Differs between all saves under the same name, earlier or later."""
        return self.store_key.rpartition("/")[2].rpartition("-")[2]

    def archived(self, sizes: dict[str, int]) -> dict[str, int]:
        """The files of an archive, with their sizes, among all of the checkpoint's: no file of the optimizer."""
        if not self.checkpoint.lora.is_full:
            return {name: sizes[name] for name in ARCHIVED}
        return {name: size for name, size in sizes.items() if not name.startswith(OPTIMIZER)}


def download_routes(services: Services) -> Routes:
    routes = Routes("downloads")
    store = services.checkpoint_store

    async def find_for_download(path: TinkerPath, tenant: str) -> _StoredCheckpoint:
        """A checkpoint that the tenant may download. The download is noted in the owner's audit log."""
        saved = await services.checkpoints.find(path, tenant)
        if saved is None:
            raise NotFound(f"no checkpoint {path}", field="checkpoint_id")
        reader = {} if saved.tenant == tenant else {"reader": tenant}
        await services.audit.record(
            saved.tenant, "checkpoint_downloaded", tinker_path=str(path), model_id=path.model_id, **reader
        )
        return _StoredCheckpoint(saved, saved.store_key)

    async def find_for_link(path: TinkerPath, save: str) -> _StoredCheckpoint:
        """The checkpoint that a signed link is for."""
        saved = await services.checkpoints.live(path)
        if saved is not None:
            found = _StoredCheckpoint(saved, saved.store_key)
            if found.save == save:
                return found
        raise NotFound(f"{path} has been deleted or replaced since this link was made", field="checkpoint_id")

    @routes.get(f"{_CHECKPOINT}/archive", scope="train")
    async def archive_url(call: Call, model_id: str, kind: str, name: str) -> Response:
        """A link to a tar of the weights: as JSON to clients that accept JSON, as a redirect to others."""
        tenant, path = call.tenant, parse_path(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")
        if path.kind == "external_weights":
            raise RequestError(
                "exported files are fetched one by one, see external_weights_urls", field="checkpoint_id"
            )
        found = await find_for_download(path, tenant)
        stored = await in_store(store.files, found.store_key)
        if missing := {} if found.checkpoint.lora.is_full else set(ARCHIVED) - set(stored):
            raise NotFound(
                f"{path} was saved by an older version, without {' and '.join(sorted(missing))}: load and save it",
                field="checkpoint_id",
            )
        accepts = ",".join(call.request.headers.getlist("accept"))
        gzipped = "application/gzip" in accepts  # SDKs before 0.25 accept gzip and JSON, but understand only a redirect
        ending = "tar.gz" if gzipped else "tar"
        link = services.urls.sign(
            call.request, f"{_LINKS}/archives/{model_id}/{kind}/{name}/{found.save}/{name}.{ending}", LINK_S
        )
        if "application/json" in accepts and not gzipped:
            return reply({"url": link.url, "expires": timestamp(link.expires_at)})
        headers = {"Location": link.url, "Expires": formatdate(link.expires_at, usegmt=True)}
        return reply({"url": link.url, "expires": timestamp(link.expires_at)}, 302, headers)

    @routes.get("/downloads/archives/{model_id}/{kind}/{name}/{save}/{file}", scope="signed")
    async def archive(call: Call, model_id: str, kind: str, name: str, save: str, file: str) -> Response:
        path = parse_path(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")
        found = await find_for_link(path, save)
        sizes = await in_store(store.files, found.store_key)
        sizes = found.archived(sizes)
        manifest = manifest_of(sizes)

        def members() -> Iterator[Member]:
            for member, size in sizes.items():
                yield Member(member, size, store.stream(found.store_key, member))
            # Last, as in the checkpoint store: it marks an archive as complete.
            yield Member(MANIFEST, len(manifest), [manifest])

        pieces, size = tar(members(), found.checkpoint.created_at), tar_size([*sizes.values(), len(manifest)])
        if file.endswith(".tar.gz"):
            return _attachment(gzip_stored(pieces), gzip_size(size), file, "application/gzip")
        return _attachment(pieces, size, file, "application/x-tar")

    @routes.get(f"{_CHECKPOINT}/external_weights_urls", scope="train")
    async def external_weights_urls(call: Call, model_id: str, kind: str, name: str) -> Response:
        tenant, path = call.tenant, parse_path(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")
        if path.kind != "external_weights":
            raise RequestError(
                "only external_weights have download URLs; see save_weights_external", field="checkpoint_id"
            )
        found = await find_for_download(path, tenant)
        if services.config.presigned_downloads:
            expires_at = time.time() + LINK_S
            urls = await in_store(store.sign, found.store_key, LINK_S)
            if urls is not None:
                return reply({"urls": urls, "expires": timestamp(expires_at)})
        files = await in_store(store.files, found.store_key)
        prefix = f"{_LINKS}/files/{model_id}/{kind}/{name}/{found.save}"
        links = {file: services.urls.sign(call.request, f"{prefix}/{file}", LINK_S) for file in files}
        expires_at = min(link.expires_at for link in links.values())
        return reply({"urls": {file: link.url for file, link in links.items()}, "expires": timestamp(expires_at)})

    @routes.get("/downloads/files/{model_id}/{kind}/{name}/{save}/{file}", scope="signed")
    async def exported_file(call: Call, model_id: str, kind: str, name: str, save: str, file: str) -> Response:
        path = parse_path(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")
        found = await find_for_link(path, save)
        sizes = await in_store(store.files, found.store_key)
        pieces = await in_store(store.stream, found.store_key, file)
        return _attachment(pieces, sizes[file], file, "application/octet-stream")

    return routes


def _attachment(pieces: Iterator[bytes], size: int, name: str, media_type: str) -> Response:
    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, headers=headers, media_type=media_type)


def timeline_routes(services: Services) -> Routes:
    routes = Routes("traces")

    @routes.get("/sessions/{session_id}/trace_export", scope="any")
    async def trace_export(call: Call, session_id: str) -> Response:
        """Answers with a link. The trace is made when the link is opened."""
        await services.sessions.named(session_id, call.tenant)
        link = services.urls.sign(call.request, f"/api/v1/downloads/traces/{session_id}", LINK_S)
        return reply({"status": "ready", "url": link.url})

    @routes.get("/downloads/traces/{session_id}", scope="signed")
    async def download_trace(call: Call, session_id: str) -> Response:
        headers = {"Content-Disposition": f'attachment; filename="{session_id}.pftrace"'}
        return Response(await services.traces.of_session(session_id), media_type="application/json", headers=headers)

    return routes
