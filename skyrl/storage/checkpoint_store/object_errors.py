"""Makes one readable line of an error of obstore, the library for object stores: without XML and debugging output.

Knows the form of obstore's errors, and the form of the errors of S3, Google Cloud Storage and Azure inside them.
"""

from __future__ import annotations

import re

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (?:bucket|container) does not exist", re.IGNORECASE)
_HOST = re.compile(r"https?://[^/\s]+")
_STATUS = re.compile(r"Error performing (?P<method>[A-Z]+) .*?non-2xx status code: (?P<status>\d+[^:<]*)", re.DOTALL)
_CODE, _MESSAGE = (re.compile(f"<{tag}>([^<]*)</{tag}>") for tag in ("Code", "Message"))
_MARKUP = re.compile(r"<[?!]?[A-Za-z].*", re.DOTALL)


def names_no_bucket(text: str) -> bool:
    """Whether an error says that the bucket itself does not exist, and not only an object in it."""
    return _NO_BUCKET.search(text) is not None


def readable_error(text: str, bucket: str) -> str:
    """One line for the error `text` about a bucket of this name."""
    text = text.partition("Debug source:")[0].strip()
    host = _HOST.search(text)
    at = "" if host is None else f" at {host[0]}"
    if names_no_bucket(text):
        return f"there is no bucket {bucket!r}{at}"
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None and code is not None:
        message = _MESSAGE.search(text)
        error = code[1] if message is None else f"{code[1]}, {message[1]}"
        return f"the store{at} answers {status['method']} with {status['status'].strip()}: {error}"
    return _MARKUP.sub("", text).partition("\n")[0].rstrip(" :")
