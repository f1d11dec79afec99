"""`skyrl status`: what the status page shows, on a terminal or as JSON. Asks a running server over HTTP.

Exit code: 0 if the server is ready, 1 if it is not, 2 if it cannot be reached or refuses the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from skyrl.cli.db import refusal
from skyrl.cli.downloads import api_key

if TYPE_CHECKING:  # importing httpx takes longer than `skyrl --help` may
    import httpx

WATCH_S = 2.0
TIMEOUT_S = 20.0

Ask = Callable[[], dict[str, Any]]


class NoAnswer(Exception):
    """The server cannot be reached."""


def status(
    url: Annotated[
        str, typer.Option(envvar="TINKER_BASE_URL", help="The server's base URL.")
    ] = "http://127.0.0.1:8000",
    run: Annotated[str | None, typer.Option(help="Show the run with this id, and its last steps.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every 2 s, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")] = False,
) -> None:
    """Show your runs, what they wait for, and whether the server is ready. The API key comes from TINKER_API_KEY."""
    import httpx

    key = api_key("status")
    if watch and as_json:
        raise refusal("status", "--json prints one answer; leave out --watch")
    try:
        with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=TIMEOUT_S) as http:
            answer = _watch(_asker(http, run)) if watch else _asker(http, run)()
    except (NoAnswer, httpx.InvalidURL) as error:
        raise refusal("status", f"{url}: {error}") from error
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:  # after --watch, too: its screen goes, and the last answer stays on the terminal
        from rich.console import Console

        from skyrl.cli.status_view import view

        Console().print(view(answer))
    raise typer.Exit(0 if answer["server"]["ready"] else 1)


def _asker(http: httpx.Client, run: str | None) -> Ask:
    """A function that asks for the tenant's state, or for one run. For an admin's key the answer has the part `box`,
    unless it is of one run."""

    def ask() -> dict[str, Any]:
        if run is not None:
            return _get(http, f"/ui/api/runs/{quote(run, safe='')}")
        state = _get(http, "/ui/api/state")
        return state | {"box": _get(http, "/ui/api/box")} if "admin" in state["server"]["scopes"] else state

    return ask


def _get(http: httpx.Client, path: str) -> dict[str, Any]:
    """Raises NoAnswer, and typer.Exit if the server refuses."""
    import httpx

    try:
        answer = http.get(path)
    except httpx.TransportError as error:  # also for a URL without http://
        raise NoAnswer(str(error) or type(error).__name__) from error
    try:
        content = answer.json()
    except ValueError as error:
        raise NoAnswer(f"answered {path} with status {answer.status_code} and no JSON: it is no skyrl") from error
    if answer.status_code >= 500:
        raise NoAnswer(content.get("detail", f"status {answer.status_code}"))
    if answer.is_error:
        raise refusal("status", content.get("detail", f"status {answer.status_code}"))
    return content


def _watch(ask: Ask) -> dict[str, Any]:
    """Show answers until Ctrl-C; returns the last one. While the server is away, the last answer stays. Into a file or
    a pipe, each answer is printed below the one before. Raises NoAnswer if there was none at all."""
    import time
    from contextlib import nullcontext

    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from skyrl.cli.status_view import view

    answer = ask()
    answered_at = time.monotonic()
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:

        def show(drawn: RenderableType) -> None:
            if live is None:
                console.print(drawn)
                console.file.flush()
            else:
                live.update(drawn, refresh=True)

        show(view(answer))
        try:
            while True:
                time.sleep(WATCH_S)
                try:
                    answer, answered_at = ask(), time.monotonic()
                    show(view(answer))
                except NoAnswer as error:
                    age_s = time.monotonic() - answered_at
                    lost = Text(f"no answer ({error}); what is shown is {age_s:.0f} s old", style="red")
                    show(Group(lost, view(answer)))
        except KeyboardInterrupt:
            return answer
