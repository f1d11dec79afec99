"""A misspelt `SKYRL_*` variable is an error: it is never ignored silently."""

from __future__ import annotations

import pytest

from skyrl.base.config.loading import OWN, load_config, refuse_unknown
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE
from skyrl.inference.vllm_plugin import FORK_ENGINE_VARIABLE
from skyrl.runtime.processes.runtime import BASE_MODEL_ENV, RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SKYRL_API_KEY", "SKYRL_API_KEYS"),
        ("SKYRL_HOSTS", "SKYRL_HOST"),
        ("SKYRL_PROT", "SKYRL_PORT"),
        ("skyrl_jwt_auths", "SKYRL_JWT_AUTH"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest_key(
    monkeypatch: pytest.MonkeyPatch, name: str, nearest: str
) -> None:
    monkeypatch.setenv(name, "managed")
    with pytest.raises(ConfigError) as raised:
        load_config({})
    assert str(raised.value) == f"environment: unknown key '{name}'; the nearest known one is '{nearest}'"


def test_every_configuration_key_is_known_in_any_case() -> None:
    for key in ServerConfig.model_fields:
        refuse_unknown({f"SKYRL_{key}": "", f"SKYRL_{key.upper()}": "", f"skyrl_{key}": ""}, ServerConfig.model_fields)


@pytest.mark.parametrize(
    "name",
    [
        RUNTIME_ENV,
        FORK_ENGINE_VARIABLE,
        ROUTER_KEY_VARIABLE,
        ADMIN_KEY_VARIABLE,
        "SKYRL_TEST_DATABASE",
        "SKYRL_API_SERVICE_HOST",
        "SKYRL_API_SERVICE_PORT_HTTP",
        "SKYRL_API_PORT_8000_TCP_ADDR",
        "SKYRLING",
        "PATH",
    ],
)
def test_variables_that_other_programs_set_are_accepted(name: str) -> None:
    refuse_unknown({name: "x"}, ServerConfig.model_fields)


def test_the_variables_that_a_server_sets_for_its_processes_are_known() -> None:
    assert set(OWN) == {BASE_MODEL_ENV, RUNTIME_ENV, SLOT_ENV, SOCKETS_ENV, FORK_ENGINE_VARIABLE}
