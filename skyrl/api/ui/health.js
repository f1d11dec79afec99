// The health of a run: whether its numbers are as usual for it, and what each is. The server chooses all words.

import { el, setText, statePart } from "./dom.js";
import { Facts, column } from "./table.js";

/** The word for a run's health and its first sentence, for a row: what statePart takes. */
export function inShort(health) {
  if (!health) return { state: "–", sentence: "" };
  return { state: health.state, sentence: health.sentences[0] ?? "" };
}

/** The block at the top of a run's view. */
export class HealthBlock {
  #state = statePart();
  #sentences = el("ul");
  #time = el("p");
  #box = el("div", {});
  #facts = null;
  #names = "";
  #shown = "";
  element = el("section", { id: "health", "aria-label": "Health" },
    el("p", { role: "status" }, "Health: ", this.#state.element), this.#sentences, this.#time, this.#box);

  update({ state, sentences, lines, time }) {
    this.#state.set({ state, sentence: summary(state, sentences.length) });
    setText(this.#time, time ?? "");
    const said = JSON.stringify(sentences);
    if (said !== this.#shown) {
      this.#shown = said;
      this.#sentences.hidden = sentences.length === 0;
      this.#sentences.replaceChildren(...sentences.map((sentence) => el("li", {}, sentence)));
    }
    this.#showLines(lines);
  }

  #showLines(lines) {
    const names = lines.map(({ name }) => name).join();
    if (names !== this.#names) {
      this.#names = names;
      this.#facts = new Facts(...lines.map(({ name }, index) => column(name, (all) => textOf(all[index]))));
      this.#box.replaceChildren(this.#facts.element);
    }
    this.#facts.update(lines);
  }
}

function summary(state, sentences) {
  if (state === "too early") return "compared with its own past after some 25 steps";
  if (state === "usual") return "all numbers are as usual for this run";
  return sentences === 1 ? "one number is not as usual" : `${sentences} numbers are not as usual`;
}

function textOf({ text, usual, missing }) {
  if (missing !== null) return `${text}: ${missing}`;
  return usual === null ? text : `${text} (usual: ${usual})`;
}
