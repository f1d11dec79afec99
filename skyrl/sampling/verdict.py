"""What the forwarding client does with an answer, by its status: the table of docs/how-it-works/forwarding.md.

Knows statuses. Does not know how often a sample was tried; that is the client's.
"""

from __future__ import annotations

from enum import Enum

from skyrl.sampling.transport import Answer


class Verdict(Enum):
    """What is to be done with an answer."""

    READ = "it is a completion: decode it"
    WAIT = "the server, or a proxy before it, does not take the sample now: wait and send it again"
    WAIT_LONGER = "a proxy got no answer from the server: wait longer from time to time, and send it again"
    LOAD_ADAPTER = "the server does not know the adapter: load it, and send the sample again"
    REFUSE = "the sample cannot be computed as asked: it fails, as the user's mistake"
    ASK_HEALTH = "the server failed: its /health says whether it is dying"
    FAIL = "no sample can help it: it fails, as the server's mistake"


_BY_STATUS = {
    401: Verdict.FAIL,
    403: Verdict.FAIL,
    405: Verdict.FAIL,
    408: Verdict.WAIT,
    429: Verdict.WAIT,
    502: Verdict.WAIT_LONGER,
    503: Verdict.WAIT,
    504: Verdict.WAIT_LONGER,
}


def verdict_of(answer: Answer, *, has_adapter: bool) -> Verdict:
    """`has_adapter`: whether the sample is of an adapter, which the server may have lost."""
    status = answer.status
    if 200 <= status < 300:
        return Verdict.READ
    if status == 404 and has_adapter:
        return Verdict.LOAD_ADAPTER
    if (verdict := _BY_STATUS.get(status)) is not None:
        return verdict
    if status >= 500:
        return Verdict.ASK_HEALTH
    return Verdict.REFUSE if status >= 400 else Verdict.FAIL
