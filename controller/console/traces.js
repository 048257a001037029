// Requests that failed, were slow or are in the sample, and the way of each through the stack: #/traces, #/traces/<id>.

import { html, useState } from "./lib/preact.js";
import { call } from "./api.js";
import { usePolling } from "./polling.js";
import { clock, seconds } from "./words.js";

const EVERY_MS = 5000;
const WIDTH = 1000;
const NOTHING = { traces: null, silent: [], problem: "" };
const WHY = { failed: "bad", slow: "busy", sampled: "quiet" };

export function Traces({ services }) {
  const [service, setService] = useState("");
  const [words, setWords] = useState("");
  const { traces, silent, problem } = useTraces(service ? `&service=${encodeURIComponent(service)}` : "");
  const wanted = words.toLowerCase();
  const found = (traces ?? []).filter(({ name, request, trace, status }) =>
    `${name} ${request} ${trace} ${status}`.toLowerCase().includes(wanted));
  return html`
    <h1>Traces</h1>
    <p class="quiet">The last requests of each replica that failed, were slow or are in the sample.</p>
    <div class="row">
      <label>Service <select value=${service} onChange=${(event) => setService(event.target.value)}>
        <option value="">all</option>${services.map((name) => html`<option>${name}</option>`)}
      </select></label>
      <label>Filter <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
    </div>
    <${Problems} problem=${problem} silent=${silent} />
    ${traces && found.length === 0 ? html`<p class="quiet">Nothing.</p>` : null}
    ${found.length > 0 && html`
      <div class="scroll"><table>
        <thead><tr><th scope="col">When</th><th scope="col">Request</th><th scope="col">Service</th><th scope="col">Kept as</th>
          <th scope="col">Result</th><th scope="col">Took</th><th scope="col">Id</th></tr></thead>
        <tbody>${found.map((trace) => html`
          <tr key=${trace.trace}>
            <td>${clock(trace.began)}</td>
            <th scope="row"><a href=${`#/traces/${trace.trace}`}>${trace.name}</a></th>
            <td>${trace.service}</td>
            <td><span class=${`state ${WHY[trace.parts[0].why] ?? "quiet"}`}>${trace.parts[0].why}</span></td>
            <td>${trace.status}</td><td>${seconds(trace.seconds)}</td><td>${trace.request}</td>
          </tr>`)}</tbody>
      </table></div>`}`;
}

// One request, by the id of its trace or its own: a line for each span, below the one that it belongs to.
export function TraceView({ id }) {
  const { traces, silent, problem } = useTraces(`&trace=${encodeURIComponent(id)}`);
  const trace = traces?.[0];
  return html`
    <h1>${trace ? trace.name : "Trace"}</h1>
    <p><a href="#/traces">All traces</a></p>
    <${Problems} problem=${problem} silent=${silent} />
    ${traces && !trace
      ? html`<p>No replica keeps the trace ${id}. Each keeps the last ones; those in the sample also go to the collector.</p>` : null}
    ${trace && html`<${Waterfall} trace=${trace} />`}`;
}

function Problems({ problem, silent }) {
  return html`
    ${problem && html`<p class="bad" role="status">${problem}</p>`}
    ${silent.length > 0 && html`<p class="quiet">Did not say what they keep: ${silent.join(", ")}</p>`}`;
}

function useTraces(query) {
  const [found, setFound] = useState(NOTHING);
  const ask = () =>
    call("GET", `/api/v1/traces?limit=100${query}`).catch((error) => ({ problem: error.message }));
  const take = (answer) => setFound((before) => (answer.problem ? { ...before, problem: answer.problem } : { ...answer, problem: "" }));
  usePolling(ask, take, EVERY_MS, true, [query]);
  return found;
}

function Waterfall({ trace }) {
  const lines = linesOf(trace);
  const begin = Math.min(...lines.map(({ began }) => began));
  const length = Math.max(...lines.map(({ began, seconds: taken }) => began + taken)) - begin || 1e-6;
  const place = (at) => (WIDTH * (at - begin)) / length;
  return html`
    <dl class="facts">
      <dt>Request</dt><dd>${trace.request}</dd><dt>Trace</dt><dd>${trace.trace}</dd>
      <dt>Began</dt><dd>${clock(trace.began)}</dd><dt>Took</dt><dd>${seconds(trace.seconds)}</dd>
      <dt>Result</dt><dd>${trace.status}</dd>
    </dl>
    <div class="scroll"><table class="waterfall">
      <thead><tr><th scope="col">What</th><th scope="col">Where</th><th scope="col">Begins after</th><th scope="col">Takes</th>
        <th scope="col">Result</th><th scope="col" class="bars">Time</th></tr></thead>
      <tbody>${lines.map((line) => html`<${Line} key=${line.span} line=${line} begin=${begin} place=${place} />`)}</tbody>
    </table></div>
    ${trace.parts.some((part) => part.left_out > 0) &&
      html`<p class="quiet">Of a request, a replica keeps the first 64 spans; further ones are not shown.</p>`}`;
}

function Line({ line, begin, place }) {
  const isBad = !["OK", "not ended"].includes(line.status) && !/^[123]\d\d$/.test(line.status);
  const facts = [
    ...Object.entries(line.attributes).map(([name, value]) => `${name}: ${value}`),
    ...line.events.map(({ at, name, detail }) => `after ${seconds(at - begin)} ${name}${detail ? ` (${detail})` : ""}`),
  ];
  return html`
    <tr>
      <th scope="row" class=${`depth-${Math.min(line.depth, 8)}`}>${line.name}
        ${facts.length > 0 && html`<ul class="quiet">${facts.map((fact) => html`<li>${fact}</li>`)}</ul>`}
        ${line.links.map((link) => html`<a class="quiet" href=${`#/traces/${link}`}>together with ${link.slice(0, 8)}</a> `)}</th>
      <td>${line.where}</td><td>${seconds(line.began - begin)}</td><td>${seconds(line.seconds)}</td>
      <td class=${isBad ? "bad" : ""}>${line.status}</td>
      <td class="bars"><svg viewBox=${`0 0 ${WIDTH} 20`} preserveAspectRatio="none" aria-hidden="true">
        <rect class=${`${line.kind} ${isBad ? "failed" : ""}`} x=${place(line.began)} y="3"
          width=${Math.max(2, place(line.began + line.seconds) - place(line.began))} height="14" />
        ${line.events.map(({ at }) => html`<line x1=${place(at)} x2=${place(at)} y1="0" y2="20" />`)}
      </svg></td>
    </tr>`;
}

// Every span with its depth, in the order in which a tree of them is read. A parent that nobody keeps leaves a root.
export function linesOf(trace) {
  const spans = trace.parts.flatMap((part) => [
    { ...part, kind: "server", where: part.replica, attributes: {}, events: [], links: [] },
    ...part.spans.map((span) => ({ ...span, where: span.kind === "proxy" ? "HAProxy" : part.replica })),
  ]);
  const known = new Set(spans.map(({ span }) => span));
  const under = Map.groupBy(spans, ({ span, parent }) => (known.has(parent) && parent !== span ? parent : ""));
  const lines = [];
  const seen = new Set();
  const add = (parent, depth) => {
    for (const span of (under.get(parent) ?? []).sort((one, other) => one.began - other.began)) {
      if (seen.has(span.span)) continue;
      seen.add(span.span);
      lines.push({ ...span, depth });
      add(span.span, depth + 1);
    }
  };
  add("", 0);
  return lines;
}
