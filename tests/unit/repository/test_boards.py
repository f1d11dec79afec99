"""The rules and the board in deploy/: rules by promtool's own tests, the board by what Grafana needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.pages import blocks_of
from tests.prometheus import BOARD, NEEDS_PROMETHEUS, RULE_FILES, RULES, board, names_in, panels, promtool

ALERTS = yaml.safe_load(RULE_FILES[1].read_text())["groups"][0]["rules"]


@NEEDS_PROMETHEUS
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", *map(str, RULE_FILES))


@NEEDS_PROMETHEUS
def test_the_rules_pass_their_own_tests() -> None:
    promtool("test", "rules", str(RULES.parent / "alerts_test.yml"))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_is_shown_to_fire_and_has_its_texts(alert: dict[str, dict[str, str]]) -> None:
    cases = yaml.safe_load((RULES.parent / "alerts_test.yml").read_text())["tests"]
    tried = [case for test in cases for case in test["alert_rule_test"] if case["alertname"] == alert["alert"]]
    assert any(case.get("exp_alerts") for case in tried)
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert set(alert["annotations"]) == {"summary", "description"}


def test_every_recorded_series_is_used_or_follows_the_names_of_prometheus() -> None:
    """level:metric:operations, where the level is `skyrl` for sums over a server."""
    recorded = [rule["record"] for rule in yaml.safe_load(RULE_FILES[0].read_text())["groups"][0]["rules"]]
    assert all(re.fullmatch(r"skyrl:[a-z_]+:[a-z0-9_]+", name) for name in recorded)
    used = {name for alert in ALERTS for name in names_in(str(alert["expr"])) if ":" in name}
    assert used <= set(recorded)


def test_every_panel_says_what_it_shows_in_which_unit_from_the_chosen_data_source() -> None:
    assert len(panels()) > 40
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), panel["title"]
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"]), panel["title"]


def test_the_board_has_a_stable_id_and_no_panel_hides_another() -> None:
    shown = board()
    assert shown["uid"] == "skyrl"
    assert "id" not in shown, "Grafana gives that number itself"
    assert [variable["name"] for variable in shown["templating"]["list"]] == ["datasource", "instance", "base_model"]
    places = [panel["gridPos"] for panel in shown["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in shown["panels"]]
    assert len(ids) == len(set(ids))


def test_nothing_in_the_board_names_a_tenant_a_model_or_a_key() -> None:
    assert not re.search(r"tenant_id|model_id|model_name|session_id|api_key|Bearer", BOARD.read_text())


@NEEDS_PROMETHEUS
def test_prometheus_accepts_the_configurations_of_the_page(tmp_path: Path) -> None:
    blocks = [block.text for block in blocks_of("docs/operating/metrics.md") if block.language == "yaml"]
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "prometheus.yml").write_text(block)
        promtool("check", "config", "--syntax-only", str(tmp_path / "prometheus.yml"))
