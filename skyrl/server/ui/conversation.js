// What was said up to a turn: the messages that the agent sent, and the answers, which the model sampled. Agents' texts
// are set as text alone.

import { el } from "./dom.js";
import { forkText } from "./agents.js";
import { beside } from "./models.js";
import { count, number } from "./words.js";

const SHORT = 30; // turns that are shown before the user asks for all

const KINDS = { thinking: "thinking", call: "calls ", data: "other content" };

export class Conversation {
  #earlier = el("button", { type: "button", hidden: "" });
  #list = el("ol", { class: "turns" });
  #path = [];
  element = el("section", {}, el("div", { class: "title" }, el("h2", {}, "Conversation")),
    el("p", { class: "legend" }, "What the model has sampled is ", el("mark", { class: "sampled" }, "marked like this"), "."),
    this.#earlier, this.#list);

  constructor() {
    this.#earlier.addEventListener("click", () => this.#show(this.#path, 0));
  }

  /** Show the turns of a path. Those that are shown already stay the same elements. */
  update(path) {
    const goesOn = this.#path.length > 0 && this.#path.every((turn, index) => turn.id === path[index]?.id);
    if (goesOn) this.#add(path.slice(this.#path.length));
    else this.#show(path, Math.max(0, path.length - SHORT));
    this.#path = path;
  }

  #show(path, first) {
    this.#earlier.hidden = first === 0;
    this.#earlier.textContent = `Show the ${first} turns before`;
    this.#list.replaceChildren();
    this.#add(path.slice(first));
  }

  #add(turns) {
    this.#list.append(...turns.map((turn) => el("li", {}, ...partsOf(turn))));
  }
}

function partsOf(turn) {
  const left = turn.left_out > 0 ? [el("p", { class: "legend" }, `${count(turn.left_out)} earlier messages are not shown.`)] : [];
  const tools = turn.tools === "" ? [] : [message("tools", "", [{ kind: "text", name: "", text: turn.tools, length: turn.tools.length }], "given")];
  const given = turn.messages.map(({ role, name, parts }) => message(role, name, parts, "given"));
  return [...left, ...tools, ...given, message("assistant", aboutAnswer(turn), turn.answer.parts, "sampled")];
}

function aboutAnswer(turn) {
  return beside(`turn ${turn.number}`, forkText(turn), `${count(turn.sampled)} tokens`,
    turn.logprob !== null && `mean logprob ${number(turn.logprob)}`, turn.versions.join(" → "), turn.finish_reason);
}

function message(role, about, parts, kind) {
  return el("article", { class: kind }, el("header", {}, el("strong", {}, role), " ", el("span", {}, about)),
    ...parts.flatMap((part) => textOf(part, kind)), ...(parts.length === 0 ? [el("small", {}, "No text.")] : []));
}

function textOf({ kind, name, text, length }, source) {
  const head = kind in KINDS ? [el("small", {}, KINDS[kind] + name)] : [];
  const cut = length > text.length ? [el("small", {}, `The first ${count(text.length)} of ${count(length)} characters.`)] : [];
  const shown = source === "sampled" ? el("mark", { class: "sampled" }, text) : text;
  return [...head, el("pre", { class: kind }, shown), ...cut];
}
