"""Encrypted exports: every file is encrypted with age (age-encryption.org), so that only the recipients can read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from skyrl.base.wire.errors import RequestError

SUFFIX = ".age"
MAX_RECIPIENTS = 10
_age: Any = pyrage
"""pyrage has no type hints."""


def parse_recipients(texts: Sequence[str] | None, field: str) -> list[Any]:
    """Native recipients (`age1...`) and SSH public keys. None, a request without encryption, gives an empty list.

    Raises RequestError that names the field and the invalid recipient. An empty list is an error, too: the client
    expects encryption.
    """
    if texts is None:
        return []
    if not 1 <= len(texts) <= MAX_RECIPIENTS:
        raise RequestError(f"must be 1 to {MAX_RECIPIENTS} recipients, or null for none, got {len(texts)}", field=field)
    recipients: list[Any] = []
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


def encrypt_files(directory: Path, recipients: Sequence[Any]) -> None:
    """Replace every file by its encrypted form, `<file>.age`."""
    for file in list(directory.iterdir()):
        _age.encrypt_file(str(file), str(file.with_name(file.name + SUFFIX)), list(recipients))
        file.unlink()
