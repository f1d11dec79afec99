"""SkyRL's flags for `skyrl serve`: flags with an equivalent here are translated, other flags are refused with a reason.

`skyrl.base.config.skyrl_keys` lists the flags; this module reads the command line before typer does.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from skyrl.base.config.skyrl_keys import FLAGS, checkpoint_store


class SkyrlFlags(TyperCommand):
    """A command that also accepts SkyRL's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, own_flags(args))


def own_flags(args: list[str]) -> list[str]:
    """The command line with this server's flags in place of SkyRL's.

    Raises typer.BadParameter for a flag of SkyRL's without an equivalent.
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
