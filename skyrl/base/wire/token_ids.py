"""How a refused token id is explained."""

from __future__ import annotations


def whose_vocabulary(base_model: str) -> str:
    """The end of a message that says which token ids are allowed. `base_model` is empty where the server has one."""
    if not base_model:
        return ""
    return f", the vocabulary of {base_model!r}: the id may come from another base model's tokenizer"
