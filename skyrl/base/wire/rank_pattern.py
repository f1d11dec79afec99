"""How a client asks for other ranks in some layers, and which expressions are refused before anything is recorded.

PEFT's `rank_pattern` is an object of regular expressions and ranks. Clients that write their own JSON send it as
`lora_config.rank_pattern`. The SDK's LoraConfig has no such field and refuses unknown ones, so its users send the same
object as JSON text under a key of the model's metadata that nobody else uses.

Expressions run in the trainer, for all tenants, and Python's backtrack: so those are accepted whose number of ways to
match a name is bounded. Knows no layer: the trainer refuses expressions that match none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import LoraConfig

RankPattern = tuple[tuple[str, int], ...]
"""PEFT's `rank_pattern`, in its order: regular expressions of layers' names, and the rank of the layers that match. A
layer has the rank of the first expression that matches its name, or the end of its name after a dot."""
METADATA_KEY = "skyrl.rank_pattern"
MAX_PATTERNS = 128
MAX_PATTERN_CHARS = 128
MAX_WAYS = 10_000
"""Of all expressions of one request together: see `ways_to_match`. On 1,000 names, more than the layers of a model with
94 decoder layers, the worst expressions found take 1.6 s of one core."""
NAME_CHARS = 64
"""More than a layer's name has."""
FIELD = "lora_config.rank_pattern"
_PART = re.compile(
    r"(?P<open>\((?:\?:|(?!\?)))|(?P<or>\|)|(?P<close>\))|(?P<repeat>[*+?])|(?P<anchor>[\^$])"
    r"|(?P<character>\\[^0-9]|\[\^?[\w.\\-]+\]|[\w.-])"
)


def rank_pattern_of(lora: LoraConfig, metadata: dict[str, Any] | None, max_rank: int) -> RankPattern:
    """What the request asks for; empty if it asks for nothing. Raises RequestError naming the field."""
    if lora.alpha_pattern:
        raise RequestError(
            "is not served: alpha is the server's (trainer.policy.model.lora.alpha), and each layer's scale is alpha "
            "divided by its rank",
            field="lora_config.alpha_pattern",
        )
    given, field = lora.rank_pattern, FIELD
    if (from_metadata := _in_metadata(metadata)) is not None:
        if given is not None:
            raise RequestError(f"is given twice: as {FIELD}, too", field=f"user_metadata.{METADATA_KEY}")
        given, field = from_metadata, f"user_metadata.{METADATA_KEY}"
    _check(given or {}, field, max_rank)
    return tuple((given or {}).items())


def check_same(metadata: dict[str, Any] | None, saved: RankPattern) -> None:
    """Raise RequestError for a model that begins with a checkpoint, where its metadata ask for other ranks than the
    checkpoint has."""
    asked = _in_metadata(metadata)
    if asked is not None and tuple(asked.items()) != saved:
        raise RequestError(
            f"a model has the ranks of the checkpoint that it begins with: {dict(saved)}",
            field=f"user_metadata.{METADATA_KEY}",
        )


def _in_metadata(metadata: dict[str, Any] | None) -> dict[str, int] | None:
    """What the metadata ask for; None without the key."""
    value = (metadata or {}).get(METADATA_KEY)
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return msgspec.json.decode(value, type=dict[str, int])
        return msgspec.convert(value, dict[str, int])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise RequestError(
            f"must be an object of regular expressions and ranks, or its JSON text: {error}",
            field=f"user_metadata.{METADATA_KEY}",
        ) from error


def _check(pattern: dict[str, int], field: str, max_rank: int) -> None:
    if len(pattern) > MAX_PATTERNS:
        raise RequestError(f"must have at most {MAX_PATTERNS} expressions, got {len(pattern)}", field=field)
    ways = 0
    for expression, rank in pattern.items():
        if not 1 <= len(expression) <= MAX_PATTERN_CHARS:
            raise RequestError(
                f"each expression must have 1 to {MAX_PATTERN_CHARS} characters, got {len(expression)}", field=field
            )
        if not 1 <= rank <= max_rank:
            raise RequestError(
                f"{expression!r} must have a rank in [1, {max_rank}] (the server's max_lora_rank), got {rank}",
                field=field,
            )
        try:
            re.compile(expression)
            ways += ways_to_match(expression)
        except (ValueError, re.error) as error:
            raise RequestError(f"{expression!r} is not accepted: {error}", field=field) from error
        if ways > MAX_WAYS:
            raise RequestError(
                f"{expression!r} is not accepted: it can match a name in too many ways; give fewer *, + and (a|b)",
                field=field,
            )


def ways_to_match(expression: str) -> int:
    """An upper bound of the ways to match a name that a search tries in vain: a repetition of one character multiplies
    it by the name's length, alternatives by how many of them may go on at the same character. Raises ValueError for an
    expression with other parts than characters, sets of them, groups, alternatives, and `*`, `+` and `?` after one
    character."""
    ways, place, before = 1, 0, "or"
    groups: list[list[str]] = [[]]
    while place < len(expression):
        found = _PART.match(expression, place)
        kind = None if found is None else found.lastgroup
        if found is None or kind is None or (kind == "repeat" and before not in ("character", "first")):
            raise ValueError(
                f"{expression[place:]!r} is none of: a character, a set [...], (a|b), and *, + or ? after one character"
            )
        if before in ("open", "or"):  # the first part of an alternative
            groups[-1].append(found[0] if kind == "character" and found[0] != "." and len(found[0]) == 1 else _ANY)
        match kind:
            case "open":
                groups.append([])
            case "close":
                ways *= _going_on(groups.pop())
            case "repeat":
                ways *= 2 if found[0] == "?" else NAME_CHARS
                if before == "first":  # it may be left out
                    groups[-1][-1] = _ANY
        is_first = kind == "character" and before in ("open", "or")
        place, before = found.end(), "first" if is_first else kind
    if before == "or":  # the last alternative is empty
        groups[-1].append(_ANY)
    return ways * _going_on(groups.pop())


_ANY = ""


def _going_on(alternatives: Sequence[str]) -> int:
    """How many alternatives may go on at the same character. Of each its first character, or `_ANY`."""
    return max(1, alternatives.count(_ANY) + max(Counter(each for each in alternatives if each).values(), default=0))
