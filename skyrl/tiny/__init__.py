"""The tiny checked-in model: where it lies.

`make.py` trains it, `corpus.py` holds the text and the tasks it was trained on. This file knows only the
directory, so that importing it costs nothing.
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Directory of the checked-in model: config, weights and tokenizer in Hugging Face layout."""
    return Path(__file__).resolve().parent / "model"
