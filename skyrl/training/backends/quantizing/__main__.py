"""The process of `skyrl quantize`: MODEL OUT BITS GROUP_SIZE. Ends with 2 and one sentence when it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.quantizing.release import quantize
from skyrl.training.backends.quantizing.rounding import Scheme


def main(model: str, out: str, bits: str, group_size: str) -> None:
    try:
        written = quantize(model, Path(out), Scheme(int(bits), int(group_size)))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"skyrl quantize: {error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(
        f"{out}: {written.matrices} matrices in {bits} bits, {written.bytes / 1e9:.2f} GB where {model} has "
        f"{written.bytes_before / 1e9:.2f} GB\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
