// The first line of the overview: is anything stuck? It answers for each run that has not ended.

import { el, setText, timePart } from "./dom.js";
import { count, runHref } from "./words.js";

const MAX_NAMED = 10; // other runs that are named; the table below has all of them

export class StuckLine {
  #answer = el("strong");
  #open = el("span");
  #age = timePart();
  #after = el("span");
  #list = el("ul");
  #others = el("p");
  #shown = "";
  element = el("div", { id: "stuck", role: "status" },
    el("p", {}, "Is anything stuck? ", this.#answer, " ", this.#open, this.#age.element, this.#after), this.#list,
    this.#others);

  update({ stuck, slow, pending, runs }) {
    const [state, answer] = stuck.length > 0 ? ["yes", "Yes."] : slow.length > 0 ? ["slow", "Nothing, but slow:"] : ["no", "Nothing."];
    this.element.setAttribute("data-stuck", state);
    setText(this.#answer, answer);
    this.#say(pending);
    setText(this.#others, others(runs, new Set([...stuck, ...slow].map(({ run }) => run)), stuck.length > 0));
    const text = JSON.stringify([stuck, slow]);
    if (text === this.#shown) return;
    this.#shown = text;
    const names = new Map(runs.map((run) => [run.id, run.name ?? run.id]));
    this.#list.replaceChildren(...stuck.map((one) => item(one, names, "stuck")), ...slow.map((one) => item(one, names, "slow")));
  }

  #say({ number, oldest_kind: kind, oldest_since: since }) {
    const have = number === 1 ? "1 request has" : `${count(number)} requests have`;
    setText(this.#open, number === 0 ? "No request waits or runs." : `${have} not ended; the oldest (${nameOf(kind)}) came `);
    this.#age.element.hidden = number === 0;
    this.#age.set(since);
    setText(this.#after, number === 0 ? "" : ".");
  }
}

/** The runs that have not ended and are not `said`, each with its state; "" if there are none. */
function others(runs, said, areBeside) {
  const living = runs.filter((run) => run.living && !said.has(run.id));
  if (living.length === 0) return "";
  const named = living.slice(0, MAX_NAMED).map((run) => `${run.name ?? run.id} (${run.state})`);
  const more = living.length > MAX_NAMED ? ` and ${count(living.length - MAX_NAMED)} more` : "";
  return `${areBeside ? "Not stuck" : "Runs"}: ${named.join(", ")}${more}.`;
}

function item({ run, sentence, since }, names, kind) {
  const whose = run === null ? [] : [el("a", { href: runHref(run) }, names.get(run) ?? run), ": "];
  if (since === null) return el("li", { class: kind }, ...whose, sentence);
  const age = timePart();
  age.set(since);
  return el("li", { class: kind }, ...whose, sentence, " (since ", age.element, ")");
}

/** Samples that are forwarded have a kind of their own. */
function nameOf(kind) {
  return kind === "EXTERNAL" ? "sample" : kind.toLowerCase();
}
