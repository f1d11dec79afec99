"""The directory of the tiny checked-in model.

`make.py` trains the model on the text and the tasks of `corpus.py`. This module imports neither, so that importing it
is cheap.
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The directory of the checked-in model: config, weights and tokenizer in Hugging Face layout."""
    return Path(__file__).resolve().parent / "model"
