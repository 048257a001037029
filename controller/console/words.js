// Numbers and times as people read them. "-" where something is not known.

export function rate(value) {
  if (value == null) return "-";
  if (value > 0 && value < 0.1) return value.toFixed(3);
  return value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export function seconds(value) {
  if (value == null) return "-";
  if (value < 0.001) return `${(value * 1000).toFixed(2)} ms`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

export function bytes(value) {
  if (value == null) return "-";
  const steps = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = Math.min(steps.length - 1, Math.floor(Math.log2(Math.max(value, 1)) / 10));
  return `${(value / 2 ** (10 * step)).toFixed(step > 2 ? 1 : 0)} ${steps[step]}`;
}

export function count(value) {
  return value == null ? "-" : Math.round(value).toLocaleString("en");
}

export function share(value) {
  return value == null ? "-" : `${Math.round(100 * value)} %`;
}

export function clock(unix) {
  const at = new Date(unix * 1000);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString()} `;
  return day + at.toLocaleTimeString([], { hour12: false });
}

let ahead = 0; // seconds by which the controller's clock is ahead of the browser's

// `date`: what the controller says that it is now, to the second.
export function setClock(date) {
  const found = (Date.parse(date) - Date.now()) / 1000;
  if (Number.isFinite(found)) ahead = Math.abs(found) < 5 ? 0 : found;
}

// Unix seconds, by the controller's clock: its times are compared with no other.
export const now = () => Date.now() / 1000 + ahead;

export function age(unix) {
  const past = Math.max(0, now() - unix);
  if (past < 120) return `${Math.round(past)} s`;
  if (past < 7200) return `${Math.round(past / 60)} min`;
  return past < 172800 ? `${Math.round(past / 3600)} h` : `${Math.round(past / 86400)} days`;
}

export const latest = (values) => values?.at(-1);
