"""Runs the catalogue with the installed SDK, and writes the results.

Started as a program in an isolated environment, with its own working directory and the repository on the path: `python
-m tests.e2e.sdk.run --url URL --seeing-url URL --key KEY --out FILE`. The model of the second server takes pictures.
Before each feature the program announces the feature to the recorder, the proxy in front of the feature's server
(recorder.py), so that every HTTP status belongs to a feature.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
import urllib.request
import warnings
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

from .calls import Calls
from .catalogue import ANNOUNCEMENT, BrokenSDK, Feature
from .features import CATALOGUE
from .presence import clients, commands, present, public_methods
from .user import User

HERE = Path(__file__).parent
FEATURE_S = 400


def raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"not done after {FEATURE_S} s")


def traceback_of(error: BaseException) -> str:
    """The traceback, with the variables of the catalogue's own frames."""
    trace = traceback.TracebackException.from_exception(error, capture_locals=True)
    for frame in trace.stack:
        if not frame.filename.startswith(str(HERE)):
            frame.locals = None
    return "".join(trace.format())


def attempt(feature: Feature, user: User) -> dict[str, Any]:
    """The status of one feature (ok, absent, broken, refused or FAILED) and, for the last three, the error."""
    if not all(present(need) for need in feature.needs):
        return {"status": "absent", "said": ""}
    signal.alarm(FEATURE_S)
    try:
        feature.check(user)
    except BrokenSDK as error:
        return {"status": "broken", "said": str(error)}
    except (Exception, SystemExit) as error:
        if feature.refusal is not None and feature.refusal in str(error):
            return {"status": "refused", "said": str(error)}
        return {"status": "FAILED", "said": traceback_of(error)}
    finally:
        signal.alarm(0)
    if feature.refusal is not None:
        return {"status": "FAILED", "said": f"should have been refused ({feature.refusal}), but worked"}
    return {"status": "ok", "said": ""}


def announce(url: str, name: str) -> None:
    with urllib.request.urlopen(f"{url}{ANNOUNCEMENT}{quote(name)}", timeout=FEATURE_S):
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--seeing-url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, raise_timeout)

    calls = Calls()
    calls.watch()
    users = {sees: User(url, given.key, Path.cwd()) for sees, url in ((False, given.url), (True, given.seeing_url))}
    outcomes: dict[str, Any] = {}
    _ = users[False].quiet  # made first: its heartbeats come while other features are checked
    for feature in sorted(CATALOGUE.values(), key=lambda each: each.last):
        calls.feature = feature.name
        user = users[feature.sees]
        announce(user.url, feature.name)
        began = time.monotonic()
        outcomes[feature.name] = attempt(feature, user) | {"seconds": round(time.monotonic() - began, 2)}
    result = {
        "sdk": version("tinker"),
        "features": outcomes,
        "methods": {name: public_methods(client) for name, client in clients().items()},
        "commands": sorted(commands()),
        "called": calls.by_feature,
    }
    given.out.write_text(json.dumps(result))
    sys.stdout.flush()
    # Threads of the SDK still poll for abandoned samples. Nothing needs their results.
    os._exit(0)


if __name__ == "__main__":
    main()
