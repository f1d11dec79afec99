"""`skyrl serve` with the flags of SkyRL's server: those that mean the same are taken, the others refused with a reason.

Which flag is what is in `skyrl.config.skyrl_keys`; this module reads the command line before typer does.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from skyrl.config.skyrl_keys import FLAGS, checkpoint_store


class SkyrlFlags(TyperCommand):
    """A command that also understands SkyRL's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, own_flags(args))


def own_flags(args: list[str]) -> list[str]:
    """The command line under this server's names of flags.

    Raises typer.BadParameter for a flag of SkyRL's that cannot be honoured.
    """
    own: list[str] = []
    rest = iter(args)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        entry = FLAGS.get(flag)
        if flag == "--checkpoints-base":
            base = value if equals else next(rest, None)
            own += ["--checkpoint-store"] if base is None else ["--checkpoint-store", checkpoint_store(base)]
        elif entry is None:
            own.append(argument)
        elif entry.becomes:
            own.append(f"{entry.becomes}{equals}{value}")
        elif not entry.takes:
            raise typer.BadParameter(entry.why, param_hint=flag)
    return own
