// One service: why it is in its state, its replicas, its traffic, its logs, and what can be changed.

import { html, useMemo } from "./lib/preact.js";
import { Changes } from "./changes.js";
import { EventList } from "./events.js";
import { Model } from "./llm.js";
import { Logs } from "./logs.js";
import { Replicas, State } from "./parts.js";
import { Plots, TRAFFIC } from "./plots.js";
import { Rollout } from "./rollout.js";
import { Try } from "./try.js";
import { age, count } from "./words.js";

export function ServicePage({ row, shown, traffic, caller }) {
  const role = caller?.role ?? "read";
  const own = [...shown.events.values()].filter((event) => event.service === row.name);
  // What other parts of the stack do changes neither of these, and both may be long.
  const replicas = useMemo(() => html`<${ReplicaTable} row=${row} />`, [row]);
  const logs = useMemo(() => html`<${Logs} service=${row.name} />`, [row.name]);
  return html`
    <h1>${row.name} <${State} state=${row.state} /></h1>
    <p><${Replicas} row=${row} /> ${row.ready} ready, ${row.wanted} wanted: ${row.who_decides}</p>
    <${Why} row=${row} />
    <${Changes} row=${row} role=${role} />
    <${Rollout} row=${row} />
    <${Plots} name=${row.name} title="Traffic of the last 15 minutes" plots=${TRAFFIC} values=${traffic.services[row.name]} at=${traffic.at} step=${traffic.step_s} />
    <${Grafana} row=${row} port=${shown.stack.grafana_port} />
    ${row.models.length > 0 && html`<${Model} row=${row} shown=${shown} traffic=${traffic} role=${role} />`}
    <${Try} row=${row} role=${role} />
    ${replicas}
    <section class="panel"><h2>Logs</h2>${logs}</section>
    <section class="panel"><h2>Events</h2><${EventList} events=${own} most=${50} /></section>
    <${Facts} row=${row} />`;
}

// Grafana has the same numbers, for longer; it is published on the machine alone, as this page is.
function Grafana({ row, port }) {
  if (!port) return null;
  const page = row.models.length ? "pierhead-llm" : "pierhead-overview";
  const address = `http://${location.hostname}:${port}/d/${page}?var-service=${encodeURIComponent(row.name)}`;
  return html`<p><a href=${address} target="_blank" rel="noreferrer">More in Grafana</a></p>`;
}

function Why({ row }) {
  const obstacles = row.obstacles.map(({ words }) => words);
  const deadEnds = [row.stuck, row.not_as_asked].filter(Boolean);
  if (!obstacles.length && !deadEnds.length && !row.failure) return row.summary ? html`<p>${row.summary}</p>` : null;
  return html`
    <section class="panel">
      <h2>What is in the way</h2>
      <ul>
        ${obstacles.map((words) => html`<li>${words}</li>`)}
        ${deadEnds.map(({ words, next_step }) => html`<li>${words}. <strong>${next_step}</strong></li>`)}
      </ul>
      ${row.failure && html`
        <p>${row.failure.count} replicas failed in a row, the last one ${age(row.failure.last_at)} ago:</p>
        <pre tabindex="0" class="text">${row.failure.detail}</pre>`}
    </section>`;
}

function ReplicaTable({ row }) {
  return html`
    <section class="panel">
      <h2>Replicas</h2>
      <div class="scroll" tabindex="0">
        <table>
          <thead><tr><th>Replica</th><th>State</th><th>Version</th><th>In flight</th><th>GPUs</th><th>Node</th><th></th></tr></thead>
          <tbody>
            ${row.replicas.map((replica, place) => html`
              <tr key=${replica.name || place}>
                <th scope="row">${replica.name || "none yet"}</th>
                <td><${State} state=${replica.state} /></td>
                <td>${replica.version}</td>
                <td>${count(replica.ongoing)}</td>
                <td>${replica.gpus.map((gpu) => gpu.slice(0, 12)).join(", ") || "-"}</td>
                <td>${replica.node || "-"}</td>
                <td>${replica.message}</td>
              </tr>`)}
          </tbody>
        </table>
      </div>
    </section>`;
}

function Facts({ row }) {
  const facts = {
    image: row.image, version: row.version, "proven version": row.stable, protocol: row.protocol, port: row.port,
    route: row.route, "gRPC services": row.grpc_services.join(", "), calls: row.calls.join(", "),
  };
  return html`
    <section class="panel">
      <h2>Settings</h2>
      <dl class="facts">
        ${Object.entries(facts).map(([name, value]) => (value ? html`<dt>${name}</dt><dd>${value}</dd>` : null))}
      </dl>
      ${row.user_config && html`<pre tabindex="0" class="text">${JSON.stringify(row.user_config.value, null, 2)}</pre>`}
    </section>`;
}
