"""One configuration for each base model of a server.

Each process of one base model is run with such a configuration, as if the server had no other base model. Its `role`
says what differs. The API processes and the launcher have all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from skyrl.base.config.backend import dotted_keys, parse_backend_config
from skyrl.base.config.base_models import BaseModelKeys, BaseModelSlot, short_name
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.types.weights import EVERYTHING, Scope

_GIVEN_IN_ENTRIES = ("base_model", "served_model_names", "tokenizer_id", "devices", "external_inference_url")
"""Keys that cannot hold for several base models at once. The server's others are the entries' defaults."""


def base_models_of(config: ServerConfig) -> tuple[ServerConfig, ...]:
    """The configurations of the server's base models, in the order of `base_models`; `config` itself if the server has
    one. Raises ConfigError: an entry cannot be used, or two do not go together."""
    if not config.base_models:
        if "train" not in config.uses:
            raise ConfigError(
                'uses: ["sample"] is for entries of base_models beside one that trains; a server that only samples is '
                "a gateway: --backend none"
            )
        return (config,)
    for key in _GIVEN_IN_ENTRIES:
        if getattr(config, key):
            raise ConfigError(f"{key}: with base_models, give it in the entry of its base model")
    parts = [_part(config, entry, number) for number, entry in enumerate(config.base_models)]
    ray = next((part.ray for part in parts if part.ray is not None), None)
    if ray is not None:
        parts = [_part(config, entry, n, ray_address=ray) for n, entry in enumerate(config.base_models)]
    _check_together(config, parts)
    return _with_roles(parts)


def _part(config: ServerConfig, entry: BaseModelKeys, number: int, **more: Any) -> ServerConfig:
    """The configuration of one entry. Its messages begin with the entry's number."""
    where = f"base_models[{number}]"
    try:
        of_server = dotted_keys(config.backend_config.model_dump(exclude_unset=True))
        merged = parse_backend_config(of_server | dotted_keys(entry.backend_config))
        given = {name: value for name, value in config if name in config.model_fields_set and name != "base_models"}
        uses = (entry.uses or config.uses) if config.backend != "none" else ("sample",)
        values = given | entry.own | {"backend_config": merged, "uses": uses} | more
        return ServerConfig.of(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(name) for name in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}{f'.{key}' if key else ''}: {message}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}.{str(error).replace('backend-config', 'backend_config', 1)}") from error


def _check_together(config: ServerConfig, parts: Sequence[ServerConfig]) -> None:
    names: dict[str, int] = {}
    ports: dict[int, str] = {config.port: "the server's own port"}
    for number, part in enumerate(parts):
        for name in part.served_names:
            if name in names:
                raise ConfigError(
                    f"base_models[{number}].served_model_names: {name!r} is a name of base_models[{names[name]}] too: "
                    "each name stands for one base model"
                )
            names[name] = number
        for port in part.backend_config.inference.ports or ():
            if port in ports:
                raise ConfigError(
                    f"base_models[{number}].backend_config.generator.inference_engine.port: {port} is {ports[port]}"
                )
            ports[port] = f"a vLLM's port in base_models[{number}]"
        if not part.modes.forwards and len(parts) > 1:
            raise ConfigError(
                f"base_models[{number}]: with trainer.placement.colocate_all, trainer and vLLM take turns on one "
                "device, and a server does so for one base model alone: leave out the key, or the other base models"
            )
    if config.backend != "none" and not any(part.modes.trains for part in parts):
        raise ConfigError(
            'base_models: none is for training (uses = ["train", "sample"]); a server that only samples is a gateway: '
            "--backend none"
        )


def _with_roles(parts: Sequence[ServerConfig]) -> tuple[ServerConfig, ...]:
    """The first base model that trains also looks after names that nobody serves any more."""
    numbers = ByName.of(tuple(parts)).numbers
    training = [number for number, part in enumerate(parts) if part.modes.trains]
    taken: list[str] = []
    for number, part in enumerate(parts):
        taken.append(short_name(part.served_names[0], taken))
        own = scope = Scope(within=frozenset(name for name, n in numbers.items() if n == number))
        if training and number == training[0]:
            scope = Scope(without=frozenset(name for name, n in numbers.items() if n in training[1:]))
        part.take_role(BaseModelSlot(number, taken[-1], part.served_names, scope, own))
    return tuple(parts)


@dataclass(frozen=True)
class ByName:
    """The base models of a server, and their numbers by the names that clients use."""

    parts: tuple[ServerConfig, ...]
    numbers: dict[str, int]

    @classmethod
    def of(cls, parts: tuple[ServerConfig, ...]) -> ByName:
        """A path is a name, too, unless an earlier base model has the same files."""
        numbers: dict[str, int] = {}
        for names in ([part.served_names for part in parts], [(part.base_model_path,) for part in parts]):
            for number, of_part in enumerate(names):
                for name in of_part:
                    numbers.setdefault(name, number)
        return cls(parts, numbers)

    def own(self, name: str) -> Scope:
        """The rows of the base model that has this name; all rows if none has."""
        number = self.numbers.get(name)
        return EVERYTHING if number is None else self.parts[number].role.own

    @property
    def served(self) -> list[str]:
        """All names that clients may use, in the order of the configuration."""
        return [name for part in self.parts for name in part.served_names]
