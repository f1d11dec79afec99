// The view of the server for keys with the scope admin: its parts, queues, adapters, quotas and disk. Counts alone.

import { el, statePart, timePart } from "./dom.js";
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
function parts({ server, trainer, api_processes: processes }) {
  const rows = processes.map((process) => part(`API process ${process.id}`, null, process.heartbeat_at));
  const sampling = server.reasons.find((reason) => reason.startsWith("sampling: ")) ?? null;
  rows.unshift(part("inference", sampling, null));
  if (trainer !== null) rows.unshift(part("trainer", trainer.trouble, trainer.heartbeat_at));
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

function waiting(models) {
  return Object.entries(models.waiting).map(([reason, number]) => ({ reason: WAITS[reason] ?? reason, number }));
}

export class BoxView {
  title = "Server";
  #facts = new Facts(
    column("version", (box) => box.server.version),
    column("models with a running command", (box) => count(box.models.running)),
    column("commands that wait", (box) => count(box.models.commands_waiting)),
    column("longest wait began", (box) => box.models.longest_wait_since, time),
    column("adapters that can be sampled", (box) => count(box.adapters.servable)),
    column("adapters that the inference servers run at a time", (box) => count(box.adapters.places)),
    column("starts of the inference server", (box) => count(box.inference.generation)),
    column("free disk", (box) => `${bytes(box.disk.free_bytes)} of ${bytes(box.disk.total_bytes)}`),
    column("database", (box) => bytes(box.database_bytes)),
  );
  #parts = new Table("Parts", [
    column("part", (part) => part.name),
    column("state", (part) => part, { part: statePart }),
    column("last heard of", (part) => part.at, time),
  ], "");
  #vllm = new Table("Inference servers", [
    column("number", (vllm) => count(vllm.replica)),
    column("key-value cache in use", (vllm) => `${number(100 * (vllm.kv_use ?? 0))} %`, numeric),
    column("requests that run", (vllm) => count(vllm.running), numeric),
    column("that wait", (vllm) => count(vllm.waiting), numeric),
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
    column("kind", ([kind]) => kind.toLowerCase()),
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
    this.#vllm.update(box.vllm, (vllm) => vllm.replica);
    this.#waiting.update(waiting(box.models), (line) => line.reason);
    const tables = [[this.#pending, box.pending], [this.#times, box.trainer?.run_s ?? {}]];
    for (const [table, counts] of tables) table.update(Object.entries(counts), ([name]) => name);
    this.#quotas.update(quotas(box.quotas), ([name]) => name);
  }
}
