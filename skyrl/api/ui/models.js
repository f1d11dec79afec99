// Base models: the table of a server with several, and what the view of the server shows of each and of all.

import { statePart } from "./dom.js";
import { Table, column } from "./table.js";

/** The state of a server or of a base model, and why it is not ready. A server is degraded if some base models are not ready. */
export function readiness({ ready, reasons, base_models: models = [] }) {
  const degraded = models.some((model) => !model.ready);
  return { state: !ready ? "not ready" : degraded ? "degraded" : "ready", sentence: reasons.join("; ") };
}

export function modelTable() {
  return new Table("Base models", [
    column("base model", (model) => model.name),
    column("state", readiness, { part: statePart }),
    column("used for", (model) => (model.uses.includes("train") ? "training and sampling" : "sampling")),
  ], "");
}

/** The rows, each with the base model `of` which it is; where a server has one, that is said nowhere. */
export function withBaseModel(rows, server) {
  return server.base_models === undefined ? rows : rows.map((row) => ({ ...row, of: row.base_model }));
}

/** Texts that are there, side by side. */
export function beside(...texts) {
  return texts.filter(Boolean).join(" · ");
}

/** The parts of each base model in the view of the server. The only base model of a server has no name there. */
export function modelsOf(box) {
  return box.base_models ?? [{ ...box, name: "", reasons: box.server.reasons }];
}

/** The sum of a number of each base model; null if none has it. */
export function total(box, valueOf) {
  const values = modelsOf(box).map(valueOf).filter((value) => value !== null);
  return values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0);
}
