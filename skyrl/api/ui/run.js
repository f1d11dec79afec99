// The view of one run: its health, where it stands, its curves, its usage and its checkpoints.

import { Chart } from "./chart.js";
import { el, setText, statePart, timePart } from "./dom.js";
import { HealthBlock } from "./health.js";
import { checkpointTable, usageKey, usageTable } from "./overview.js";
import { Facts, column } from "./table.js";
import { count, number } from "./words.js";

const MAX_STEPS = 4000; // the server keeps about 2,000 steps of a run; with twice as many here, all are asked for anew

const CURVES = [
  ["Reward", (step) => step.reward],
  ["Loss per trained token (nats)", (step) => step.loss],
  ["Gap, trainer to sampler (nats)", (step) => step.gap],
  ["Ratio, trainer to sampler", (step) => step.ratio],
  ["Clip fraction", (step) => step.clip_fraction],
  ["Entropy of samples (nats)", (step) => step.entropy],
  ["Truncated samples", (step) => step.truncated],
  ["Trained tokens per second", (step) => step.tokens_per_second],
  ["Trainer's time (s)", (step) => step.busy_s],
  ["Step time (s)", (step) => step.wall_s],
];

export class RunView {
  title = "Run";
  #id;
  #history = [];
  #charts = CURVES.map(([title, valueOf]) => new Chart(title, valueOf));
  #heading = el("h1", { tabindex: "-1" });
  #state = statePart();
  #health = new HealthBlock();
  #facts = new Facts(
    column("run", (run) => run.id),
    column("base model", (run) => run.base_model),
    column("LoRA rank", (run) => run.lora_rank ? count(run.lora_rank) : "whole model"),
    column("session", (run) => run.session_id),
    column("steps", (run) => count(run.steps)),
    column("learning rate", (run) => number(run.last_step?.learning_rate)),
    column("samples in flight", (run) => count(run.samples_in_flight)),
    column("last activity", (run) => run.last_request_at, { part: timePart }),
    column("created", (run) => run.created_at, { part: timePart }),
  );
  #checkpoints = checkpointTable();
  #usage = usageTable();

  constructor(id) {
    this.#id = id;
    setText(this.#heading, id);
    const charts = el("section", {}, el("h2", {}, "Curves, by step"),
      el("div", { class: "charts" }, ...this.#charts.map((chart) => chart.element)));
    const parts = [this.#facts, { element: charts }, this.#checkpoints, this.#usage].map((part) => part.element);
    this.element = el("div", {}, this.#heading, this.#health.element, el("p", {}, this.#state.element), ...parts);
    this.#draw();
  }

  path() {
    const last = this.#history.at(-1);
    return `ui/api/runs/${encodeURIComponent(this.#id)}?after=${last === undefined ? 0 : last.step}`;
  }

  update(run) {
    this.title = run.name ?? run.id;
    setText(this.#heading, this.title);
    this.#state.set(run);
    this.#health.update(run.health);
    this.#facts.update(run);
    this.#checkpoints.update(run.checkpoints, (saved) => saved.path);
    this.#usage.update(run.usage.toReversed(), usageKey);
    if (run.history.length > 0) {
      this.#history.push(...run.history);
      this.#draw();
      if (this.#history.length > MAX_STEPS) this.#history = [];
    }
  }

  #draw() {
    for (const chart of this.#charts) chart.update(this.#history);
  }
}
