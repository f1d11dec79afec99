"""What the installed SDK has: its public clients and methods, its losses, the commands of its command line.

A need is one of

- `TrainingClient.save_state`, `TrainingClient.save_state(overwrite)`: a method, or a parameter of this method;
- `RestClient()`, `RestClient(base_url)`: a client that users can construct, or a parameter of its constructor;
- `types.AdamParams`, `types.AdamParams(weight_decay)`: a type, or a field of this type;
- `models.unload`: a request that the SDK can send although none of its clients sends it;
- `loss gspo`: a loss; `tinker run list`: a command.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import click
import tinker
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.resources.models import AsyncModelsResource

NEED = re.compile(r"(?P<owner>\w+)(?:\.(?P<name>\w+))?(?:\((?P<parameter>\w*)\))?")


def clients() -> dict[str, type]:
    """The public client classes by name. Older SDKs contain RestClient without exporting it."""
    exported = {
        name: value for name, value in vars(tinker).items() if name.endswith("Client") and inspect.isclass(value)
    }
    return exported | {"RestClient": RestClient}


def public_methods(client: type) -> list[str]:
    """Names of a client's public methods, without properties."""
    names = (name for name in dir(client) if not name.startswith("_"))
    return [name for name in names if callable(getattr(client, name))]


def commands() -> dict[str, click.Command]:
    """The commands of the installed `tinker` command line, by the words that a user types."""
    return dict(_commands(main_cli, "tinker"))


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _commands(found, f"{path} {name}")


def present(need: str) -> bool:
    """Whether the installed SDK meets this need."""
    if need.startswith("loss "):
        return need.removeprefix("loss ") in typing.get_args(types.LossFnType)
    if need.startswith("tinker "):
        return need in commands()
    match = NEED.fullmatch(need)
    assert match, f"cannot read the need {need!r}"
    owner, name, parameter = match["owner"], match["name"], match["parameter"]
    if owner == "types":
        kind = getattr(types, name, None)
        return kind is not None and (not parameter or parameter in inspect.signature(kind).parameters)
    if owner == "models":
        return hasattr(AsyncModelsResource, name)
    client = clients().get(owner)
    if client is None or (name and name not in public_methods(client)):
        return False
    called: Any = getattr(client, name) if name else client
    return not parameter or parameter in inspect.signature(called).parameters
