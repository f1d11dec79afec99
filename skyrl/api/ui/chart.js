// Curves over the steps of a run, drawn by uPlot, which index.html loads: with axes for one run, and small ones in tables.

import { el, setText } from "./dom.js";
import { count, number } from "./words.js";

const { uPlot } = globalThis;
const HEIGHT = 150;
const LEAST_PART = 1e-3; // of the largest value of an axis: the least range that it shows
const SMALL = { width: 80, height: 26 };
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
const plots = new Set();

/** A colour of the style sheet, as it is when something is drawn. */
const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The range of an axis: at least so large that its numbers differ in four digits, as ratios of almost 1 do not. uPlot
 * fails where values differ by less than some 1e-7 of themselves. */
function range(_, low, high) {
  if (low === null) return [null, null];
  if (low === 0 && high === 0) return [0, 1];
  const least = LEAST_PART * Math.max(Math.abs(low), Math.abs(high));
  return high - low < least ? [low - least, high + least] : uPlot.rangeNum(low, high, 0.1, true);
}

function plot(box, options, data) {
  const made = new uPlot({ legend: { show: false }, ...options, scales: { x: { time: false }, y: { range } } }, data, box);
  plots.add(made);
  return made;
}

/** Free the plots that are not on the page any more. */
export function dropOldPlots() {
  for (const each of plots) {
    if (each.root.isConnected) continue;
    each.destroy();
    plots.delete(each);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const each of plots) each.redraw();
});

const curve = (more) => [{}, { stroke: colour("--curve"), width: 1.6, ...more }];
const axis = (more) => ({
  stroke: colour("--soft"), font: "11px system-ui", ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 },
  ...more,
});

/** A number with a small curve below it: set({text, name, steps, values}). A value of null is a gap. */
export function curvePart() {
  const text = el("span");
  const box = el("div", { class: "spark", role: "img" });
  let drawn = null;
  let shown = "[]";
  return {
    element: el("div", {}, text, box),
    set: ({ text: words, name, steps, values }) => {
      setText(text, words);
      const known = values.filter((value) => value !== null);
      box.hidden = known.length < 2;
      const data = JSON.stringify([steps, values]);
      if (box.hidden || data === shown) return;
      shown = data;
      box.setAttribute("aria-label",
        `${name} over ${count(steps.at(-1))} steps, from ${number(known[0])} to ${number(known.at(-1))}`);
      if (drawn !== null) return drawn.setData([steps, values]);
      const hidden = { show: false };
      drawn = plot(box, { ...SMALL, padding: [3, 3, 3, 3], cursor: hidden, axes: [hidden, hidden],
        series: curve({ points: hidden }) }, [steps, values]);
    },
  };
}

/** A curve with axes. It says the value of the last step, of the step under the pointer, or of that which the arrow keys
 * have chosen. */
export class Chart {
  #title;
  #valueOf;
  #steps = [];
  #cursor = null; // index of the step whose value is said; null for the last one
  #chosenByKey = false;
  #plot = null;
  #value = el("span", { class: "value" });
  #box = el("div", { class: "plot", tabindex: "0", role: "img" });

  constructor(title, valueOf) {
    this.#title = title;
    this.#valueOf = valueOf;
    this.element = el("figure", {}, el("figcaption", {}, title, " ", this.#value), this.#box);
    this.#box.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.#box);
  }

  /** A chart is not there while no step has a value for it. */
  update(steps) {
    this.#steps = [...steps];
    this.element.hidden = steps.length > 0 && steps.every((step) => this.#valueOf(step) === null);
    if (this.#cursor !== null && this.#cursor >= steps.length) this.#cursor = null;
    this.#say();
    this.#plot?.setData(this.#data());
    this.#draw();
  }

  #data() {
    return [this.#steps.map((step) => step.step), this.#steps.map(this.#valueOf)];
  }

  /** Draw in the width that there is. */
  #draw() {
    const width = this.#box.clientWidth;
    if (width === 0 || this.#steps.length === 0) return;
    if (this.#plot === null) this.#plot = plot(this.#box, this.#options(width), this.#data());
    else if (this.#plot.width !== width) this.#plot.setSize({ width, height: HEIGHT });
  }

  #options(width) {
    return {
      width, height: HEIGHT,
      cursor: { y: false, drag: { x: false, y: false } },
      hooks: { setCursor: [(drawn) => this.#pointed(drawn.cursor.idx ?? null)] },
      series: curve({ points: { size: 5 } }),
      axes: [
        axis({ size: 24, incrs: STEPS, values: (_, splits) => splits.map((step) => count(step)) }),
        axis({ size: 56, values: (_, splits) => splits.map((value) => number(value)) }),
      ],
    };
  }

  #pointed(index) {
    if (this.#chosenByKey) return;
    this.#cursor = index;
    this.#say();
  }

  #say() {
    const step = this.#cursor === null ? this.#steps.at(-1) : this.#steps[this.#cursor];
    const value = step === undefined ? null : this.#valueOf(step);
    const text = step === undefined ? "no step has ended yet" : `step ${count(step.step)}: ${
      value === null ? "no value" : number(value)}`;
    setText(this.#value, text);
    this.#box.setAttribute("aria-label", `${this.#title}, ${text}. The arrow keys show other steps.`);
  }

  #key(event) {
    const last = this.#steps.length - 1;
    const now = this.#cursor ?? last;
    const places = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last };
    if (!(event.key in places) || this.#plot === null) return;
    event.preventDefault();
    this.#cursor = Math.min(last, Math.max(0, places[event.key]));
    this.#chosenByKey = true; // steps may lie so close that the pointer's step at this place is another
    this.#plot.setCursor({ left: this.#plot.valToPos(this.#steps[this.#cursor].step, "x"), top: 0 });
    this.#chosenByKey = false;
    this.#say();
  }
}
