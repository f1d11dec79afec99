// The first line of the overview: is anything stuck?

import { el, setText, timePart } from "./dom.js";
import { count, runHref } from "./words.js";

export class StuckLine {
  #answer = el("strong");
  #open = el("span");
  #age = timePart();
  #after = el("span");
  #list = el("ul");
  #shown = "";
  element = el("div", { id: "stuck", role: "status" },
    el("p", {}, "Is anything stuck? ", this.#answer, " ", this.#open, this.#age.element, this.#after), this.#list);

  update({ stuck, pending, runs }) {
    this.element.setAttribute("data-stuck", stuck.length > 0 ? "yes" : "no");
    setText(this.#answer, stuck.length > 0 ? "Yes." : "Nothing.");
    this.#say(pending);
    const text = JSON.stringify(stuck);
    if (text === this.#shown) return;
    this.#shown = text;
    const names = new Map(runs.map((run) => [run.id, run.name ?? run.id]));
    this.#list.replaceChildren(...stuck.map((one) => item(one, names)));
  }

  #say({ number, oldest_kind: kind, oldest_since: since }) {
    const have = number === 1 ? "1 request has" : `${count(number)} requests have`;
    setText(this.#open, number === 0 ? "No request waits or runs." : `${have} not ended; the oldest (${nameOf(kind)}) came `);
    this.#age.element.hidden = number === 0;
    this.#age.set(since);
    setText(this.#after, number === 0 ? "" : ".");
  }
}

function item({ run, sentence, since }, names) {
  const whose = run === null ? [] : [el("a", { href: runHref(run) }, names.get(run) ?? run), ": "];
  if (since === null) return el("li", {}, ...whose, sentence);
  const age = timePart();
  age.set(since);
  return el("li", {}, ...whose, sentence, " (since ", age.element, ")");
}

/** Samples that are forwarded have a kind of their own. */
function nameOf(kind) {
  return kind === "EXTERNAL" ? "sample" : kind.toLowerCase();
}
