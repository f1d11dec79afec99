"""Brings an adapter to commands that read one: a directory as it is, or a checkpoint of a running server.

Uses the routes by which any client downloads weights. Knows nothing of what a command does with the adapter.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer

from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS
from skyrl.cli.db import refusal

if TYPE_CHECKING:  # importing httpx takes longer than `skyrl --help` may
    import httpx

TIMEOUT_S = 60.0
FILES = (PEFT_JSON, PEFT_TENSORS)
SCHEME = "tinker://"


def api_key(command: str) -> str:
    """The key in TINKER_API_KEY. Without one, or with one that cannot be sent, the command ends with a line."""
    key = os.environ.get("TINKER_API_KEY", "")
    if not key:
        raise refusal(command, "TINKER_API_KEY is not set: set it to the key that your training script uses")
    if not (key.isascii() and key.isprintable()):
        raise refusal(command, "TINKER_API_KEY holds characters that no key has")
    return key


@contextmanager
def adapter_directory(command: str, named: str, url: str) -> Iterator[Path]:
    """A directory with the adapter's files: `named` itself, or, for a checkpoint's path, a temporary one with what the
    server at `url` sends. What goes wrong ends the command with a line."""
    if not named.startswith(SCHEME):
        yield Path(named)
        return
    import httpx

    from skyrl.base.wire.errors import RequestError
    from skyrl.base.wire.paths import parse_path

    with tempfile.TemporaryDirectory(prefix="skyrl-adapter-") as directory:
        try:
            path = parse_path(named, "adapter")
            with httpx.Client(base_url=url, headers={"X-API-Key": api_key(command)}, timeout=TIMEOUT_S) as http:
                at = f"/api/v1/training_runs/{quote(path.model_id, safe='')}/checkpoints/{path.kind}/{path.name}"
                if path.kind == "external_weights":
                    _fetch_files(command, http, f"{at}/external_weights_urls", Path(directory))
                else:
                    _fetch_archive(command, http, f"{at}/archive", Path(directory))
        except RequestError as error:
            raise refusal(command, error.message) from error
        except (httpx.TransportError, httpx.InvalidURL, tarfile.TarError) as error:
            raise refusal(command, f"{url}: {str(error) or type(error).__name__}") from error
        yield Path(directory)


def _fetch_archive(command: str, http: httpx.Client, path: str, directory: Path) -> None:
    link = _answer(command, http, path)["url"]
    archive = directory / "archive.tar"
    _download(command, http, link, archive)
    with tarfile.open(archive) as opened:
        for name in FILES:
            if name in opened.getnames() and (member := opened.extractfile(name)) is not None:
                with member, (directory / name).open("wb") as file:
                    shutil.copyfileobj(member, file)
    archive.unlink()


def _fetch_files(command: str, http: httpx.Client, path: str, directory: Path) -> None:
    links = _answer(command, http, path)["urls"]
    for name in FILES:
        if name not in links:
            raise refusal(command, f"the export has no {name}: it is encrypted, or of a whole model")
        _download(command, http, links[name], directory / name)


def _answer(command: str, http: httpx.Client, path: str) -> Any:
    answer = http.get(path, headers={"Accept": "application/json"})
    if answer.is_success:
        return answer.json()
    raise _refused(command, answer)


def _download(command: str, http: httpx.Client, link: str, to: Path) -> None:
    with http.stream("GET", link, headers={"X-API-Key": ""}) as answer, to.open("wb") as file:
        if not answer.is_success:
            answer.read()
            raise _refused(command, answer)
        for piece in answer.iter_bytes(2**20):
            file.write(piece)


def _refused(command: str, answer: httpx.Response) -> typer.Exit:
    try:
        said = answer.json()["detail"]
    except (ValueError, LookupError, TypeError):
        said = answer.text[:200]
    return refusal(command, f"the server answers {answer.status_code}: {said}")
