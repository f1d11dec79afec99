"""The configuration of several base models: what each gets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.base.config.loading import dump_config, load_config, restore_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.config.several import ByName, base_models_of

PORT, CONTEXT = "generator.inference_engine.port", "generator.inference_engine.max_model_len"
STUDENT = {"base_model": "acme/student", "served_model_names": ["student"]}
TEACHER = {"base_model": "acme/teacher", "uses": ["sample"]}


def parts_of(*entries: dict[str, Any], **flags: Any) -> tuple[ServerConfig, ...]:
    return base_models_of(load_config({"base_models": list(entries), **flags}))


def test_each_base_model_has_its_own_keys_over_those_of_the_server() -> None:
    shared = {CONTEXT: 512, "trainer.policy.model.lora.max_loras": 3}
    entry = TEACHER | {"backend_config": {CONTEXT: 256}, "tokenizer_id": "acme/tokens"}
    student, teacher = parts_of(STUDENT, entry, backend_config=shared, threads=2)
    assert [part.backend_config.inference.max_model_len for part in (student, teacher)] == [512, 256]
    assert [part.backend_config.lora.max_loras for part in (student, teacher)] == [3, 3]
    assert [part.threads for part in (student, teacher)] == [2, 2]
    assert (student.tokenizer_id, teacher.tokenizer_id) == (None, "acme/tokens")
    assert student.modes.trains
    assert (teacher.modes.trains, teacher.modes.manages_inference, teacher.modes.forwards) == (False, True, True)


def test_a_judge_of_somebody_else_is_only_forwarded_to() -> None:
    _, judge = parts_of(STUDENT, TEACHER | {"external_inference_url": "http://10.0.0.9:8000"})
    assert (judge.modes.trains, judge.modes.manages_inference, judge.modes.forwards) == (False, False, True)


def test_an_entry_without_a_key_has_the_servers() -> None:
    judge = TEACHER | {"external_inference_url": "http://10.0.0.9:8000"}
    flags = {"external_inference_priority": True, "uses": ["sample"]}
    config = load_config({"base_models": [STUDENT | {"uses": ["train", "sample"]}, {**judge, "uses": None}], **flags})
    for parts in (base_models_of(config), base_models_of(restore_config(dump_config(config)))):
        assert [(part.uses, part.external_inference_priority) for part in parts] == [
            (("train", "sample"), True),
            (("sample",), True),
        ]
    _, own = parts_of(STUDENT, judge | {"external_inference_priority": False}, external_inference_priority=True)
    assert not own.external_inference_priority


def test_each_name_belongs_to_one_engine_and_unknown_names_to_the_first() -> None:
    scopes = [part.role.scope for part in parts_of(STUDENT, {"base_model": "acme/second"}, TEACHER)]
    for name in ("student", "acme/student", "acme/second", "acme/teacher", "acme/forgotten"):
        assert sum(name in scope for scope in scopes[:2]) == 1
    assert "acme/forgotten" in scopes[0]
    assert "acme/second" in scopes[1]


def test_a_base_models_own_rows_are_those_with_its_names() -> None:
    for part, name in zip(parts_of(STUDENT, TEACHER), ("student", "acme/teacher"), strict=True):
        assert name in part.role.own
        assert "acme/forgotten" not in part.role.own
        assert part.role.labels == {"base_model": name}
    (only,) = base_models_of(load_config({"base_model": "acme/student"}))
    assert (only.role.own.is_everything, only.role.labels) == (True, {})


def test_no_path_is_the_label_of_a_metric(tmp_path: Path) -> None:
    paths = [tmp_path / "one" / "Qwen", tmp_path / "two" / "Qwen"]
    parts = parts_of(*({"base_model": str(path)} for path in paths))
    assert [part.role.labels for part in parts] == [{"base_model": "qwen"}, {"base_model": "qwen-2"}]


def test_the_files_of_two_base_models_that_train_belong_to_one_engine() -> None:
    first, second = parts_of({"base_model": "acme/same", "served_model_names": ["one"]}, {"base_model": "acme/same"})
    assert [name in first.role.scope for name in ("one", "acme/same")] == [True, False]
    assert [name in second.role.scope for name in ("one", "acme/same")] == [False, True]


def test_processes_have_short_names_that_differ() -> None:
    names = ["org/Some Model: a very long name indeed", "other/x", "third/X"]
    parts = parts_of(*({"base_model": f"acme/{n}", "served_model_names": [name]} for n, name in enumerate(names)))
    assert [part.role.process("engine") for part in parts] == [
        "engine-some-model-a-very-long-n",
        "engine-x",
        "engine-x-2",
    ]
    assert len({part.running_file for part in parts}) == 3


def test_the_only_base_model_keeps_its_names() -> None:
    (only,) = base_models_of(load_config({"base_model": "acme/student"}))
    assert only.role.process("engine") == "engine"
    assert only.running_file.name == "running.json"
    assert only.role.scope.is_everything


def test_the_processes_of_a_server_get_the_same_configurations(tmp_path: Path) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_text(
        '[[base_models]]\nbase_model = "acme/student"\n'
        '[[base_models]]\nbase_model = "acme/teacher"\nuses = ["sample"]\nbackend_config = { "' + CONTEXT + '" = 99 }\n'
    )
    config = load_config({}, file)
    for part, again in zip(base_models_of(config), base_models_of(restore_config(dump_config(config))), strict=True):
        assert (part.role, part.modes, part.backend_config) == (again.role, again.modes, again.backend_config)


def test_clients_find_a_base_model_by_each_of_its_names_and_by_its_path() -> None:
    names = ByName.of(parts_of(STUDENT, TEACHER))
    assert [names.numbers.get(name) for name in ("student", "acme/student", "acme/teacher", "acme/none")] == [
        0,
        0,
        1,
        None,
    ]
    assert names.served == ["student", "acme/teacher"]


@pytest.mark.parametrize(
    ("entries", "flags", "message"),
    [
        (
            [STUDENT, TEACHER | {"served_model_names": ["student"]}],
            {},
            r"base_models\[1\]\.served_model_names: 'student'",
        ),
        (
            [STUDENT | {"backend_config": {PORT: 8000}}],
            {"port": 8000},
            r"base_models\[0\].*port: 8000 is the server's own",
        ),
        (
            [each | {"backend_config": {PORT: 9000}} for each in (STUDENT, TEACHER)],
            {},
            r"base_models\[1\].*port: 9000 is a vLLM's port in base_models\[0\]",
        ),
        ([TEACHER], {}, "base_models: none is for training"),
        ([STUDENT | {"uses": ["train"]}], {}, r"base_models.*uses.*neither"),
        ([STUDENT], {"base_model": "acme/other"}, "base_model: with base_models, give it in the entry"),
        ([STUDENT | {"colour": "red"}], {}, "base_models.0.colour"),
        (
            [STUDENT | {"backend_config": {"trainer.micro_batch": 1}}],
            {},
            r"base_models\[0\]\.backend_config: unknown key",
        ),
        (
            [STUDENT | {"backend_config": {"trainer.placement.colocate_all": True}}, TEACHER],
            {},
            r"base_models\[0\]: with trainer.placement.colocate_all",
        ),
    ],
)
def test_entries_that_cannot_be_used_together_are_refused(
    entries: list[dict[str, Any]], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts_of(*entries, **flags)


def test_a_server_with_one_base_model_trains_it() -> None:
    with pytest.raises(ConfigError, match="uses"):
        load_config({"base_model": "acme/student", "uses": ["sample"]})


def test_base_models_may_come_as_json() -> None:
    parts = base_models_of(load_config({"base_models": '[{"base_model": "acme/student"}]'}))
    assert [part.served_names for part in parts] == [("acme/student",)]


def test_a_gateway_may_have_several_base_models_behind_servers_of_others() -> None:
    entries = [{"base_model": f"acme/{n}", "external_inference_url": f"http://10.0.0.{n}:8000"} for n in (1, 2)]
    parts = parts_of(*entries, backend="none")
    assert [(part.modes.trains, part.modes.forwards, part.uses) for part in parts] == [(False, True, ("sample",))] * 2
    with pytest.raises(ConfigError, match=r"base_models\[1\].*sampling-only gateway"):
        parts_of(entries[0], {"base_model": "acme/other"}, backend="none")
