"""The status page in a real Chromium, and `skyrl status`, while real runs train and sample through the SDK.

With SCREENSHOTS, the name of a folder, the pictures of the documentation are written there (`make screenshots`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
from tinker import types
from typer.testing import CliRunner, Result

from skyrl.cli.demo.rl import datum
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.main import app

from .browser import DESK, NEEDS_CHROMIUM, PHONE, Browser
from .conftest import ClientFactory, cross_entropy, train

pytestmark = pytest.mark.vllm

KEY, OTHER_KEY = "tml-status-page", "tml-status-page-of-another"
NAME, OTHER_NAME = "<img src=x onerror=alert(1)>", "secret-of-another-tenant"
NO_TOKEN = "eyJ.not-a.token"
"""Has a token's form, so that a server that takes every key refuses it."""
TEXT = [cross_entropy(list(range(30, 60)))]
LOSS = "figure:nth-of-type(2)"
HOME, LEFT = "\ue011", "\ue012"
SMALL_PHONE = (320, 640)
SCREENSHOTS = os.environ.get("SCREENSHOTS")


@dataclass
class Loop:
    """A run of one tenant, which samples from its weights before each step."""

    trainer: tinker.TrainingClient
    id: str

    @classmethod
    def begin(cls, client: tinker.ServiceClient, name: str) -> Loop:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4, user_metadata={"name": name}).result()
        return cls(trainer, trainer.get_info().model_id)

    def sampler(self) -> tinker.SamplingClient:
        return self.trainer.save_weights_and_get_sampling_client().result()

    def steps(self, count: int) -> None:
        prompt = [5, 6, 7]
        params = types.SamplingParams(max_tokens=12)
        for _ in range(count):
            answer = self.sampler().sample(types.ModelInput.from_ints(prompt), 4, params).result()
            data = [
                datum(prompt, list(sequence.tokens), list(sequence.logprobs or ()), 1.0 - number % 2 * 1.5)
                for number, sequence in enumerate(answer.sequences)
            ]
            passed = self.trainer.forward_backward(data, "ppo")
            self.trainer.optim_step(types.AdamParams(learning_rate=3e-3)).result()
            passed.result()


def cells(browser: Browser, name: str) -> dict[str, str]:
    """The row of the run of this name, by column; empty if it is not shown."""
    for row in browser.all("section:first-of-type tbody tr"):
        if row.find_element("css selector", "a").text == name:
            return {
                cell.get_attribute("data-name") or "": cell.text for cell in row.find_elements("css selector", "td")
            }
    return {}


PAINTED = """
const [red, green, blue] = [0x1a, 0x56, 0xc4];  // --curve in light colours
return [...document.querySelectorAll(arguments[0])].map((canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let at = 0; at < data.length; at += 4)
    if (data[at] === red && data[at + 1] === green && data[at + 2] === blue) found += 1;
  return found;
});
"""


def painted(browser: Browser, selector: str) -> list[int]:
    """For each drawing, how many dots of it have the curves' colour."""
    return browser.run(PAINTED, f"{selector} canvas")


def curves(browser: Browser) -> list[int]:
    """The curves of a run's view, if all are drawn."""
    return [*found] if (found := painted(browser, ".plot")) and all(found) else []


def shown_value(browser: Browser, figure: int, keys: str) -> str:
    """What the figure with this number (from 1) says after these keys."""
    browser.one(f"figure:nth-of-type({figure}) .plot").send_keys(keys)
    return browser.one(f"figure:nth-of-type({figure}) .value").text


def follow(browser: Browser, name: str) -> None:
    [link] = [link for link in browser.all("section:first-of-type td a") if link.text == name]
    link.click()


def picture(browser: Browser, name: str) -> None:
    if SCREENSHOTS:
        browser.screenshot(Path(SCREENSHOTS) / f"status-{name}.png")


def width(browser: Browser) -> int:
    """How wide the page is. A phone's browser zooms out until everything is in its window, so windows say nothing."""
    return browser.run("return document.documentElement.scrollWidth")


def places_of_key(browser: Browser) -> list[object]:
    """Where a page can leave a key: addresses that were loaded, cookies, and the two storages."""
    return browser.run(
        "return [location.href, performance.getEntriesByType('resource').map((entry) => entry.name),"
        " document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage)]"
    )


@NEEDS_CHROMIUM
def test_the_page_follows_a_run_that_trains_and_shows_nothing_of_another_tenant(
    server: DemoServer, connect: ClientFactory, browser: Browser
) -> None:
    mine, theirs = Loop.begin(connect(KEY), NAME), Loop.begin(connect(OTHER_KEY), OTHER_NAME)
    theirs.trainer.save_state("theirs").result()
    seen: list[str] = []

    browser.open(server.url)
    browser.type_key(NO_TOKEN)
    browser.until(lambda: any("token was not made by this server" in each.text for each in browser.all("#refused")))
    assert [line for line in browser.console() if "status of 401" not in line] == []
    browser.type_key(KEY)
    row = browser.until(lambda: cells(browser, NAME))
    assert (row["steps"], row["loss"]) == ("0", ""), "no run has a loss, so there is no such column"
    browser.run("document.querySelector('td a').focus(); window.untouched = document.querySelector('tbody tr')")

    mine.steps(3)
    row = browser.until(lambda: (row := cells(browser, NAME)).get("steps") == "3" and row)
    assert (row["loss"], row["learning rate"]) == ("", "0.003"), "no mean of ppo's sums over advantages says anything"
    assert float(row["ratio"]) == pytest.approx(1, abs=1e-3)
    assert "tiny" in row["run"]
    assert abs(float(row["gap"])) < 1e-3, "the sampler has the trainer's weights"
    assert float(row["tokens/s"].replace(",", "")) > 0
    browser.until(lambda: cells(browser, NAME).get("state", "").startswith("○ idle"))
    assert "the client sent its last command" in cells(browser, NAME)["state"]
    assert browser.run("return window.untouched === document.querySelector('tbody tr')"), "rows are changed in place"
    assert browser.run("return document.activeElement === document.querySelector('td a')"), "the focus stays"
    seen.append(browser.text())

    assert "Is anything stuck? Nothing." in browser.one("#stuck").text
    assert f"Runs: {NAME} (idle)" in browser.one("#stuck").text
    assert any(painted(browser, "section:first-of-type td[data-name=gap] .spark")), "the gap of three steps"
    [group] = [row for row in browser.all("section:nth-of-type(2) tbody tr") if NAME in row.text]
    assert group.find_element("css selector", "summary").text == "3"
    assert mine.id not in group.find_element("css selector", "details").text, "ids are folded"
    group.find_element("css selector", "summary").click()
    versions = [line for line in group.text.splitlines() if line.startswith("version ")]
    assert versions == ["version 3", "version 2", "version 1"]

    follow(browser, NAME)
    drawn = browser.until(lambda: curves(browser))
    assert len(drawn) >= 6, "gap, ratio, clip fraction, tokens per second, trainer's time, step time"
    assert not browser.one(LOSS).is_displayed(), "ppo has no loss per token"
    health = browser.one("#health")
    assert health.location["y"] < min(each.location["y"] for each in browser.all("dl, figure") if each.is_displayed())
    assert "reward\nnot known: the server gets rewards only of agents' sessions" in health.text
    train(mine.trainer, TEXT, 1, 1e-3)
    mine.steps(1)
    browser.until(lambda: browser.one(f"{LOSS} .value").text == "step 5: no value")
    titles = [figure.text for figure in browser.all("figure") if figure.is_displayed()]
    assert any(title.startswith("Entropy of samples") for title in titles), "counted within a second, so by step 4"
    assert any(title.startswith("Truncated samples") for title in titles)
    assert shown_value(browser, 3, LEFT) == "step 4: no value", "a step without logprobs of a sampler has no gap"
    assert shown_value(browser, 2, HOME).startswith("step 1: ")
    assert browser.one("h1").text == NAME
    seen.append(browser.text())

    browser.one("#to-box").click()
    browser.until(lambda: "trainer\n● ready" in browser.text().replace(" ●", "\n●"))
    seen.append(browser.text())
    browser.open(f"{server.url}/ui#/runs/{theirs.id.replace(':', '%3A')}")
    browser.run("location.reload()")
    browser.until(lambda: browser.one("#key").is_displayed())
    browser.type_key(KEY)
    browser.until(lambda: f"no run '{theirs.id}'" in browser.text())
    assert [line for line in browser.console() if "status of 404" not in line] == [], "no error, no policy report"
    for text in seen:
        assert OTHER_NAME not in text
        assert theirs.id not in text
        assert "theirs" not in text


@NEEDS_CHROMIUM
def test_the_key_is_kept_nowhere_unless_the_user_asks_for_it(
    server: DemoServer, connect: ClientFactory, browser: Browser
) -> None:
    Loop.begin(connect(KEY), "kept")
    browser.open(f"{server.url}/ui")
    browser.type_key(KEY)
    browser.until(lambda: cells(browser, "kept"))
    assert KEY not in str(places_of_key(browser))
    browser.one("#forget").click()
    browser.type_key(KEY, keep=True)
    browser.until(lambda: cells(browser, "kept"))
    *elsewhere, session_storage = places_of_key(browser)
    assert KEY not in str(elsewhere)
    assert KEY in str(session_storage)
    browser.run("location.reload()")
    browser.until(lambda: cells(browser, "kept"))
    browser.one("#forget").click()
    assert KEY not in str(places_of_key(browser))
    assert browser.one("#key").is_displayed()


def check_folded_rows(browser: Browser) -> None:
    """A phone's row shows the run, its state and a curve, until the user unfolds it."""
    row = browser.one("section:first-of-type tbody tr")

    def shown() -> list[str | None]:
        return [
            cell.get_attribute("data-name") for cell in row.find_elements("css selector", "td") if cell.is_displayed()
        ]

    assert shown() == ["run", "state", "health", "gap"]
    folded = row.size["height"]
    assert folded < 100, "a line for the name, and one for state and curve"
    button = row.find_element("css selector", ".unfold")
    button.click()
    assert (button.text, button.get_attribute("aria-expanded")) == ("Less", "true")
    assert {"steps", "ratio", "learning rate", "last activity"} <= {*shown()}
    assert row.size["height"] > 2 * folded
    button.click()
    assert shown() == ["run", "state", "health", "gap"]


@NEEDS_CHROMIUM
def test_every_view_fits_a_phone(server: DemoServer, connect: ClientFactory, browser: Browser) -> None:
    loop = Loop.begin(connect("tml-phone"), "fox-rl")
    loop.steps(12 if SCREENSHOTS else 2)
    loop.trainer.save_state("first").result()
    browser.open(f"{server.url}/ui")
    browser.type_key("tml-phone")
    browser.until(lambda: cells(browser, "fox-rl"))
    picture(browser, "overview")
    views: list[tuple[str, Callable[[], object]]] = [
        ("overview", lambda: cells(browser, "fox-rl")),
        ("run", lambda: curves(browser)),
        ("server", lambda: "free disk" in browser.text()),
    ]
    for name, shown in views:
        for screen in (SMALL_PHONE, PHONE):
            browser.has_screen(screen)
            browser.until(shown)
            assert width(browser) == screen[0], name
        if name == "overview":
            check_folded_rows(browser)
        browser.has_screen(DESK)
        assert width(browser) <= DESK[0], name
        if name == "overview":
            follow(browser, "fox-rl")
            browser.until(lambda: curves(browser))
            picture(browser, "run")
        elif name == "run":
            browser.one("#to-box").click()
            browser.until(lambda: "free disk" in browser.text())
            picture(browser, "server")
    assert browser.console() == []


@NEEDS_CHROMIUM
def test_while_the_server_is_away_the_page_says_how_old_its_data_is(
    server: DemoServer, connect: ClientFactory, browser: Browser
) -> None:
    Loop.begin(connect(KEY), "away")
    browser.open(f"{server.url}/ui")
    browser.type_key(KEY)
    browser.until(lambda: cells(browser, "away"))
    browser.driver.execute_cdp_cmd("Network.enable", {})
    network = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", network)
    browser.until(lambda: "The server does not answer. What is shown is" in browser.one("#notice").text)
    assert cells(browser, "away"), "the last data stays"
    browser.driver.execute_cdp_cmd("Network.emulateNetworkConditions", network | {"offline": False})
    browser.until(lambda: browser.one("#notice").text == "")
    browser.console()


def status(server: DemoServer, *arguments: str, key: str) -> Result:
    environment = {"TINKER_API_KEY": key, "TINKER_BASE_URL": server.url, "COLUMNS": "200"}
    return CliRunner().invoke(app, ["status", *arguments], env=environment)


def test_skyrl_status_says_the_same_on_a_terminal(server: DemoServer, connect: ClientFactory) -> None:
    run = Loop.begin(connect("tml-terminal"), "fox\x1b[31m[bold]rl")
    theirs = Loop.begin(connect(OTHER_KEY), OTHER_NAME)
    run.steps(2)
    shown = status(server, key="tml-terminal")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "● ready" in shown.stdout
    assert "fox�[31m[bold]rl" in shown.stdout, "a name can neither change colours nor be read as markup"
    assert run.id in shown.stdout
    assert "trainer" in shown.stdout, "any key of this server is an admin's"
    for secret in (theirs.id, OTHER_NAME):
        assert secret not in shown.stdout
    answer = json.loads(status(server, "--json", key="tml-terminal").stdout)
    assert [(one["id"], one["steps"]) for one in answer["runs"]] == [(run.id, 2)]
    assert answer["box"]["server"]["ready"] is True
    one = json.loads(status(server, "--json", "--run", run.id, key="tml-terminal").stdout)
    assert [step["step"] for step in one["history"]] == [1, 2]
    assert "step time (s)" in status(server, "--run", run.id, key="tml-terminal").stdout
    foreign = status(server, "--run", theirs.id, key="tml-terminal")
    assert (foreign.exit_code, foreign.stdout) == (2, "")
    assert foreign.stderr == f"skyrl status: run_id: no run '{theirs.id}'\n"
    refused = status(server, key=NO_TOKEN)
    assert (refused.exit_code, "token was not made by this server" in refused.stderr) == (2, True)
