// A rollout: the one in progress, or the last one, as a line in time.

import { html, useState } from "./lib/preact.js";
import { call } from "./api.js";
import { State } from "./parts.js";
import { usePolling } from "./polling.js";
import { age, clock, now } from "./words.js";

const EVERY_MS = 3000;
const PHASES = [
  ["plan, shift", ["rollout", "rollback"]],
  ["start", ["start_container"]],
  ["ready", ["replica_ready"]],
  ["drain", ["begin_retirement"]],
  ["removed", ["remove_container"]],
  ["end", ["rolled_out", "rolled_back"]],
];
const SAID = [...PHASES[0][1], ...PHASES.at(-1)[1]];
const KINDS = PHASES.flatMap(([, kinds]) => kinds).join();

export function Rollout({ row }) {
  const { rollout, rejected } = row;
  const events = useRolloutEvents(row);
  if (!rollout && !rejected && !events.length) return null;
  return html`
    <section class="panel">
      <h2>${rollout ? "Rollout" : "Last rollout"}</h2>
      ${rollout && html`
        <p><${State} state="UPDATING" /> ${rollout.from ?? "nothing"} to ${rollout.to}: ${rollout.progress}</p>
        <p>${rollout.message} Begun ${age(rollout.begun_at)} ago, in this phase for ${age(rollout.since)}: ${rollout.cause}</p>
        <progress aria-label="Ready replicas" max=${rollout.wanted || 1} value=${rollout.ready}></progress>`}
      ${rejected && html`<p class="bad">${rejected.version} does not run: ${rejected.reason}</p>`}
      ${row.changes.length > 0 && html`<pre tabindex="0" class="text">${row.changes.join("\n")}</pre>`}
      ${events.length > 0 && html`<${Line} events=${events} isOver=${!rollout} />`}
    </section>`;
}

// The events of the rollout in progress, or of the last one, the oldest first.
function useRolloutEvents(row) {
  const [events, setEvents] = useState([]);
  const path = `/api/v1/events?limit=500&service=${encodeURIComponent(row.name)}&kind=${KINDS}`;
  const ask = () => call("GET", path).then(({ events }) => ({ events }), () => null);
  usePolling(ask, ({ events }) => setEvents(events), EVERY_MS, true, [row.name, row.rollout?.phase]);
  if (row.rollout) return events.filter(({ at }) => at >= row.rollout.begun_at - 1);
  const ends = events.flatMap(({ kind }, place) => (PHASES.at(-1)[1].includes(kind) ? [place] : []));
  if (!ends.length) return [];
  const since = (ends.at(-2) ?? -1) + 1;
  const first = events.findIndex(({ kind }, place) => place >= since && SAID.includes(kind));
  const found = events.slice(first, ends.at(-1) + 1);
  const drained = new Set(found.filter(({ kind }) => kind === "begin_retirement").map(({ target }) => target));
  const after = events.slice(ends.at(-1) + 1).filter(({ kind, target }) => kind === "remove_container" && drained.has(target));
  return [...found, ...after];
}

function Line({ events, isOver }) {
  const first = events[0].at;
  const last = isOver ? events.at(-1).last_at : now();
  const place = (at) => `${(3 + (94 * (at - first)) / Math.max(last - first, 1)).toFixed(2)}%`;
  return html`
    <dl class="phases">
      ${PHASES.map(([phase, kinds]) => {
        const own = events.filter(({ kind }) => kinds.includes(kind));
        return html`
          <dt>${phase}</dt>
          <dd><svg role="img" aria-label=${own.length ? `${phase}: ${own.map(({ at }) => clock(at)).join(", ")}` : `${phase}: not yet`}>
            <line x1="1%" x2="99%" y1="50%" y2="50%" />
            ${own.map(({ at, outcome, message }) => html`<circle class=${outcome} cx=${place(at)} cy="50%" r="5"><title>${clock(at)} ${message}</title></circle>`)}
          </svg></dd>`;
      })}
      <dt></dt><dd class="ends"><span>${clock(first)}</span><span>${isOver ? clock(last) : "now"}</span></dd>
    </dl>
    <ol class="events">
      ${events.filter(({ kind }) => SAID.includes(kind)).map(({ seq, at, message, outcome }) => html`
        <li key=${seq}><time datetime=${new Date(at * 1000).toISOString()}>${clock(at)}</time><${State} state=${outcome} /><span class="message">${message}</span></li>`)}
    </ol>`;
}
