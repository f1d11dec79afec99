from __future__ import annotations

import sys
from collections import Counter

from skyrl.server.agents.rendering.chat_template import ChatTemplate
from tests.released_sessions.play import SPECIAL, Model
from tests.released_templates import released_templates

only = sys.argv[1:]
total: Counter[str] = Counter()
for file in sorted(released_templates().glob("*.jinja")):
    if only and not any(each in file.stem for each in only):
        continue
    text = file.read_text()
    thinks = "reasoning_content" in text or "</think>" in text
    model = Model(ChatTemplate(text, SPECIAL), thinks=thinks)
    turns = model.play()
    counts = Counter(turn.outcome for turn in turns)
    total += counts
    print(f"{file.stem:50} {dict(counts)} {model.habits.switches} {list(model.stops)}")
    for outcome in ("wrong", "forks needlessly"):
        for turn in [t for t in turns if t.outcome == outcome][:3]:
            print("   ", outcome, turn.script.name, turn.number, turn.note)
    if only:
        for turn in turns:
            print("   ", turn.outcome, turn.script.name, turn.number, turn.note)
print(total)
