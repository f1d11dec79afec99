"""The process of `skyrl model from-gguf`: FILE OUT DTYPE. Ends with 2 and one sentence when it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.from_gguf.directory import convert


def main(file: str, out: str, dtype: str) -> None:
    try:
        written = convert(Path(file), Path(out), dtype or None)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"skyrl model from-gguf: {error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(
        f"{out}: {written.architecture}, {written.parameters / 1e6:,.1f} million weights in {written.dtype}, "
        f"{written.tokens:,} tokens\n"
    )
    for note in written.notes:
        sys.stdout.write(f"{note}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
