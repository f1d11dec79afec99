// How the page writes numbers, sizes and times. Knows no elements.

let skewMs = 0;

/** Keep the server's clock in step: times in its answers are compared with it, not with the browser's clock. */
export function setServerDate(date) {
  const at = Date.parse(date ?? "");
  if (!Number.isNaN(at)) skewMs = at - Date.now();
}

export const NONE = "–";

/** A measured value with four digits. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size >= 1000) return count(Math.round(value));
  if (size > 0 && size < 1e-4) return Number(value.toPrecision(4)).toExponential();
  return String(Number(value.toPrecision(4)));
}

/** A whole number. */
export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${power === 0 ? value : value.toPrecision(3)} ${units[power]}`;
}

function duration(seconds) {
  if (seconds < 120) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 120 * 60) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** `at` is in seconds since the epoch of the server's clock. */
export function relative(at) {
  if (at === null || at === undefined) return NONE;
  const age = (Date.now() + skewMs) / 1000 - at;
  return age < -1 ? `in ${duration(-age)}` : `${duration(age)} ago`;
}

/** The time since `atMs` of the browser's clock. */
export function since(atMs) {
  return duration((Date.now() - atMs) / 1000);
}

export function absolute(at) {
  return at === null || at === undefined ? "" : new Date(at * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

/** The address of a run's view. */
export function runHref(id) {
  return `#/runs/${encodeURIComponent(id)}`;
}
