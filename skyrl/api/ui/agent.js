// The view of one agent session: where it stands, its turns as a tree, and what was said up to one of them.

import { agentState, forkText } from "./agents.js";
import { Conversation } from "./conversation.js";
import { el, setText, statePart, timePart } from "./dom.js";
import { Facts, Table, column } from "./table.js";
import { Tree } from "./tree.js";
import { count, number } from "./words.js";

const numeric = { numeric: true };
const MAX_INDENT = 8;
const FOLLOWS = { pinned: "the version that it began with", newest: "the newest version at each turn" };

/** A turn's number as a button, moved to the right by its depth: set({turn, isShown, choose}). */
function turnPart() {
  const indent = el("span", { "aria-hidden": "true" });
  const button = el("button", { type: "button" });
  let choose = () => {};
  button.addEventListener("click", () => choose());
  return {
    element: el("span", { class: "turn" }, indent, button),
    set: (value) => {
      const { depth, number: own } = value.turn;
      setText(indent, depth === 0 ? "" : `${"\u00a0\u00a0".repeat(Math.min(depth, MAX_INDENT) - 1)}└\u00a0`);
      setText(button, count(own));
      button.setAttribute("aria-pressed", String(value.isShown));
      choose = value.choose;
    },
  };
}

export class AgentView {
  title = "Agent session";
  #id;
  #tree = new Tree();
  #last = 0;
  #chosen = null; // the turn that the user has chosen; null: the newest one
  #more = false;
  #heading = el("h1", { tabindex: "-1" });
  #state = statePart();
  #facts = new Facts(
    column("session", (session) => session.session_id),
    column("model", (session) => session.model),
    column("weights", (session) => session.weights),
    column("follows", (session) => FOLLOWS[session.follows] ?? session.follows),
    column("turns", ({ turns, limits }) => `${count(turns)} of ${count(limits.turns)}`),
    column("tokens", ({ sampled, added, limits }) => `${count(sampled + added)} of ${count(limits.tokens)}`),
    column("tokens sampled", (session) => count(session.sampled)),
    column("forks", (session) => count(session.forks)),
    column("reward", (session) => number(session.reward)),
    column("created", (session) => session.created_at, { part: timePart }),
    column("last use", (session) => session.used_at, { part: timePart }),
    column("ended", (session) => session.ended_at, { part: timePart }),
  );
  #turns = new Table("Turns", [
    column("turn", (turn) => ({ turn, isShown: turn.id === this.#shown()?.id, choose: () => this.#choose(turn.id) }),
      { part: turnPart }),
    column("continues", (turn) => (turn.continues === null ? "nothing" : `turn ${count(turn.continues)}`)),
    column("fork", forkText),
    column("prompt", (turn) => count(turn.prompt), numeric),
    column("cached", (turn) => count(turn.cached), numeric),
    column("new", (turn) => count(turn.added), numeric),
    column("sampled", (turn) => count(turn.sampled), numeric),
    column("logprob", (turn) => number(turn.logprob), numeric),
    column("seconds", (turn) => number(turn.seconds), numeric),
    column("end", (turn) => turn.finish_reason),
    column("weights", (turn) => turn.versions.join(" → ")),
  ], "No turns yet.");
  #conversation;

  /** `load` gives the answer of a path. */
  constructor(id, load) {
    this.#id = id;
    this.#conversation = new Conversation((turn) => load(`${this.#address()}/turns/${encodeURIComponent(turn.id)}`));
    setText(this.#heading, id);
    this.element = el("div", {}, this.#heading, el("p", {}, this.#state.element), this.#facts.element,
      this.#turns.element, this.#conversation.element);
  }

  path() {
    return `${this.#address()}?after=${this.#last}`;
  }

  #address() {
    return `ui/api/agents/${encodeURIComponent(this.#id)}`;
  }

  /** Whether the server has more turns than it has told. */
  get isBehind() {
    return this.#more;
  }

  update({ session, turns, last, more }) {
    this.title = session.name || session.session_id;
    setText(this.#heading, this.title);
    this.#state.set(agentState(session));
    this.#facts.update(session);
    this.#last = last;
    this.#more = more;
    for (const turn of turns) this.#tree.add(turn);
    if (!more) this.#show();
  }

  #shown() {
    return this.#tree.find(this.#chosen) ?? this.#tree.newest;
  }

  #choose(id) {
    this.#chosen = id;
    this.#show();
    this.#conversation.element.scrollIntoView();
  }

  #show() {
    this.#turns.update(this.#tree.ordered(), (turn) => turn.id);
    this.#conversation.update(this.#tree.path(this.#shown()?.id));
  }
}
