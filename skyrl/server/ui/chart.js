// One curve over the steps of a run, as SVG: axes, the value under the pointer or the cursor keys, gaps for no value.

import { el, setText } from "./dom.js";
import { count, number } from "./words.js";

const HEIGHT = 150;
const MARGIN = { left: 56, right: 10, top: 8, bottom: 20 };

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** Three to six round numbers between low and high. */
function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => (first + index) * step);
}

export class Chart {
  #title;
  #valueOf;
  #steps = [];
  #cursor = null; // index of the step whose value is shown; null for the last one
  #value = el("span", { class: "value" });
  #drawing = svg("svg", { tabindex: "0", role: "img", height: HEIGHT });

  constructor(title, valueOf) {
    this.#title = title;
    this.#valueOf = valueOf;
    this.element = el("figure", {}, el("figcaption", {}, title, " ", this.#value), this.#drawing);
    this.#drawing.addEventListener("pointermove", (event) => this.#point(event));
    this.#drawing.addEventListener("pointerleave", () => this.#moveTo(null));
    this.#drawing.addEventListener("keydown", (event) => this.#step(event));
    new ResizeObserver(() => this.#draw()).observe(this.#drawing);
  }

  update(steps) {
    this.#steps = [...steps];
    if (this.#cursor !== null && this.#cursor >= steps.length) this.#cursor = null;
    this.#draw();
  }

  #scales() {
    const values = this.#steps.map(this.#valueOf).filter((value) => value !== null);
    if (values.length === 0) return null;
    const least = values.reduce((a, b) => Math.min(a, b));
    const most = values.reduce((a, b) => Math.max(a, b));
    const room = most > least ? (most - least) * 0.05 : Math.abs(most) * 0.1 || 0.05;
    const [low, high] = [least - room, most === 0 && least === 0 ? 1 : most + room];
    const [first, last] = [this.#steps[0].step, Math.max(this.#steps.at(-1).step, this.#steps[0].step + 1)];
    const width = (this.#drawing.clientWidth || 300) - MARGIN.left - MARGIN.right;
    const height = HEIGHT - MARGIN.top - MARGIN.bottom;
    return {
      low, high, first, last, width,
      x: (step) => MARGIN.left + ((step - first) / (last - first)) * width,
      y: (value) => MARGIN.top + ((high - value) / (high - low)) * height,
    };
  }

  #draw() {
    const scales = this.#scales();
    this.#drawing.replaceChildren();
    this.#say();
    if (scales === null) return;
    const { low, high, first, last, width, x, y } = scales;
    for (const value of ticks(low, high)) {
      this.#drawing.append(
        svg("line", { class: "grid", x1: MARGIN.left, x2: MARGIN.left + width, y1: y(value), y2: y(value) }),
        this.#label(number(Number(value.toPrecision(6))), MARGIN.left - 6, y(value) + 4, "end"));
    }
    this.#drawing.append(this.#label(count(first), x(first), HEIGHT - 4, "start"),
      this.#label(count(last), x(last), HEIGHT - 4, "end"), svg("path", { class: "curve", d: this.#path(x, y) }));
    const shown = this.#shown();
    if (this.#cursor !== null && shown?.value != null) {
      this.#drawing.append(
        svg("line", { class: "cursor", x1: x(shown.step), x2: x(shown.step), y1: MARGIN.top, y2: y(low) }),
        svg("circle", { class: "dot", cx: x(shown.step), cy: y(shown.value), r: 3.5 }));
    }
  }

  #path(x, y) {
    let pen = "M";
    let path = "";
    for (const step of this.#steps) {
      const value = this.#valueOf(step);
      if (value === null) {
        pen = "M";
        continue;
      }
      const at = `${x(step.step).toFixed(1)} ${y(value).toFixed(1)}`;
      path += pen === "M" ? `M${at}L${at}` : `L${at}`; // a value alone between two gaps is a dot
      pen = "L";
    }
    return path;
  }

  #label(text, x, y, anchor) {
    const label = svg("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    return label;
  }

  /** The step at the cursor, or the last one, and its value. */
  #shown() {
    const step = this.#cursor === null ? this.#steps.at(-1) : this.#steps[this.#cursor];
    return step === undefined ? null : { step: step.step, value: this.#valueOf(step) };
  }

  #say() {
    const shown = this.#shown();
    const text = shown === null ? "no step has ended yet" : `step ${count(shown.step)}: ${
      shown.value === null ? "no value" : number(shown.value)}`;
    setText(this.#value, text);
    this.#drawing.setAttribute("aria-label", `${this.#title}, ${text}. The arrow keys show other steps.`);
  }

  #moveTo(index) {
    this.#cursor = index;
    this.#draw();
  }

  #point(event) {
    const scales = this.#scales();
    if (scales === null) return;
    const at = event.clientX - this.#drawing.getBoundingClientRect().left;
    const distances = this.#steps.map((step) => Math.abs(scales.x(step.step) - at));
    this.#moveTo(distances.indexOf(distances.reduce((a, b) => Math.min(a, b))));
  }

  #step(event) {
    const last = this.#steps.length - 1;
    const now = this.#cursor ?? last;
    const places = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last };
    if (!(event.key in places) || last < 0) return;
    event.preventDefault();
    this.#moveTo(Math.min(last, Math.max(0, places[event.key])));
  }
}
