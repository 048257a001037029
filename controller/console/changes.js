// What can be changed about a service. Each dialog first shows what would happen; where ready replicas are removed or replaced,
// it asks for the service's name.

import { html, useEffect, useState } from "./lib/preact.js";
import { call } from "./api.js";
import { Dialog, may } from "./parts.js";

const TYPED_MS = 300;
const path = (name, ...below) => ["/api/v1/services", encodeURIComponent(name), ...below].join("/");

const CHANGES = [
  { verb: "scale", title: "Scale", role: "scale", view: ScaleDialog },
  { verb: "deploy", title: "Deploy", role: "deploy", view: DeployDialog },
  { verb: "rollback", title: "Roll back", role: "deploy", view: RollbackDialog },
  { verb: "restart", title: "Restart", role: "deploy", view: RestartDialog },
  { verb: "abort", title: "Abort the rollout", role: "deploy", view: AbortDialog, isShown: (row) => row.rollout },
  { verb: "promote", title: "Promote", role: "deploy", view: PromoteDialog, isShown: (row) => row.rollout },
];

export function Changes({ row, role }) {
  const [open, setOpen] = useState(null);
  const [said, setSaid] = useState("");
  const shown = CHANGES.filter((change) => may(role, change.role) && (!change.isShown || change.isShown(row)));
  if (!shown.length) return null;
  const close = (message = "") => {
    setOpen(null);
    if (message) setSaid(message);
  };
  return html`
    <div class="row">
      ${shown.map((change) => html`<button onClick=${() => setOpen(change)}>${change.title}</button>`)}
      <span role="status">${said}</span>
    </div>
    ${open && html`<${open.view} row=${row} close=${close} />`}`;
}

const IN_WORDS = { auto: "The compose files, or the autoscaler, decide the number.", "": "" };

function ScaleDialog({ row, close }) {
  const [wanted, setWanted] = useState(String(row.wanted));
  const isNumber = /^[0-9]{1,5}$/.test(wanted);
  const plan = useRehearsal(isNumber ? `${row.name}:${wanted}` : "");
  const send = () => call("PUT", path(row.name, "scale"), { replicas: isNumber ? Number(wanted) : "auto" });
  return html`
    <${ChangeDialog} title=${`Scale ${row.name}`} row=${row} close=${close} send=${send} isRisky=${!isNumber || Number(wanted) < row.ready}>
      <label>Replicas, or auto <input value=${wanted} pattern="[0-9]{1,5}|auto" required onInput=${(event) => setWanted(event.target.value)} /></label>
      <h3>What would happen</h3>
      <pre tabindex="0" class="text">${isNumber ? plan : (IN_WORDS[wanted] ?? "Type a number, or auto.")}</pre>
    <//>`;
}

// What the controller would do with another number of replicas: "web:4".
function useRehearsal(scale) {
  const [plan, setPlan] = useState("");
  useEffect(() => {
    let isWanted = true;
    setPlan("...");
    const ask = () =>
      call("GET", `/api/v1/plan?scale=${encodeURIComponent(scale)}`).then(
        (found) => isWanted && setPlan(found.text),
        (error) => isWanted && setPlan(error.message),
      );
    const timer = scale ? setTimeout(ask, TYPED_MS) : 0;
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, [scale]);
  return plan;
}

function DeployDialog({ row, close }) {
  const send = () => call("POST", "/api/v1/deploy", { services: [row.name] });
  const words = row.changes.length ? row.changes.join("\n") : "The files and the image give what runs already.";
  return html`
    <${ChangeDialog} title=${`Deploy ${row.name}`} row=${row} close=${close} send=${send} isRisky=${true}>
      <p>Rolls out what the compose files and the image give now: ${row.offered ?? "nothing"}.</p>
      <pre tabindex="0" class="text">${words}</pre>
    <//>`;
}

function RollbackDialog({ row, close }) {
  const [revisions, setRevisions] = useState([]);
  const [problem, setProblem] = useState("");
  const [to, setTo] = useState("");
  useEffect(() => {
    call("GET", path(row.name, "revisions")).then((found) => setRevisions(found.revisions), (error) => setProblem(error.message));
  }, []);
  const others = revisions.filter((revision) => !revision.current);
  const send = () => call("POST", path(row.name, "rollback"), to ? { to } : {});
  return html`
    <${ChangeDialog} title=${`Roll ${row.name} back`} row=${row} close=${close} send=${send} isRisky=${true}>
      <label>Version <select value=${to} onChange=${(event) => setTo(event.target.value)}>
        <option value="">the one before</option>
        ${others.map(({ version, image, stable }) => html`<option value=${version}>${version} ${image}${stable ? " (proven)" : ""}</option>`)}
      </select></label>
      ${problem && html`<p class="bad">${problem}</p>`}
      <p>Its ${row.wanted} replicas are replaced as a rollout does it, without a failed request.</p>
    <//>`;
}

function RestartDialog({ row, close }) {
  const send = () => call("POST", path(row.name, "restart"), {});
  return html`
    <${ChangeDialog} title=${`Restart ${row.name}`} row=${row} close=${close} send=${send} isRisky=${true}>
      <p>Its ${row.wanted} replicas are replaced by others of the same version, as a rollout does it.</p>
    <//>`;
}

function AbortDialog({ row, close }) {
  const send = () => call("POST", path(row.name, "abort"), {});
  return html`
    <${ChangeDialog} title=${`Abort the rollout of ${row.name}`} row=${row} close=${close} send=${send} isRisky=${true}>
      <p>${row.rollout?.from ?? "The former version"} serves again, and ${row.rollout?.to} ends.</p>
    <//>`;
}

function PromoteDialog({ row, close }) {
  const send = () => call("POST", path(row.name, "promote"), {});
  return html`
    <${ChangeDialog} title=${`Promote ${row.rollout?.to ?? "the rollout, which has ended"}`} row=${row} close=${close} send=${send} isRisky=${true}>
      <p>The watch over the first batch ends: the rest of the replicas follows now.</p>
    <//>`;
}

function ChangeDialog({ title, row, close, send, isRisky = false, children }) {
  const [typed, setTyped] = useState("");
  const [problem, setProblem] = useState("");
  const [isSent, setSent] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setSent(true);
    try {
      const answer = await send();
      close(answer.message || "Asked for.");
    } catch (error) {
      setProblem(error.message);
      setSent(false);
    }
  };
  return html`
    <${Dialog} title=${title} onClose=${() => close()}>
      <form onSubmit=${submit}>
        ${children}
        ${isRisky && html`<label>Type ${row.name} to go ahead
          <input value=${typed} autocomplete="off" onInput=${(event) => setTyped(event.target.value)} /></label>`}
        ${problem && html`<p class="bad" role="alert">${problem}</p>`}
        <div class="row">
          <button type="submit" disabled=${isSent || (isRisky && typed !== row.name)}>${title}</button>
          <button type="button" onClick=${() => close()}>Cancel</button>
        </div>
      </form>
    <//>`;
}
