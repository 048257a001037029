// The console: a picture of the stack, a page for each service, events and the plan. The address says what is shown:
// #/, #/services/<name>, #/traces, #/traces/<id>, #/events, #/alerts, #/plan.

import { html, render, useEffect, useReducer, useState } from "./lib/preact.js";
import { Alerts, countOf, useAlerts } from "./alerts.js";
import { call, store, token } from "./api.js";
import { Events } from "./events.js";
import { Picture } from "./picture.js";
import { Plan } from "./plan.js";
import { ServicePage } from "./service.js";
import { Traces, TraceView } from "./traces.js";
import { useTraffic } from "./traffic.js";
import { age } from "./words.js";

const PAGES = [
  { path: "", title: "Stack" },
  { path: "traces", title: "Traces" },
  { path: "events", title: "Events" },
  { path: "alerts", title: "Alerts" },
  { path: "plan", title: "Plan" },
];
const THEME = "pierhead-theme";

function skip(event) {
  event.preventDefault(); // the address says what is shown
  document.getElementById("main").focus();
}

function useStore() {
  const [, redraw] = useReducer((times) => times + 1, 0);
  useEffect(() => store.subscribe(redraw), []);
  return store;
}

function usePath() {
  const [path, setPath] = useState(location.hash.slice(2));
  useEffect(() => {
    const changed = () => {
      setPath(location.hash.slice(2));
      document.getElementById("main").focus();
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return path.split("?")[0].split("/").map(decoded);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function App() {
  const shown = useStore();
  const path = usePath();
  const [caller, setCaller] = useState(null);
  const traffic = useTraffic(15, shown.connection.state === "live");
  const alerts = useAlerts(shown.connection.state === "live");
  const state = shown.connection.state;
  useEffect(() => {
    if (state === "live") call("GET", "/api/v1/caller").then(setCaller, () => setCaller(null));
  }, [state]);
  useEffect(() => {
    document.title = [path[0] === "services" ? path[1] : "", shown.stack?.project, "Pierhead"].filter(Boolean).join(" - ");
  });
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <${Header} shown=${shown} path=${path} caller=${caller} alerts=${alerts} />
    <${Connection} connection=${shown.connection} />
    <main id="main" tabindex="-1">
      ${state === "refused" ? html`<${AskToken} problem=${shown.connection.problem} />` : null}
      ${state !== "refused" && shown.stack === null ? html`<p>Connecting ...</p>` : null}
      ${state !== "refused" && shown.stack !== null
        ? html`<${Page} path=${path} shown=${shown} traffic=${traffic} alerts=${alerts} caller=${caller} />` : null}
    </main>`;
}

function Page({ path, shown, traffic, alerts, caller }) {
  if (path[0] === "services") {
    const row = shown.services.get(path[1]);
    if (!row) return html`<h1>${path[1]}</h1><p>There is no service of this name. <a href="#/">The whole stack</a></p>`;
    return html`<${ServicePage} key=${row.name} row=${row} shown=${shown} traffic=${traffic} caller=${caller} />`;
  }
  if (path[0] === "traces" && path[1]) return html`<${TraceView} key=${path[1]} id=${path[1]} />`;
  if (path[0] === "traces") return html`<${Traces} services=${[...shown.services.keys()]} />`;
  if (path[0] === "events") return html`<${Events} events=${shown.events} />`;
  if (path[0] === "alerts") return html`<${Alerts} found=${alerts} role=${caller?.role ?? "read"} />`;
  if (path[0] === "plan") return html`<${Plan} plan=${shown.plan} />`;
  return html`<${Picture} shown=${shown} traffic=${traffic} />`;
}

function Header({ shown, path, caller, alerts }) {
  const rows = [...shown.services.values()];
  const ready = rows.reduce((sum, row) => sum + row.ready, 0);
  const wanted = rows.reduce((sum, row) => sum + row.wanted, 0);
  return html`
    <header>
      <a class="brand" href="#/">Pierhead</a>
      <strong>${shown.stack?.project ?? ""}</strong>
      ${shown.stack && html`<span class="quiet">${ready} of ${wanted} replicas ready</span>`}
      <nav aria-label="Pages">
        ${PAGES.map(({ path: own, title }) => html`
          <a href=${`#/${own}`} aria-current=${path[0] === own ? "page" : undefined}>${title}${own === "alerts" ? countOf(alerts) : ""}</a>`)}
      </nav>
      <span class="spacer"></span>
      ${caller && html`<span class="quiet" title="What you may do">${caller.name}: ${caller.role}</span>`}
      ${token.get() && html`<button onClick=${() => enter("")}>Forget the token</button>`}
      <${Theme} />
    </header>`;
}

function enter(value) {
  token.set(value);
  store.watch();
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) ?? "");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  return html`
    <select aria-label="Colours" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
      <option value="">system</option><option value="light">light</option><option value="dark">dark</option>
    </select>`;
}

function Connection({ connection }) {
  const [, redraw] = useReducer((times) => times + 1, 0);
  useEffect(() => {
    const timer = setInterval(redraw, 1000);
    return () => clearInterval(timer);
  }, []);
  if (connection.state !== "lost") return null;
  return html`
    <p class="notice bad">
      <span role="status">What is shown is old: ${connection.problem}. It is tried again.</span> ${age(connection.since)} ago
    </p>`;
}

function AskToken({ problem }) {
  const submit = (event) => {
    event.preventDefault();
    enter(new FormData(event.target).get("token").trim());
  };
  return html`
    <form class="panel token" onSubmit=${submit}>
      <h1>The controller does not let you in</h1>
      <p>${problem}</p>
      <label>Token <input name="token" type="password" autocomplete="off" pattern="[!-~ ]*" title="ASCII" autofocus /></label>
      <button>Open</button>
      <p class="quiet">It is kept until this tab is closed.</p>
    </form>`;
}

document.body.replaceChildren();
render(html`<${App} />`, document.body);
document.addEventListener("visibilitychange", () => (document.hidden ? store.stop() : store.watch()));
store.watch();
