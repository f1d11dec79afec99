// The first view: whether anything is stuck, and a tenant's runs, samplers, agent sessions,
// checkpoints and usage.

import { agentTable } from "./agents.js";
import { curvePart } from "./chart.js";
import { el, linkPart, setText, statePart, timePart } from "./dom.js";
import { inShort } from "./health.js";
import { beside, modelTable, withBaseModel } from "./models.js";
import { StuckLine } from "./stuck.js";
import { Table, column } from "./table.js";
import { bytes, count, number, runHref } from "./words.js";

const numeric = { numeric: true };
const maybe = { numeric: true, optional: true };
const kept = { kept: true };
const time = { part: timePart };

/** A column of runs: the value of the last step, and its curve. */
function withCurve(name, key) {
  const value = (run) =>
    ({ text: number(run.last_step?.[key]), name, steps: run.curve.step, values: run.curve[key] });
  return column(name, value, { part: curvePart, kept: true, ...maybe });
}

/** A column of runs: a number of the last step. */
function ofLastStep(name, key) {
  return column(name, (run) => number(run.last_step?.[key]), maybe);
}

const RUN_COLUMNS = [
  column("run", (run) => ({ text: run.name ?? run.id, href: runHref(run.id), more: beside(run.name && run.id, run.base_model) }),
    { part: linkPart }),
  column("state", (run) => run, { part: statePart, kept: true }),
  column("health", (run) => inShort(run.health), { part: statePart, kept: true }),
  column("steps", (run) => count(run.steps), numeric),
  withCurve("loss", "loss"),
  withCurve("gap", "gap"),
  ofLastStep("ratio", "ratio"),
  ofLastStep("learning rate", "learning_rate"),
  ofLastStep("tokens/s", "tokens_per_second"),
  column("last activity", (run) => run.last_request_at, time),
];

const SAMPLER_COLUMNS = [
  column("samples from", (group) => group.run === null
    ? { text: group.base_model, href: "#/", more: "the base model" }
    : { text: group.name ?? group.run, href: runHref(group.run), more: beside(group.name && group.run, group.of) },
  { part: linkPart }),
  column("samplers", (group) => group, { part: samplersPart, kept: true }),
  column("samples in flight", (group) => count(group.in_flight), numeric),
  column("last sample", (group) => group.last_used_at, time),
  column("newest", (group) => group.newest_at, time),
];

/** How many samplers a group has; opened, the newest ones with their ids. */
function samplersPart() {
  const summary = el("summary");
  const list = el("ul");
  let shown = "";
  return {
    element: el("details", {}, summary, list),
    set: ({ open, newest }) => {
      setText(summary, newest.length < open ? `${count(open)}, the newest ${newest.length}` : count(open));
      const ids = newest.map((sampler) => sampler.id).join(" ");
      if (ids === shown) return;
      shown = ids;
      list.replaceChildren(...newest.map((sampler) =>
        el("li", {}, weightsOf(sampler), el("small", {}, sampler.id))));
    },
  };
}

/** The weights of a sampler in few letters: its checkpoint's name or the number of its version. */
function weightsOf({ model_path: path, weights }) {
  if (path !== null) return path.split("/").at(-1);
  return weights === null ? "base model" : `version ${weights.split("@").at(-1)}`;
}

const CHECKPOINT_COLUMNS = [
  column("checkpoint", (saved) => ({ text: nameOfCheckpoint(saved), href: runHref(saved.run), more: saved.path }),
    { part: linkPart }),
  column("size", (saved) => bytes(saved.size_bytes), numeric),
  column("published", (saved) => (saved.public ? "yes" : "no")),
  column("created", (saved) => saved.created_at, { part: timePart, kept: true }),
  column("expires", (saved) => saved.expires_at, { part: timePart, optional: true }),
];

/** `run/kind/name`. */
function nameOfCheckpoint({ path, name, run, kind }) {
  return [name ?? run, kind, path.split("/").at(-1)].join("/");
}

const USAGE_COLUMNS = [
  column("day (UTC)", (line) => line.day),
  column("run", (line) => beside(line.name || line.run || "base model", line.of), kept),
  column("trained", (line) => count(line.trained), numeric),
  column("sampled", (line) => count(line.sampled), numeric),
  column("prompt, asked for", (line) => count(line.prompt + line.cached), numeric),
  column("prompt, computed", (line) => count(line.computed), numeric),
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
  #stuck = new StuckLine();
  #models = modelTable();
  #runs = new Table("Runs", RUN_COLUMNS, "No runs with this key. A run appears when a client creates a model.");
  #samplers = new Table("Samplers", SAMPLER_COLUMNS, "No sampling clients are open.");
  #agents = agentTable();
  #checkpoints = checkpointTable();
  #usage;

  /** `download` saves the answer of a path as a file. */
  constructor(download) {
    const csv = el("button", { type: "button" }, "CSV of a year");
    csv.addEventListener("click", () => download("ui/api/usage?days=366&format=csv", "skyrl-usage.csv"));
    this.#usage = usageTable(csv);
    const tables = [this.#runs, this.#samplers, this.#agents, this.#checkpoints, this.#usage];
    this.element = el("div", {}, el("h1", { tabindex: "-1" }, this.title), this.#stuck.element,
      ...tables.map((table) => table.element));
  }

  path() {
    return "ui/api/state";
  }

  update(state) {
    this.#stuck.update(state);
    this.#showModels(state.server.base_models);
    const rows = (list) => withBaseModel(list, state.server);
    this.#runs.update(rows(state.runs), (run) => run.id);
    this.#samplers.update(rows(state.samplers), (group) => `${group.run} ${group.base_model}`);
    this.#agents.update(state.agents, (session) => session.session_id);
    this.#checkpoints.update(state.checkpoints, (saved) => saved.path);
    this.#usage.update(rows(state.usage).toReversed(), usageKey);
  }

  /** A server with one base model has no such table. */
  #showModels(models) {
    if (models === undefined) return;
    if (!this.#models.element.isConnected) this.#stuck.element.after(this.#models.element);
    this.#models.update(models, (model) => model.name);
  }
}
