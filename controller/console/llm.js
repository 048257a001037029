// A language model: its numbers, who sleeps and who gives way, and a chat with it through the gateway that calls it.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { may, State } from "./parts.js";
import { Plots } from "./plots.js";
import { tried, useKey, useContract } from "./try.js";
import { count, rate, seconds, share } from "./words.js";

const PLOTS = [
  { title: "Tokens a second", show: rate, lines: [["tokens", "generated"]] },
  { title: "First token", show: seconds, lines: [["first_p50_s", "p50"], ["first_p99_s", "p99"]] },
  { title: "Running and waiting in the engines", show: count, lines: [["running", "running"], ["waiting", "waiting"]] },
  { title: "Cache in use", show: share, lines: [["kv_use", "fullest replica"]] },
];

export function Model({ row, shown, traffic, role }) {
  const [model, ...adapters] = row.models;
  const gateway = [...shown.services.values()].find((one) => one.route && one.calls.includes(row.name));
  return html`
    <section class="panel">
      <h2>Language model</h2>
      <dl class="facts">
        <dt>model</dt><dd>${model}</dd>
        <dt>adapters</dt><dd>${adapters.join(", ") || "none are named; a replica loads others when they are asked for"}</dd>
        <dt>turns</dt><dd><${Turns} row=${row} /></dd>
      </dl>
    </section>
    <${Plots} name=${row.name} title="The model in the last 15 minutes" plots=${PLOTS} values=${traffic.services[row.name]?.llm} at=${traffic.at} step=${traffic.step_s} />
    <section class="panel">
      <h2>Chat</h2>
      ${gateway && may(role, "scale") ? html`<${Chat} row=${row} gateway=${gateway} />` : html`
        <p class="quiet">${gateway ? "A chat needs the role scale." : "No service with a route calls it, so clients cannot reach it."}</p>`}
    </section>`;
}

// Who sleeps, and who gives way to whom: the replicas' own words, and the service's.
function Turns({ row }) {
  const told = row.replicas.filter(({ state, message }) => message && ["ASLEEP", "DRAINING", "PENDING"].includes(state));
  if (!told.length) return "no replica sleeps, gives way or waits for a place";
  return told.map(({ name, state, message }) => html`<p><${State} state=${state} /> ${name || "a replica"}: ${message}</p>`);
}

function Chat({ row, gateway }) {
  const [model, setModel] = useState(row.models[0]);
  const [words, setWords] = useState("");
  const [messages, setMessages] = useState([]);
  const [problem, setProblem] = useState("");
  const [isRunning, setRunning] = useState(false);
  const [key, keyField] = useKey(gateway.name);
  const contract = useContract(gateway.name);
  const attempt = useRef(null);
  useEffect(() => () => attempt.current?.abort(), []);
  const ask = async (event) => {
    event.preventDefault();
    const said = [...messages, { role: "user", content: words }];
    setMessages(said);
    setWords("");
    setProblem("");
    setRunning(true);
    attempt.current = new AbortController();
    let isAnswered = false;
    const show = (content) => {
      isAnswered = true;
      setMessages([...said, { role: "assistant", content }]);
    };
    setProblem(await talk(gateway.name, contract?.route ?? "", { model, messages: said, stream: true }, key, attempt.current.signal, show));
    setRunning(false);
    if (!isAnswered) {
      setMessages(messages); // a model wants questions and answers in turn
      setWords(words);
    }
  };
  return html`
    <ol class="chat" aria-label="Chat" aria-live="polite">
      ${messages.map(({ role, content }) => html`<li class=${role}><strong class="quiet">${role}</strong> ${content}</li>`)}
    </ol>
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
    <form onSubmit=${ask}>
      <label>Message <textarea rows="2" required value=${words} onInput=${(event) => setWords(event.target.value)}></textarea></label>
      <div class="row">
        <label>Model <input value=${model} required list="models" onInput=${(event) => setModel(event.target.value)} /></label>
        <datalist id="models">${row.models.map((name) => html`<option value=${name} />`)}</datalist>
        ${keyField}
        <button type="submit" disabled=${isRunning}>Ask</button>
        ${isRunning && html`<button type="button" onClick=${() => attempt.current.abort()}>Stop</button>`}
        ${!isRunning && messages.length > 0 && html`<button type="button" onClick=${() => setMessages([])}>Begin again</button>`}
      </div>
    </form>`;
}

// Shows the words of an answer as they come; returns what is wrong, "" = nothing. The gateway streams OpenAI's events.
async function talk(gateway, route, asked, key, signal, show) {
  const path = `${route.replace(/\/(v1)?$/, "")}/v1/chat/completions`;
  let [content, whole, rest, status, problem] = ["", "", "", "", ""];
  for await (const { head, text, end } of tried(gateway, { method: "POST", path, body: JSON.stringify(asked), key }, signal)) {
    status = head?.status ?? status;
    problem = end?.problem ?? problem;
    whole += text ?? "";
    const lines = (rest + (text ?? "")).split("\n");
    rest = lines.pop();
    for (const line of lines) content += wordsIn(line);
    if (content) show(content);
  }
  if (problem === "stopped") return "";
  return problem || (/^2/.test(status) ? "" : `${status} ${errorIn(whole)}`);
}

function wordsIn(line) {
  try {
    const { choices, error } = JSON.parse(line.replace(/^data: /, ""));
    const { content, reasoning_content: thought } = choices?.[0]?.delta ?? {};
    return error ? `\n${error.message}` : (content ?? thought ?? "");
  } catch {
    return ""; // the end's mark, or a line of another kind
  }
}

function errorIn(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text;
  }
}
