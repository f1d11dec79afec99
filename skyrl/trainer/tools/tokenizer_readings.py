"""A process that compares two readings of a base model's tokenizer.json: transformers', which takes the class that
tokenizer_config.json names, and that of the file alone. Prints one line if they differ, and nothing otherwise."""

from __future__ import annotations

import sys

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from skyrl.base.model_files import file_of

TEXT = "The old fox, 12 times: naïve 狐狸?\n\n  x"


def difference(base_model: str) -> str | None:
    """What transformers makes of `TEXT`, if not the tokens or not the text of tokenizer.json. Raises what the two
    libraries raise for files that they cannot read."""
    file = file_of(base_model, "tokenizer.json")
    if file is None:
        return None
    by_file = Tokenizer.from_file(str(file))
    by_class = AutoTokenizer.from_pretrained(base_model)
    ids = by_file.encode(TEXT, add_special_tokens=False).ids
    decoded = by_class.decode(ids)
    if by_class.encode(TEXT, add_special_tokens=False) == ids and decoded == by_file.decode(ids):
        return None
    again = by_class.decode(by_class.encode(TEXT, add_special_tokens=False))
    return f"{TEXT!r} is decoded as {(decoded if decoded != TEXT else again)!r}"


if __name__ == "__main__":
    if (found := difference(sys.argv[1])) is not None:
        sys.stdout.write(found + "\n")
