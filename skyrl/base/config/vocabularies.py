"""Which token ids two base models share, by the tokenizer.json of each. Imports no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from skyrl.base.model_files import file_of


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    """Unigram models list their tokens in the order of the ids, each with a score; others name the id of each token."""

    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


@dataclass(frozen=True)
class Shared:
    """`same` of `ids`, all ids that one or both have, stand for the same token in both."""

    same: int
    ids: int


def shared_ids(one: str, other: str) -> Shared | None:
    """Compare two base models: directories, or names of the model hub. Reads files of several megabytes. None if one of
    them has no tokenizer.json on this machine, or one that lists no tokens."""
    tokens, others = tokens_of(one), tokens_of(other)
    if tokens is None or others is None:
        return None
    return Shared(len(tokens.items() & others.items()), len(tokens.keys() | others.keys()))


def tokens_of(base_model: str) -> dict[int, str] | None:
    """The token of each id, by a model's tokenizer.json; None as for `shared_ids`."""
    file = file_of(base_model, "tokenizer.json")
    try:
        found = None if file is None else msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError):
        return None
    if found is None:
        return None
    vocab = found.model.vocab
    tokens = (
        {number: token for token, number in vocab.items()}
        if isinstance(vocab, dict)
        else {number: token for number, (token, _) in enumerate(vocab)}
    )
    return tokens | {added.id: added.content for added in found.added_tokens}
