// The first view: a tenant's runs, samplers, checkpoints and usage.

import { el, linkPart, statePart, timePart } from "./dom.js";
import { Table, column } from "./table.js";
import { bytes, count, number } from "./words.js";

const numeric = { numeric: true };
const time = { part: timePart };

/** The address of a run's view. */
function runHref(id) {
  return `#/runs/${encodeURIComponent(id)}`;
}

const RUN_COLUMNS = [
  column("run", (run) => ({ text: run.name ?? run.id, href: runHref(run.id), more: run.name === null ? "" : run.id }),
    { part: linkPart }),
  column("state", (run) => run, { part: statePart }),
  column("steps", (run) => count(run.steps), numeric),
  column("loss", (run) => number(run.last_step?.loss), numeric),
  column("gap", (run) => number(run.last_step?.gap), numeric),
  column("clip fraction", (run) => number(run.last_step?.clip_fraction), numeric),
  column("tokens/s", (run) => number(run.last_step?.tokens_per_second), numeric),
  column("samples in flight", (run) => count(run.samples_in_flight), numeric),
  column("last activity", (run) => run.last_request_at, time),
];

const SAMPLER_COLUMNS = [
  column("sampler", (sampler) => sampler.id),
  column("samples from", (sampler) => sampler.model_path ?? sampler.weights ?? sampler.base_model),
  column("samples in flight", (sampler) => count(sampler.in_flight), numeric),
  column("last sample", (sampler) => sampler.last_used_at, time),
  column("created", (sampler) => sampler.created_at, time),
];

const CHECKPOINT_COLUMNS = [
  column("checkpoint", (saved) => saved.path),
  column("size", (saved) => bytes(saved.size_bytes), numeric),
  column("published", (saved) => (saved.public ? "yes" : "no")),
  column("created", (saved) => saved.created_at, time),
  column("expires", (saved) => saved.expires_at, time),
];

const USAGE_COLUMNS = [
  column("day (UTC)", (line) => line.day),
  column("run", (line) => line.run || "base model"),
  column("trained", (line) => count(line.trained), numeric),
  column("sampled", (line) => count(line.sampled), numeric),
  column("prompt", (line) => count(line.prompt), numeric),
  column("prompt, cached", (line) => count(line.cached), numeric),
];

export function checkpointTable() {
  return new Table("Checkpoints", CHECKPOINT_COLUMNS, "No checkpoints.");
}

export function usageTable(...controls) {
  return new Table("Tokens of the last 7 days", USAGE_COLUMNS, "No tokens yet.", ...controls);
}

export const usageKey = (line) => `${line.day} ${line.run} ${line.base_model}`;

export class OverviewView {
  title = "Your runs";
  #runs = new Table("Runs", RUN_COLUMNS, "No runs with this key. A run appears when a client creates a model.");
  #samplers = new Table("Samplers", SAMPLER_COLUMNS, "No sampling clients are open.");
  #checkpoints = checkpointTable();
  #usage;

  /** `download` saves the answer of a path as a file. */
  constructor(download) {
    const csv = el("button", { type: "button" }, "CSV of a year");
    csv.addEventListener("click", () => download("ui/api/usage?days=366&format=csv", "skyrl-usage.csv"));
    this.#usage = usageTable(csv);
    const tables = [this.#runs, this.#samplers, this.#checkpoints, this.#usage];
    this.element = el("div", {}, el("h1", { tabindex: "-1" }, this.title), ...tables.map((table) => table.element));
  }

  path() {
    return "ui/api/state";
  }

  update(state) {
    this.#runs.update(state.runs, (run) => run.id);
    this.#samplers.update(state.samplers, (sampler) => sampler.id);
    this.#checkpoints.update(state.checkpoints, (saved) => saved.path);
    this.#usage.update(state.usage.toReversed(), usageKey);
  }
}
