"""What becomes of each turn of the scripted sessions, for all released templates or those whose names have a word:
python -m tests.released_sessions [WORD...]"""

from __future__ import annotations

import sys
from collections import Counter

from skyrl.chat.agents.rendering.renderer import ChatTemplate
from tests.released_sessions.play import SPECIAL, Model
from tests.released_templates import released_templates


def main(words: list[str]) -> None:
    """With words each turn is shown, else those that are wrong or fork needlessly. Raises CannotFetch."""
    total: Counter[str] = Counter()
    for file in sorted(released_templates().glob("*.jinja")):
        if words and not any(word in file.stem for word in words):
            continue
        text = file.read_text()
        model = Model(ChatTemplate(text, SPECIAL), thinks="reasoning_content" in text or "</think>" in text)
        turns = model.play()
        counts = Counter(turn.outcome for turn in turns)
        total += counts
        print(f"{file.stem:50} {dict(counts)} {model.habits.switches} {list(model.stops)}")
        for turn in turns:
            if words or turn.outcome in ("wrong", "forks needlessly"):
                print("   ", turn.outcome, turn.script.name, turn.number, turn.note)
    print(total)


if __name__ == "__main__":
    main(sys.argv[1:])
