// Elements, and parts of them whose text changes. All text is set as text: none of it is ever read as HTML.

import { absolute, relative } from "./words.js";

/** A new element. Children are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Change a text only if it differs, so that a selection in it stays. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Parts. A part has an element and `set`, which takes the part's value.

export function textPart() {
  const element = el("span");
  return { element, set: (text) => setText(element, text) };
}

/** A link with a second line: set({text, href, more}). */
export function linkPart() {
  const link = el("a");
  const more = el("small");
  return {
    element: el("span", {}, link, more),
    set: (value) => {
      setText(link, value.text);
      setAttribute(link, "href", value.href);
      setText(more, value.more);
    },
  };
}

/** A time as its distance from now; the exact time is its title. */
export function timePart() {
  const element = el("time");
  return {
    element,
    set: (at) => {
      setAttribute(element, "data-at", at === null || at === undefined ? "" : String(at));
      setAttribute(element, "title", absolute(at));
      setText(element, relative(at));
    },
  };
}

/** Write all times on the page anew. */
export function tickTimes() {
  for (const node of document.querySelectorAll("time[data-at]")) {
    if (node.dataset.at !== "") setText(node, relative(Number(node.dataset.at)));
  }
}

const SYMBOLS = {
  working: "●", waiting: "◆", "over quota": "◆", idle: "○", "finished or gone": "▲", ended: "■", failed: "✖",
  usual: "●", unusual: "▲", "too early": "○", ready: "●", open: "●", degraded: "◆", "not ready": "▲",
};

/** A state as symbol, colour and word, and its sentence: set({state, sentence}). */
export function statePart() {
  const symbol = el("span", { "aria-hidden": "true" });
  const word = el("span");
  const mark = el("span", { class: "mark" }, symbol, " ", word);
  const sentence = el("span", { class: "sentence" });
  return {
    element: el("span", { class: "state" }, mark, " ", sentence),
    set: (value) => {
      setAttribute(mark, "data-state", value.state);
      setText(symbol, SYMBOLS[value.state] ?? "·");
      setText(word, value.state);
      setText(sentence, value.sentence);
    },
  };
}
