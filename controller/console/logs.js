// The replicas' logs: the last lines, followed while the box is ticked.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { call } from "./api.js";
import { usePolling } from "./polling.js";

const EVERY_MS = 1500;
const REPLICA_MS = 75; // of many replicas, each is asked no more often than this allows
const TAIL = 300;
const OVERLAP_S = 5;
const MOST_LINES = 1000;
const GAP = "Lines are missing: replicas log more than is sent at a time.";

export function Logs({ service }) {
  const [replica, setReplica] = useState("");
  const [words, setWords] = useState("");
  const [isFollowed, setFollowed] = useState(true);
  const { logs, problem } = useLogs(service, replica, isFollowed);
  const box = useRef(null);
  const lines = logs
    .filter(({ name }) => !replica || name === replica)
    .flatMap(({ name, lines, times }) => lines.map((line, number) => ({ name, line, time: times[number] })))
    .filter(({ line }) => line.toLowerCase().includes(words.toLowerCase()))
    .sort((one, other) => (one.time < other.time ? -1 : 1))
    .slice(-MOST_LINES);
  useEffect(() => {
    if (isFollowed) box.current.scrollTop = box.current.scrollHeight;
  });
  return html`
    <div class="row">
      <label>Replica <select value=${replica} onChange=${(event) => setReplica(event.target.value)}>
        <option value="">all</option>${logs.map(({ name }) => html`<option value=${name}>${name}</option>`)}
      </select></label>
      <label>Filter <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
      <label><input type="checkbox" checked=${isFollowed} onChange=${(event) => setFollowed(event.target.checked)} /> follow</label>
      ${problem && html`<span class="bad" role="status">${problem}</span>`}
      ${!problem && logs.some(({ hasGap }) => hasGap) && html`<span class="quiet" role="status">${GAP}</span>`}
    </div>
    <pre class="text log" ref=${box} tabindex="0" role="region" aria-label=${`Logs of ${service}`}>${lines.map(({ name, line }) => html`
<span class="quiet">${name.slice(-6)} </span>${readable(line)}${"\n"}`)}</pre>`;
}

// The first answer has the last lines of each replica, later ones what is new; OVERLAP_S is what `pierhead logs -f` has.
function useLogs(service, replica, isFollowed) {
  const [found, setFound] = useState({ logs: [], asked: 0, at: 0, of: "", problem: "" });
  const at = useRef(0);
  at.current = found.of === replica ? found.at : 0; // another choice begins with the last lines
  const ask = () => {
    const since = at.current && Math.max(0, Math.floor(at.current - OVERLAP_S));
    const after = since ? `&after=${since}` : "";
    const only = replica ? `&replica=${encodeURIComponent(replica)}` : "";
    const tail = replica || !at.current ? TAIL : MOST_LINES;
    const path = `/api/v1/services/${encodeURIComponent(service)}/logs?tail=${tail}${after}${only}`;
    return call("GET", path).then((answer) => ({ ...answer, since })).catch((error) => ({ problem: error.message }));
  };
  const take = ({ problem, replicas, at: now, since }) =>
    setFound((before) => (problem ? { ...before, problem } : { logs: joined(before.logs, replicas, since), asked: replicas.length, at: now, of: replica, problem: "" }));
  const everyMs = replica ? EVERY_MS : Math.max(EVERY_MS, REPLICA_MS * found.asked);
  usePolling(ask, take, everyMs, isFollowed, [service, replica, isFollowed]);
  return found;
}

// The logs with the lines that are later than those that are known, asked for `since` a unix time. Replicas that have gone
// keep theirs.
function joined(known, fresh, since) {
  const from = new Date(since * 1000).toISOString().slice(0, 19);
  const logs = new Map(known.map((log) => [log.name, log]));
  for (const { name, lines, times } of fresh) {
    const before = logs.get(name) ?? { name, lines: [], times: [] };
    const last = before.times.at(-1);
    const first = last === undefined ? 0 : times.findIndex((time) => time > last);
    const hasGap = first === 0 && last >= from; // the answer should have had the last line that is known
    if (first < 0) logs.set(name, { ...before, hasGap });
    else logs.set(name, {
      name,
      hasGap,
      lines: [...before.lines, ...lines.slice(first)].slice(-MOST_LINES),
      times: [...before.times, ...times.slice(first)].slice(-MOST_LINES),
    });
  }
  return [...logs.values()];
}

// A line in JSON with a level, as people read it; every other line as it is.
function readable(line) {
  if (!line.startsWith("{")) return line;
  try {
    const { time, level, message, error, request_id: id } = JSON.parse(line);
    if (typeof level !== "string") return line;
    const at = typeof time === "string" ? time.slice(11, 19) : "";
    return [at, level.toUpperCase(), id && `[${id}]`, message, error && `\n${error}`].filter(Boolean).join(" ");
  } catch {
    return line;
  }
}
