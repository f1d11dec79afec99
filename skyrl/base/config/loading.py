"""Loads the configuration: defaults, a TOML file, `SKYRL_*` environment variables and flags, in rising priority.

An unknown `SKYRL_*` variable is an error, because it is probably misspelled.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from skyrl.base.config.backend import ConfigError, dotted_keys, unknown_key
from skyrl.base.config.keys import AgentsConfig, LossesConfig
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import base_models_of

PREFIX = "SKYRL_"
OWN = ("SKYRL_RUNTIME_FILE", "SKYRL_API_SLOT", "SKYRL_API_SOCKETS", "SKYRL_BASE_MODEL_NUMBER", "SKYRL_VLLM_FORK_ENGINE")
"""Variables by which the processes of a server tell each other something."""
NODES = ("SKYRL_NODE_STORE", "SKYRL_NODE_STORE_OPTIONS", "SKYRL_NODE_CACHE", "SKYRL_NODE_CACHE_BYTES")
"""Variables that tell a vLLM where its node's adapters come from and lie (`skyrl.inference.remote.settings`)."""
PLANE = ("SKYRL_ROUTER_API_KEY", "SKYRL_ADMIN_KEY", "SKYRL_VLLM_API_KEY")
"""Variables with keys for `skyrl rollout`, `skyrl router` and `skyrl sidecar`."""
_TESTS = "SKYRL_TEST_"
_KUBERNETES = re.compile(r"\w*(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""Variables that Kubernetes sets in containers beside a service with a name that begins with `skyrl`."""


def refuse_unknown(environment: Mapping[str, str], keys: Iterable[str]) -> None:
    """Raises ConfigError for a `SKYRL_*` variable that is unknown. `keys` are those of the configuration; each has a
    variable."""
    known = [f"{PREFIX}{key.upper()}" for key in keys]
    for name in environment:
        upper = name.upper()  # the configuration ignores the case of a variable's name, too
        if not upper.startswith(PREFIX) or upper in known or upper.startswith(_TESTS):
            continue
        if upper in (*OWN, *NODES, *PLANE):
            continue
        if not _KUBERNETES.fullmatch(upper):
            raise ConfigError(f"environment: {unknown_key(name, known)}")


def _with_flat_backend_config(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, with `backend_config` under this server's dotted keys, so that sources merge key by key."""
    backend_config = values.get("backend_config")
    if isinstance(backend_config, str):
        try:
            backend_config = json.loads(backend_config)
        except json.JSONDecodeError as error:
            raise ConfigError(f"backend_config: not JSON: {error}") from error
    if not isinstance(backend_config, dict):
        return values
    try:
        return values | {"backend_config": dotted_keys(backend_config)}
    except ConfigError as error:
        raise ConfigError(str(error).replace("backend-config", "backend_config", 1)) from error


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "configuration"
    if first["type"] == "extra_forbidden":
        nested = [f"losses.{name}" for name in LossesConfig.model_fields]
        nested += [f"agents.{name}" for name in AgentsConfig.model_fields]
        return f"configuration: {unknown_key(where, [*ServerConfig.model_fields, *nested])}"
    return f"{where}: {first['msg'].removeprefix('Value error, ').removeprefix('backend-config: ')}"


def load_config(flags: dict[str, Any], config_file: Path | None = None) -> ServerConfig:
    """Merge flags over environment variables over the file over defaults. The backend configuration is merged key by
    key.

    Raises ConfigError with one line that names the option and what is allowed.
    """
    refuse_unknown(os.environ, ServerConfig.model_fields)
    from_file: dict[str, Any] = {}
    if config_file is not None:
        try:
            from_file = tomllib.loads(config_file.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"config file {config_file}: {error}") from error

    class _WithFile(ServerConfig):
        @classmethod
        def settings_customise_sources(cls, settings_cls, init_settings, env_settings, **_: Any):  # type: ignore[override]
            return (
                init_settings,
                lambda: _with_flat_backend_config(env_settings()),
                lambda: _with_flat_backend_config(from_file),
            )

    given_flags = _with_flat_backend_config({name: value for name, value in flags.items() if value is not None})
    try:
        merged = _WithFile(**given_flags)
    except SettingsError as error:
        raise ConfigError(f"environment: {error}: {error.__cause__}") from error
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from error
    config = ServerConfig.model_construct(_fields_set=merged.model_fields_set, **dict(merged))
    base_models_of(config)  # raises for entries that cannot be used
    return config


def dump_config(config: ServerConfig) -> str:
    """The configuration as JSON, which `restore_config` reads."""
    return config.model_dump_json()


def restore_config(text: str) -> ServerConfig:
    """The configuration from the JSON of `dump_config`. Ignores the environment."""

    return ServerConfig.of(json.loads(text))
