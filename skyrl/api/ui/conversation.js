// What was said up to a turn: the messages that the agent sent, and the answers, which the model sampled. Agents' texts
// are set as text alone.

import { forkText } from "./agents.js";
import { el, setText } from "./dom.js";
import { beside } from "./models.js";
import { tokensOf } from "./tokens.js";
import { count, number } from "./words.js";

const SHORT = 30; // turns that are shown before the user asks for all

const KINDS = { thinking: "thinking", call: "calls ", data: "other content" };

export class Conversation {
  #load;
  #earlier = el("button", { type: "button", hidden: "" });
  #list = el("ol", { class: "turns" });
  #path = [];
  element = el("section", {}, el("div", { class: "title" }, el("h2", {}, "Conversation")),
    el("p", { class: "legend" }, "What the model has sampled is ", el("mark", { class: "sampled" }, "marked like this"), "."),
    this.#earlier, this.#list);

  /** `load` gives the tokens of a turn, or null. */
  constructor(load) {
    this.#load = load;
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
    setText(this.#earlier, `Show the ${count(first)} turns before`);
    this.#list.replaceChildren();
    this.#add(path.slice(first));
  }

  #add(turns) {
    this.#list.append(...turns.map((turn) => el("li", {}, ...given(turn), answer(turn, this.#load))));
  }
}

/** What the agent sent before a turn. */
function given(turn) {
  const left = turn.left_out > 0 ? [el("p", { class: "legend" }, `${count(turn.left_out)} earlier messages are not shown.`)] : [];
  const tools = turn.tools === "" ? [] : [message("given", ["tools"], [el("pre", {}, turn.tools)])];
  const messages = turn.messages.map(({ role, name, parts }) =>
    message("given", [role, " ", el("span", {}, name)], parts.flatMap((part) => textOf(part, (text) => text))));
  return [...left, ...tools, ...messages];
}

/** The answer of a turn: its text or, if the user wants that, its tokens. */
function answer(turn, load) {
  const marked = (text) => el("mark", { class: "sampled" }, text);
  const texts = turn.answer.parts.flatMap((part) => textOf(part, marked));
  if (texts.length === 0) texts.push(el("small", {}, "No text."));
  const shown = el("div", {}, ...texts);
  const button = el("button", { type: "button", "aria-pressed": "false" }, "Tokens");
  button.addEventListener("click", async () => {
    const wanted = button.getAttribute("aria-pressed") === "false";
    const tokens = wanted ? await load(turn) : null;
    if (wanted && tokens === null) return;
    button.setAttribute("aria-pressed", String(wanted));
    shown.replaceChildren(...(wanted ? tokensOf(tokens) : texts));
  });
  return message("sampled", ["assistant", " ", el("span", {}, aboutAnswer(turn)), button], [shown]);
}

function aboutAnswer(turn) {
  return beside(`turn ${turn.number}`, forkText(turn), `${count(turn.sampled)} tokens`,
    turn.logprob !== null && `mean logprob ${number(turn.logprob)}`, turn.versions.join(" → "), turn.finish_reason, turn.dialect);
}

function message(kind, [role, ...about], content) {
  return el("article", { class: kind }, el("header", {}, el("strong", {}, role), ...about), ...content);
}

/** A part of a message; `shown` makes what is shown of its text. */
function textOf({ kind, name, text, length }, shown) {
  const head = kind in KINDS ? [el("small", {}, KINDS[kind] + name)] : [];
  const cut = length > text.length ? [el("small", {}, `The first ${count(text.length)} of ${count(length)} characters.`)] : [];
  return [...head, el("pre", { class: kind }, shown(text)), ...cut];
}
