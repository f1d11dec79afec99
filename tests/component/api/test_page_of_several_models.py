"""The status page of a server with several base models in a real Chromium: which of them is away, and which one a run
and a sampler are of. Their engine and vLLMs are rows of the database and stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from api_harness import BASE, Api
from two_models import JUDGE, STUDENT, TEACHER

from skyrl.api import served
from skyrl.api.app import create_app
from skyrl.http.serving import Server
from skyrl.runtime.processes.ports import listen
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import clear
from tests.e2e.browser import DESK, NEEDS_CHROMIUM, PHONE, Browser, open_browser

REASON = "cannot start: base_model: there is no directory /models/teacher"


@pytest.fixture(autouse=True)
def engines_count_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write one heartbeat, and a busy machine needs longer to start the browser than that is good for."""
    monkeypatch.setattr(served, "STALE_S", 1000.0)


@asynccontextmanager
async def listening(api: Api) -> AsyncIterator[str]:
    """The URL of the API process, which now listens at a port, too."""
    server = Server(create_app(api.services))
    [listener] = sockets = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving


def rows_of(browser: Browser, table: str) -> list[dict[str, str]]:
    """The rows of a table, by column."""
    return [
        {cell.get_attribute("data-name") or "": cell.text for cell in row.find_elements("css selector", "td")}
        for row in browser.all(f"table[aria-label='{table}'] tbody tr")
    ]


def look(url: str, directory: Path) -> tuple[str, dict[str, list[dict[str, str]]], list[str]]:
    """The header's line, the rows of tables by title, and what the console says."""
    seen: dict[str, list[dict[str, str]]] = {}
    with open_browser(directory) as browser:
        browser.has_screen(DESK)
        browser.open(f"{url}/ui")
        browser.type_key("tml-one")
        browser.until(lambda: rows_of(browser, "Runs"))
        header = browser.one("#server").text
        seen |= {table: rows_of(browser, table) for table in ("Base models", "Runs", "Samplers")}
        browser.has_screen(PHONE)
        width = browser.run("return document.documentElement.scrollWidth")
        assert width <= PHONE[0], "a long name must not make the page wider than a phone"
        browser.has_screen(DESK)
        browser.one("#to-box").click()
        browser.until(lambda: rows_of(browser, "Parts"))
        seen["Parts"] = rows_of(browser, "Parts")
        return header, seen, browser.console()


async def page_of(api: Api, directory: Path) -> tuple[str, dict[str, list[dict[str, str]]]]:
    async with listening(api) as url:
        header, seen, console = await asyncio.to_thread(look, url, directory)
    assert console == [], "no error, no policy report"
    return header, seen


async def begin(api: Api, student: str, *sampled: str) -> None:
    """A run of the student, and a sampler of each base model."""
    session = (await api.post("create_session", {})).json()["session_id"]
    wanted: dict[str, Any] = {"session_id": session, "base_model": student, "user_metadata": {"name": "my run"}}
    assert (await api.post("create_model", wanted | {"model_seq_id": 0})).status_code == 200
    for name in sampled:
        await api.sampler(base_model=name)


@NEEDS_CHROMIUM
async def test_the_page_marks_the_base_model_that_is_away_and_names_that_of_each_row(
    two_models: Api, shared: Database, tmp_path: Path
) -> None:
    await begin(two_models, STUDENT, TEACHER)
    shared.write(lambda c: clear(c, REASON, TEACHER))
    header, seen = await page_of(two_models, tmp_path / "chromium")
    assert header == f"◆ degraded {TEACHER}: sampling: {REASON}"
    models = {row["base model"]: (row["state"], row["used for"]) for row in seen["Base models"]}
    assert {name: state.partition("\n")[0] for name, (state, _) in models.items()} == {
        STUDENT: "● ready",
        TEACHER: "▲ not ready",
        JUDGE: "● ready",
    }
    assert [use for _, use in models.values()] == ["training and sampling", "sampling", "sampling"]
    [run] = seen["Runs"]
    assert run["run"].splitlines()[0] == "my run"
    assert run["run"].endswith(f" · {STUDENT}")
    assert [row["samples from"].splitlines()[0] for row in seen["Samplers"]] == [TEACHER]
    parts = {row["part"]: row["state"].partition("\n")[0] for row in seen["Parts"]}
    assert parts == {
        f"trainer · {STUDENT}": "● ready",
        f"inference · {STUDENT}": "● ready",
        f"inference · {TEACHER}": "▲ not ready",
        f"inference · {JUDGE}": "● ready",
        f"API process {two_models.services.process_id}": "● ready",
    }


@NEEDS_CHROMIUM
async def test_the_page_of_one_base_model_has_no_table_of_base_models(api: Api, tmp_path: Path) -> None:
    await begin(api, BASE, BASE)
    header, seen = await page_of(api, tmp_path / "chromium")
    assert header.strip() == "● ready"
    assert seen["Base models"] == []
    [run] = seen["Runs"]
    assert run["run"].endswith(f" · {BASE}")
    assert [row["part"] for row in seen["Parts"]] == ["trainer", "inference", f"API process {api.services.process_id}"]
