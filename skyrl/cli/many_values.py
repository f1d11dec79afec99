"""Options that take several values after one flag, as argparse's `nargs="+"` does: `--worker URL URL --port 1`."""

from __future__ import annotations

from typing import Any, ClassVar

from typer.core import TyperCommand


class ManyValues(TyperCommand):
    """`flags` may be followed by several values; `--flag a b` becomes `--flag a --flag b`."""

    flags: ClassVar[frozenset[str]] = frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeated(args, self.flags))


def repeated(args: list[str], flags: frozenset[str]) -> list[str]:
    """The command line with such a flag before each of its values."""
    result: list[str] = []
    flag, values = None, 0
    for argument in args:
        if argument.startswith("-"):
            flag, values = argument if argument in flags else None, 0
            result.append(argument)
        else:
            if flag is not None and values:
                result.append(flag)
            result.append(argument)
            values += 1
    return result
