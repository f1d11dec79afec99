"""Agent sessions on the status page in a real Chromium, while an agent speaks to the real server.

With SCREENSHOTS, the name of a folder, the picture of the documentation is written there (`make screenshots`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from skyrl.cli.demo.server import DemoServer

from .browser import DESK, NEEDS_CHROMIUM, PHONE, Browser
from .talking_agent import TalkingAgent, manage

pytestmark = [pytest.mark.vllm, NEEDS_CHROMIUM]

KEY = "tml-agents-page"
HOSTILE = "<img src=x onerror=alert(1)>\u202e<script>alert(2)</script>"
SCREENSHOTS = os.environ.get("SCREENSHOTS")


def rows(browser: Browser, table: str) -> list[dict[str, str]]:
    """The cells of each row, by column."""
    found = browser.all(f'table[aria-label="{table}"] tbody tr')
    return [
        {cell.get_attribute("data-name") or "": cell.text for cell in row.find_elements("css selector", "td")}
        for row in found
    ]


SAID = """
return [...document.querySelectorAll("article pre")].map((text) =>
  [text.querySelector("mark.sampled") === null ? "given" : "sampled", text.textContent]);
"""


def said(browser: Browser) -> list[tuple[str, str]]:
    """Each text of the conversation, and whether it is marked as sampled."""
    return [(kind, text) for kind, text in browser.run(SAID)]


TOKENS = "return [...document.querySelectorAll('.tokens mark')].map((token) => [token.textContent, token.title])"


def show_tokens(browser: Browser, number: int) -> list[tuple[str, str]]:
    """Click on *Tokens* of the answer with this number (from 0); each token, and what is said of it."""
    browser.all("article.sampled button")[number].click()
    return browser.until(lambda: [(text, about) for text, about in browser.run(TOKENS)])


def choose(browser: Browser, number: int) -> None:
    """Click on the turn with this number."""
    [button] = [each for each in browser.all(".turn button") if each.text == str(number)]
    button.click()


def width(browser: Browser) -> int:
    return browser.run("return document.documentElement.scrollWidth")


def test_the_page_shows_what_an_agent_says_and_what_the_model_has_sampled(server: DemoServer, browser: Browser) -> None:
    agent = TalkingAgent.begin(server, KEY, HOSTILE)
    first = agent.says(HOSTILE)
    browser.open(f"{server.url}/ui")
    browser.type_key(KEY)
    browser.until(lambda: rows(browser, "Agent sessions"))
    [row] = rows(browser, "Agent sessions")
    assert row["session"].startswith(HOSTILE.partition("\u202e")[0])
    assert (row["model"], row["state"], row["turns"], row["forks"]) == ("tiny", "● open", "1", "0")
    [link] = [link for link in browser.all("td a") if (link.get_attribute("href") or "").endswith(agent.id)]
    link.click()
    browser.until(lambda: said(browser) == [("given", HOSTILE), ("sampled", first)])

    second = agent.says("Go on.")
    path = [("given", HOSTILE), ("sampled", first), ("given", "Go on."), ("sampled", second)]
    browser.until(lambda: said(browser) == path)
    assert [(row["turn"], row["continues"], row["fork"]) for row in rows(browser, "Turns")] == [
        ("1", "nothing", ""),
        ("2", "turn 1", ""),
    ]

    del agent.messages[2:]
    third = agent.says("Something else.")
    browser.until(lambda: said(browser)[2:] == [("given", "Something else."), ("sampled", third)])
    shown = [(row["turn"], row["continues"], row["fork"]) for row in rows(browser, "Turns")]
    assert shown == [
        ("1", "nothing", ""),
        ("└ 3", "turn 1", "continues an earlier turn again, from message 2 on"),
        ("2", "turn 1", ""),
    ]
    choose(browser, 2)
    assert said(browser) == path
    assert browser.one('[aria-pressed="true"]').text == "2"
    agent.says("And then?")
    browser.until(lambda: len(rows(browser, "Turns")) == 4)
    assert said(browser) == path, "the turn that the user has chosen stays"

    tokens = show_tokens(browser, 0)
    text = "".join(text for text, _ in tokens)
    assert text.removesuffix("<|im_end|>") == first, "the end of an answer is a token, too"
    assert all(re.fullmatch(r"token \d+, logprob -?[\d.e-]+", about) for _, about in tokens)
    browser.all("article.sampled button")[0].click()
    assert said(browser) == path

    manage(server, KEY, "POST", f"/{agent.id}/reward", {"reward": 0.5})
    manage(server, KEY, "POST", f"/{agent.id}/end")
    browser.until(lambda: "■ ended a client has ended it" in browser.text())
    assert "0.5" in browser.one("dl").text
    assert browser.all("main img, main script") == [], "what an agent says is never read as HTML"
    assert browser.console() == []


def test_the_view_of_a_session_fits_a_phone(server: DemoServer, browser: Browser) -> None:
    agent = TalkingAgent.begin(server, KEY, "calculator")
    for text in ("What is 2 + 2?", "x" * 400):
        agent.says(text)
    browser.open(f"{server.url}/ui#/agents/{agent.id}")
    browser.type_key(KEY)
    for screen in (PHONE, DESK):
        browser.has_screen(screen)
        browser.until(lambda: len(rows(browser, "Turns")) == 2)
        assert width(browser) <= screen[0]
    assert browser.console() == []


@pytest.mark.skipif(not SCREENSHOTS, reason="makes the picture of the documentation: make screenshots")
def test_the_picture_of_a_session(server: DemoServer, browser: Browser) -> None:
    agent = TalkingAgent.begin(server, KEY, "fox-watch")
    for text in ("Who watches the river?", "And the hill?"):
        agent.says(text)
    del agent.messages[2:]
    for text in ("And the forest?", "Since when?"):
        agent.says(text)
    browser.has_screen((DESK[0], 1250))
    browser.open(f"{server.url}/ui#/agents/{agent.id}")
    browser.type_key(KEY)
    browser.until(lambda: len(rows(browser, "Turns")) == 4)
    show_tokens(browser, 1)
    assert SCREENSHOTS
    browser.screenshot(Path(SCREENSHOTS) / "status-agent.png")


def test_another_tenants_session_is_not_found(server: DemoServer, browser: Browser) -> None:
    agent = TalkingAgent.begin(server, KEY, "secret name")
    browser.open(f"{server.url}/ui#/agents/{agent.id}")
    browser.type_key("tml-somebody-else")
    browser.until(lambda: "no such agent session" in browser.one("#notice").text)
    assert "secret name" not in browser.text()
    assert [line for line in browser.console() if "status of 404" not in line] == []
