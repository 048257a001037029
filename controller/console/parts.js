// Small parts that several pages show.

import { html, useEffect, useRef } from "./lib/preact.js";

const LOOKS = {
  good: ["HEALTHY", "RUNNING", "ready", "ok"],
  busy: ["UPDATING", "UPSCALING", "DOWNSCALING", "PENDING", "STARTING", "DRAINING", "STOPPING", "warning"],
  quiet: ["ASLEEP", "info"],
};
export const ROLES = ["read", "scale", "deploy", "admin"];
export const may = (role, needed) => ROLES.indexOf(role) >= ROLES.indexOf(needed);

export function lookOf(state) {
  return Object.keys(LOOKS).find((look) => LOOKS[look].includes(state)) ?? "bad";
}

export function State({ state }) {
  return html`<span class=${`state ${lookOf(state)}`}>${state}</span>`;
}

// One mark for each replica. The words are for those who do not see them.
export function Replicas({ row }) {
  const counts = {};
  for (const { state } of row.replicas) counts[state] = (counts[state] ?? 0) + 1;
  const words = Object.entries(counts).map(([state, number]) => `${number} ${state.toLowerCase()}`).join(", ");
  return html`
    <span class="marks" role="img" aria-label=${words || "no replica"}>
      ${row.replicas.slice(0, 60).map(({ name, state, message }) => html`
        <i class=${lookOf(state)} title=${`${name || "not there yet"}: ${state}${message ? `, ${message}` : ""}`}></i>`)}
      ${row.replicas.length > 60 ? html`<small>+${row.replicas.length - 60}</small>` : null}
    </span>`;
}

// A line of the last minutes, as wide as its place. Gaps are where nothing is known.
export function Sparkline({ values, title }) {
  const known = (values ?? []).filter((value) => value != null);
  if (known.length < 2) return html`<svg class="spark" role="img" aria-label=${`${title}: no numbers`}></svg>`;
  const top = Math.max(...known, 1e-9);
  let path = "";
  let isDown = false;
  values.forEach((value, place) => {
    if (value != null) {
      path += `${isDown ? "L" : "M"}${((100 * place) / (values.length - 1)).toFixed(1)} ${(22 - (20 * value) / top).toFixed(1)}`;
    }
    isDown = value != null;
  });
  return html`
    <svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${title}>
      <path d=${path} vector-effect="non-scaling-stroke" />
    </svg>`;
}

// A dialog of the browser: Escape closes it, and the focus goes back.
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const shown = dialog.current;
    shown.showModal();
    return () => shown.close();
  }, []);
  return html`
    <dialog ref=${dialog} onClose=${onClose} aria-label=${title}>
      <h2>${title}</h2>
      ${children}
    </dialog>`;
}
