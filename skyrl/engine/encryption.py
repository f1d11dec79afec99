"""Exports that only their recipients can read: every file as age (age-encryption.org) encrypts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from skyrl.wire.errors import RequestError

SUFFIX = ".age"
MAX_RECIPIENTS = 10
_age: Any = pyrage
"""The library is an extension without types."""


def parse_recipients(given: Sequence[str] | None, field: str) -> list[Any]:
    """Native recipients (`age1...`) and SSH public keys; empty for None: nobody asked for encryption.

    Raises RequestError naming the field and the one that is none. An empty list is a mistake, too: who gives one
    expects encryption.
    """
    if given is None:
        return []
    if not 1 <= len(given) <= MAX_RECIPIENTS:
        raise RequestError(f"must be 1 to {MAX_RECIPIENTS} recipients, or null for none, got {len(given)}", field=field)
    recipients: list[Any] = []
    for index, text in enumerate(given):
        kind = _age.ssh.Recipient if text.startswith("ssh-") else _age.x25519.Recipient
        try:
            recipients.append(kind.from_str(text))
        except _age.RecipientError as error:
            raise RequestError(
                f"is no age recipient ('age1...') and no SSH public key: {error}",  # not quoted: it may be a secret key
                field=f"{field}[{index}]",
            ) from error
    return recipients


def encrypt_files(directory: Path, recipients: Sequence[Any]) -> None:
    """Replace every file by its encrypted form, `<file>.age`."""
    for file in list(directory.iterdir()):
        _age.encrypt_file(str(file), str(file.with_name(file.name + SUFFIX)), list(recipients))
        file.unlink()
