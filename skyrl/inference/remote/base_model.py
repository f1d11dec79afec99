"""Where this machine has the base model's files."""

from __future__ import annotations

from pathlib import Path

PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json"]
"""What vLLM reads of a version of the weights."""


def base_directory(path: str) -> Path:
    """The directory of a base model, which is a directory or a name of the model hub. vLLM has brought a model of the
    hub into the hub's cache; before that, the name itself is returned."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # without patterns, a folder that lacks only README.md counts as incomplete
        return Path(snapshot_download(path, allow_patterns=PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:  # nobody has asked for the base model's weights yet but a server that has them
        return Path(path)
