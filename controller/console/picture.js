// The picture of the stack: HAProxy, the services in the order of their calls, the GPUs with their holders.

import { html, useLayoutEffect, useRef, useState } from "./lib/preact.js";
import { Replicas, Sparkline, State } from "./parts.js";
import { bytes, count, latest, rate, seconds } from "./words.js";

const MOST_COLUMNS = 8;
const CARDS_GAP = 16; // of the style sheet, between the cards of a column

// The services in columns: each right of all that call it. Circles of calls are cut where they close.
export function columns(rows) {
  const known = new Map(rows.map((row) => [row.name, row]));
  const depth = new Map();
  const visit = (name, at, above) => {
    if (above.includes(name) || (depth.get(name) ?? -1) >= at || at > MOST_COLUMNS) return;
    depth.set(name, at);
    for (const callee of known.get(name).calls) if (known.has(callee)) visit(callee, at + 1, [...above, name]);
  };
  const called = new Set(rows.flatMap((row) => row.calls.filter((callee) => callee !== row.name)));
  for (const row of rows) if (!called.has(row.name)) visit(row.name, 0, []);
  for (const row of rows) if (!depth.has(row.name)) visit(row.name, 0, []);
  const found = [];
  for (const row of rows) (found[depth.get(row.name)] ??= []).push(row);
  return found.filter(Boolean);
}

export function Picture({ shown, traffic }) {
  const rows = [...shown.services.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
  const layers = columns(rows);
  return html`
    <h1 class="hidden">The stack</h1>
    <${Notices} stack=${shown.stack} traffic=${traffic} />
    ${rows.length === 0 && html`<p>${shown.stack.settled ? "No service has an x-serve block." : "The compose files are not read yet."}</p>`}
    <div class="picture">
      <${Arrows} rows=${rows} />
      <section class="column" aria-label="The edge">
        <${Edge} stack=${shown.stack} rows=${rows} traffic=${traffic} />
      </section>
      ${layers.map((layer, number) => html`
        <section class="column" aria-label=${`Services, column ${number + 1}`}>
          ${layer.map((row) => html`<${Card} key=${row.name} row=${row} traffic=${traffic.services[row.name]} />`)}
        </section>`)}
    </div>
    <${Machine} machine=${shown.stack.machine} />
    <${Gpus} stack=${shown.stack} />
    <${Nodes} nodes=${shown.stack.nodes} />`;
}

export function Notices({ stack, traffic }) {
  const found = [...stack.spec_problems.map((problem) => `compose files: ${problem}`), ...stack.notices];
  if (stack.engine_reachable === false) found.push("the Docker Engine does not answer: what is shown is old");
  return html`
    <div role="status">
      ${found.map((notice) => html`<p class="notice bad">${notice}</p>`)}
      ${traffic.problem && html`<p class="notice">no rates and quantiles: ${traffic.problem}</p>`}
    </div>`;
}

const isOpen = (row) => row.route !== null || row.grpc_services.length > 0;

function Edge({ stack, rows, traffic }) {
  const open = rows.filter(isOpen);
  const total = open.reduce((sum, row) => sum + (latest(traffic.services[row.name]?.edge) ?? 0), 0);
  return html`
    <div class="card edge" data-box="haproxy">
      <h2>HAProxy</h2>
      <${State} state=${stack.haproxy_reachable === false ? "UNREACHABLE" : "ready"} />
      <p>${rate(total)} requests/s</p>
      <ul class="quiet">
        ${open.map((row) => html`<li>${[row.route, ...row.grpc_services].filter(Boolean).join(", ")}</li>`)}
      </ul>
    </div>`;
}

function Card({ row, traffic }) {
  return html`
    <a class="card" href=${`#/services/${encodeURIComponent(row.name)}`} data-box=${`service/${row.name}`}>
      <h2>${row.name}</h2>
      <${State} state=${row.state} />
      <p><${Replicas} row=${row} /> ${row.ready}/${row.wanted} ready</p>
      <${Sparkline} values=${traffic?.rate} title="Requests a second in the last 15 minutes" />
      <dl>
        <dt>req/s</dt><dd>${rate(latest(traffic?.rate))}</dd>
        <dt>errors/s</dt><dd class=${latest(traffic?.errors) > 0 ? "bad" : ""}>${rate(latest(traffic?.errors))}</dd>
        <dt>p50</dt><dd>${seconds(latest(traffic?.p50_s))}</dd>
        <dt>p99</dt><dd>${seconds(latest(traffic?.p99_s))}</dd>
        <dt>in flight</dt><dd>${count(row.in_flight)}</dd>
        <dt>waiting</dt><dd>${count(row.waiting)}</dd>
      </dl>
      ${row.summary && html`<p class="summary">${row.summary}</p>`}
    </a>`;
}

// Lines from callers to callees, below the cards; they follow the cards' places.
function Arrows({ rows }) {
  const svg = useRef(null);
  const [lines, setLines] = useState([]);
  useLayoutEffect(() => {
    const picture = svg.current.parentElement;
    const draw = () => setLines(linesIn(picture, rows));
    draw();
    const observer = new ResizeObserver(draw);
    for (const each of [picture, ...picture.querySelectorAll(".card")]) observer.observe(each);
    return () => observer.disconnect();
  }, [rows.map((row) => `${row.name}>${row.calls}${isOpen(row)}`).join()]);
  return html`
    <svg class="arrows" ref=${svg} aria-hidden="true">
      <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" /></marker></defs>
      ${lines.map((path) => html`<path class="line" d=${path} marker-end="url(#tip)" />`)}
    </svg>`;
}

function linesIn(picture, rows) {
  const origin = picture.getBoundingClientRect();
  const box = (name) => picture.querySelector(`[data-box="${CSS.escape(name)}"]`)?.getBoundingClientRect();
  const open = rows.filter(isOpen);
  const calls = [
    ...open.map((row) => ["haproxy", `service/${row.name}`]),
    ...rows.flatMap((row) => row.calls.map((callee) => [`service/${row.name}`, `service/${callee}`])),
  ];
  const cards = [...picture.querySelectorAll(".card")].map((card) => card.getBoundingClientRect());
  return calls.flatMap(([caller, callee]) => {
    const [from, to] = [box(caller), box(callee)];
    if (!from || !to || from.right > to.left) return []; // one above the other, as on a phone
    const between = cards.filter((card) => card.left > from.right && card.right < to.left);
    return [line(from, to, between, origin)];
  });
}

// From a card to one in the next column; past the cards `between`, where one of their columns has room.
function line(from, to, between, origin) {
  const [x1, y1] = [from.right - origin.left, from.top - origin.top + 24];
  const [x2, y2] = [to.left - origin.left - 2, to.top - origin.top + 24];
  if (between.length === 0) return `M${x1} ${y1}${bend(x1, y1, x2, y2)}`;
  const rooms = between
    .map((card) => card.bottom + CARDS_GAP / 2)
    .filter((y) => between.every((card) => y < card.top || y > card.bottom))
    .map((y) => y - origin.top)
    .sort((one, other) => Math.abs(one - y2) - Math.abs(other - y2));
  const enter = Math.min(...between.map((card) => card.left)) - origin.left;
  const leave = Math.max(...between.map((card) => card.right)) - origin.left;
  return `M${x1} ${y1}${bend(x1, y1, enter, rooms[0])}H${leave}${bend(leave, rooms[0], x2, y2)}`;
}

function bend(x1, y1, x2, y2) {
  const half = (x2 - x1) / 2;
  return `C${x1 + half} ${y1} ${x2 - half} ${y2} ${x2} ${y2}`;
}

function Machine({ machine }) {
  if (!machine) return null;
  const used = machine.memory_bytes - machine.free_bytes;
  return html`
    <section class="panel">
      <h2>Machine</h2>
      <dl class="facts">
        <dt>memory</dt>
        <dd><meter aria-label="Memory in use" max=${machine.memory_bytes} high=${machine.memory_bytes * 0.9} value=${used}></meter> ${bytes(machine.free_bytes)} of ${bytes(machine.memory_bytes)} left</dd>
        <dt>cores</dt>
        <dd><meter aria-label="Load" max=${machine.cores} high=${machine.cores * 0.9} value=${machine.load}></meter> ${machine.load.toFixed(1)} of ${machine.cores} busy or waited for</dd>
      </dl>
    </section>`;
}

function Gpus({ stack }) {
  if (!stack.gpus.length) return null;
  return html`
    <section class="panel">
      <h2>GPUs</h2>
      <table>
        <thead><tr><th>GPU</th><th>Node</th><th>Held by</th><th>Memory in use</th></tr></thead>
        <tbody>
          ${stack.gpus.map((gpu) => html`
            <tr key=${gpu.uuid}>
              <th scope="row" title=${gpu.uuid}>${gpu.name || gpu.uuid.slice(0, 12)}</th>
              <td>${gpu.node || "-"}</td>
              <td>${gpu.fault ? html`<span class="bad">${gpu.fault}</span>` : holders(gpu)}</td>
              <td>${gpu.memory_bytes ? html`${bytes(gpu.used_bytes)} of ${bytes(gpu.memory_bytes)}` : "-"}</td>
            </tr>`)}
        </tbody>
      </table>
      ${stack.gpu_memory_problem && html`<p class="quiet">${stack.gpu_memory_problem}</p>`}
    </section>`;
}

function holders(gpu) {
  if (gpu.slots.length) return gpu.slots.map(({ replica, amount }) => html`<span class="slot">${replica}: ${amount}</span> `);
  return gpu.holder || html`<span class="quiet">free</span>`;
}

function Nodes({ nodes }) {
  if (!nodes.length) return null;
  return html`
    <section class="panel">
      <h2>Nodes</h2>
      <table>
        <thead><tr><th>Node</th><th>State</th><th>Replicas</th><th>GPUs</th><th></th></tr></thead>
        <tbody>
          ${nodes.map((node) => html`
            <tr key=${node.name}>
              <th scope="row">${node.name}</th><td><${State} state=${node.state} /> ${node.availability}</td>
              <td>${node.replicas}</td><td>${node.gpus_used}/${node.gpus}</td><td>${node.message}</td>
            </tr>`)}
        </tbody>
      </table>
    </section>`;
}
