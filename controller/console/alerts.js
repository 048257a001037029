// What fires, and what is silenced: asked for every few seconds while the page is seen.

import { html, useState } from "./lib/preact.js";
import { call } from "./api.js";
import { Dialog, ROLES } from "./parts.js";
import { usePolling } from "./polling.js";
import { age, clock } from "./words.js";

const EVERY_MS = 10_000;
const LOOKS = { critical: "bad", warning: "busy" };
const TIMES = { "1 hour": 3600, "4 hours": 14_400, "1 day": 86_400, "1 week": 604_800 };

export function useAlerts(isLive) {
  const [found, setFound] = useState({ alerts: [], is_sent: true, problem: "" });
  const ask = () =>
    isLive ? call("GET", "/api/v1/alerts").catch((error) => ({ alerts: [], is_sent: true, problem: error.message })) : null;
  usePolling(ask, setFound, EVERY_MS, isLive, [isLive]);
  return found;
}

// Of the title of the page, in the header: how many are not silenced.
export function countOf({ alerts, problem }) {
  const unsilenced = alerts.filter(({ silenced_by }) => !silenced_by.length).length;
  return unsilenced ? ` (${unsilenced})` : problem ? " (?)" : "";
}

export function Alerts({ found, role }) {
  const [open, setOpen] = useState(null);
  const [said, setSaid] = useState("");
  const [turn, setTurn] = useState(0);
  const maySilence = found.is_sent && ROLES.indexOf(role) >= ROLES.indexOf("scale");
  const close = (message = "") => {
    setOpen(null);
    if (message) {
      setSaid(message);
      setTurn(turn + 1);
    }
  };
  return html`
    <h1>Alerts</h1>
    ${found.problem && html`<p class="bad">${found.problem}</p>`}
    ${!found.is_sent && html`<p class="quiet">They are sent to nobody: .env names no receiver (docs/how-to/alerts.md).</p>`}
    <p role="status">${said}</p>
    ${found.alerts.map((alert) => html`
      <section class="panel" key=${JSON.stringify(alert.labels)}>
        <h2>${alert.name} <span class=${`state ${LOOKS[alert.severity] ?? "quiet"}`}>${alert.severity}</span>
          ${alert.silenced_by.length > 0 && html` <span class="state quiet">silenced</span>`}</h2>
        <p><strong>${alert.summary}</strong>, for ${age(alert.since)}.
          ${alert.service && html` <a href=${`#/services/${encodeURIComponent(alert.service)}`}>${alert.service}</a>`}</p>
        <p>${alert.description}</p>
        <p class="quiet">What to do: ${alert.runbook}</p>
        ${maySilence && html`<button onClick=${() => setOpen(alert)}>Silence ${alert.name}</button>`}
      </section>`)}
    ${found.alerts.length === 0 && !found.problem && html`<p>Nothing fires.</p>`}
    ${found.is_sent && html`<${Silences} turn=${turn} maySilence=${maySilence} close=${close} />`}
    ${open && html`<${SilenceDialog} alert=${open} close=${close} />`}`;
}

function Silences({ turn, maySilence, close }) {
  const [found, setFound] = useState({ silences: [], problem: "" });
  const ask = () => call("GET", "/api/v1/silences").catch((error) => ({ silences: [], problem: error.message }));
  usePolling(ask, setFound, EVERY_MS, true, [turn]);
  const end = ({ id }) =>
    call("DELETE", `/api/v1/silences/${encodeURIComponent(id)}`).then(() => close("The silence has ended."), (error) => close(error.message));
  return html`
    <h2>Silences</h2>
    ${found.problem && html`<p class="bad">${found.problem}</p>`}
    <ul>
      ${found.silences.map((one) => html`
        <li key=${one.id}>
          ${[one.alert || "every alert", one.service && `of ${one.service}`, one.others].filter(Boolean).join(" ")}
          ${" "}until ${clock(one.ends_at)}, by ${one.by}: ${one.why}
          ${maySilence && html` <button onClick=${() => end(one)}>End it</button>`}
        </li>`)}
    </ul>
    ${found.silences.length === 0 && html`<p class="quiet">None.</p>`}`;
}

function SilenceDialog({ alert, close }) {
  const [forS, setForS] = useState(TIMES["1 hour"]);
  const [why, setWhy] = useState("");
  const [problem, setProblem] = useState("");
  const title = `Silence ${alert.name}${alert.service ? ` of ${alert.service}` : ""}`;
  const submit = (event) => {
    event.preventDefault();
    const body = { service: alert.service, alert: alert.name, for_s: forS, why };
    call("POST", "/api/v1/silences", body).then(() => close(`${title}: done.`), (error) => setProblem(error.message));
  };
  return html`
    <${Dialog} title=${title} onClose=${() => close()}>
      <form onSubmit=${submit}>
        <p>The alert stays on this page. No message is sent.</p>
        <label>For <select value=${forS} onChange=${(event) => setForS(Number(event.target.value))}>
          ${Object.entries(TIMES).map(([words, seconds]) => html`<option value=${seconds}>${words}</option>`)}
        </select></label>
        <label>Why <input value=${why} required maxlength="500" onInput=${(event) => setWhy(event.target.value)} /></label>
        ${problem && html`<p class="bad" role="alert">${problem}</p>`}
        <div class="row">
          <button type="submit">${title}</button>
          <button type="button" onClick=${() => close()}>Cancel</button>
        </div>
      </form>
    <//>`;
}
