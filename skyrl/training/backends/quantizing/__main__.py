"""The process of `skyrl quantize`: MODEL OUT BITS GROUP_SIZE. Ends with 2 and one sentence when it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils import logging

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.quantizing.release import quantize
from skyrl.training.backends.quantizing.rounding import Scheme


def main(model: str, out: str, bits: str, group_size: str) -> None:
    logging.disable_progress_bar()  # of a load of the model without its weights
    try:
        written = quantize(model, Path(out), Scheme(int(bits), int(group_size)))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"skyrl quantize: {str(error).removeprefix('base_model: ')}\n")
        raise SystemExit(2) from error
    sys.stdout.write(
        f"{out}: {written.matrices} matrices in {bits} bits, {written.bytes / 1e6:,.1f} MB where {model} has "
        f"{written.bytes_before / 1e6:,.1f} MB\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
