// The view of the server for keys with the scope admin: its parts, queues, adapters, quotas and disk. Counts alone.

import { el, statePart, timePart } from "./dom.js";
import { beside, modelsOf, total } from "./models.js";
import { Facts, Table, column } from "./table.js";
import { bytes, count, number } from "./words.js";

const numeric = { numeric: true };
const time = { part: timePart };

const WAITS = {
  turn: "their turn",
  gap: "a command that has not arrived",
  quota: "tokens of their tenant's quota",
  recovery: "being restored after the trainer's restart",
  store: "the checkpoint store",
  memory: "memory to be restored",
};

/** The parts of the server as rows of a table. */
function parts(box) {
  const processes = box.api_processes.map((process) => part(`API process ${process.id}`, null, process.heartbeat_at));
  return [...modelsOf(box).flatMap(partsOfModel), ...processes];
}

function partsOfModel({ name, reasons, trainer }) {
  const sampling = reasons.find((reason) => reason.startsWith("sampling: ")) ?? null;
  const rows = [part(beside("inference", name), sampling, null)];
  if (trainer !== null) rows.unshift(part(beside("trainer", name), trainer.trouble, trainer.heartbeat_at));
  return rows;
}

function part(name, trouble, at) {
  return { name, state: trouble === null ? "ready" : "not ready", sentence: trouble ?? "", at };
}

function quotas({ refused, ...counts }) {
  const refusals = Object.entries(refused).map(([quota, number]) => [`requests refused, ${quota}`, number]);
  return [
    ["requests that had to wait for tokens", counts.paused],
    ["samples that wait for tokens now", counts.waiting],
    ["tenants with quotas of their own", counts.exceptions],
    ...refusals,
  ];
}

/** Each reason for which models wait, with the number of models. */
function waiting(box) {
  const reasons = new Set(modelsOf(box).flatMap(({ models }) => Object.keys(models.waiting)));
  const number = (reason) => total(box, ({ models }) => models.waiting[reason] ?? 0);
  return [...reasons].map((reason) => ({ reason: WAITS[reason] ?? reason, number: number(reason) }));
}

/** The trainer's mean seconds by kind of command. */
function meanTimes(trainer) {
  return Object.entries(trainer?.run_s ?? {}).map(([kind, seconds]) => [kind.toLowerCase(), seconds]);
}

/** When the longest wait began; null without one. */
function longestWait(box) {
  const begins = modelsOf(box).map(({ models }) => models.longest_wait_since).filter((at) => at !== null);
  return begins.length === 0 ? null : Math.min(...begins);
}

/** Lines that each base model has: `linesOf` gives those of one, with a name that its other lines have not. */
function linesOfModels(box, linesOf) {
  return modelsOf(box).flatMap((model) => linesOf(model).map(([name, value]) => [beside(name, model.name), value]));
}

export class BoxView {
  title = "Server";
  #facts = new Facts(
    column("version", (box) => box.server.version),
    column("models with a running command", (box) => count(total(box, ({ models }) => models.running))),
    column("commands that wait", (box) => count(total(box, ({ models }) => models.commands_waiting))),
    column("longest wait began", longestWait, time),
    column("adapters that can be sampled", (box) => count(total(box, ({ adapters }) => adapters.servable))),
    column("adapters that the inference servers run at a time", (box) => count(total(box, ({ adapters }) => adapters.places))),
    column("starts of the inference server", (box) => count(total(box, ({ inference }) => inference.generation))),
    column("samples that wait to be sent to them", (box) => count(box.held_back)),
    column("free disk", (box) => `${bytes(box.disk.free_bytes)} of ${bytes(box.disk.total_bytes)}`),
    column("database", (box) => bytes(box.database_bytes)),
  );
  #parts = new Table("Parts", [
    column("part", (part) => part.name),
    column("state", (part) => part, { part: statePart }),
    column("last heard of", (part) => part.at, time),
  ], "");
  #vllm = new Table("Inference servers", [
    column("number", ([name]) => name),
    column("key-value cache in use", ([, vllm]) => `${number(100 * (vllm.kv_use ?? 0))} %`, numeric),
    column("requests that run", ([, vllm]) => count(vllm.running), numeric),
    column("that wait", ([, vllm]) => count(vllm.waiting), numeric),
    column("for what", ([, vllm]) => (vllm.why ?? []).join("; ")),
  ], "skyrl runs none, or none has told its numbers yet.");
  #pending = new Table("Requests that have not ended", [
    column("kind", ([kind]) => kind.toLowerCase()),
    column("requests", ([, number]) => count(number), numeric),
  ], "None.");
  #waiting = new Table("Models whose next command waits", [
    column("for", (line) => line.reason),
    column("models", (line) => count(line.number), numeric),
  ], "None.");
  #times = new Table("Trainer's time for a command", [
    column("kind", ([kind]) => kind),
    column("mean seconds", ([, seconds]) => number(seconds), numeric),
  ], "No command has run yet.");
  #quotas = new Table("Quotas, in this API process", [
    column("what", ([name]) => name),
    column("count", ([, number]) => count(number), numeric),
  ], "");

  constructor() {
    const shown = [this.#parts, this.#facts, this.#vllm, this.#pending, this.#waiting, this.#times, this.#quotas];
    this.element = el("div", {}, el("h1", { tabindex: "-1" }, this.title), ...shown.map((part) => part.element));
  }

  path() {
    return "ui/api/box";
  }

  update(box) {
    this.#facts.update(box);
    this.#parts.update(parts(box), (part) => part.name);
    this.#waiting.update(waiting(box), (line) => line.reason);
    const named = [
      [this.#vllm, linesOfModels(box, ({ vllm }) => vllm.map((each) => [count(each.replica), each]))],
      [this.#times, linesOfModels(box, ({ trainer }) => meanTimes(trainer))],
      [this.#pending, Object.entries(box.pending)],
      [this.#quotas, quotas(box.quotas)],
    ];
    for (const [table, lines] of named) table.update(lines, ([name]) => name);
  }
}
