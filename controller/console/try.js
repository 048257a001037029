// Tries a service: the controller sends one request to HAProxy, as a client does, and the answer is shown as it comes.

import { html, useEffect, useReducer, useRef, useState } from "./lib/preact.js";
import { ApiError, call, stream } from "./api.js";
import { may } from "./parts.js";
import { bytes, seconds } from "./words.js";

const KEY = "pierhead-key";
const METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"];
const LONGEST_S = 600;
const SHOWN = 200_000;
const PRETTY = 100_000;
const OPENAPI = "/openapi.json";

// The parts of the answer to one request; what is wrong is the problem of its end. Nothing is raised.
export async function* tried(service, wanted, signal) {
  const path = `/api/v1/services/${encodeURIComponent(service)}/try`;
  const late = AbortSignal.timeout((LONGEST_S + 10) * 1000);
  try {
    for await (const part of stream("POST", path, { timeout_s: LONGEST_S, ...wanted }, AbortSignal.any([signal, late]))) {
      yield part;
      if (part.end) return;
    }
    throw new Error();
  } catch (error) {
    const problem = signal.aborted ? "stopped" : error instanceof ApiError ? error.message : "the controller has ended the connection";
    yield { end: { problem } };
  }
}

// [what is known of the answer, a function that sends a request, one that stops it]. The page's end stops it, too.
export function useTry(service) {
  const [, redraw] = useReducer((times) => times + 1, 0);
  const answer = useRef(null);
  const attempt = useRef(null);
  const stop = () => attempt.current?.abort();
  useEffect(() => stop, [service]);
  const send = async (wanted) => {
    stop();
    attempt.current = new AbortController();
    const found = { text: "", isRunning: true };
    answer.current = found;
    redraw();
    let isDue = false;
    for await (const { request_id: id, head, text, end } of tried(service, wanted, attempt.current.signal)) {
      Object.assign(found, id && { id }, head && { head }, end && { end, isRunning: false });
      found.text += text ?? "";
      if (!isDue) requestAnimationFrame(() => ((isDue = false), redraw()));
      isDue = true;
    }
    found.isRunning = false;
    redraw();
    return found;
  };
  return [answer.current, send, stop];
}

// A client's key for one service, which is kept for this tab alone: another service must not get it.
export function useKey(service) {
  const kept = `${KEY}:${service}`;
  const [key, setKey] = useState(sessionStorage.getItem(kept) ?? "");
  const change = (event) => {
    setKey(event.target.value);
    sessionStorage.setItem(kept, event.target.value);
  };
  const field = html`<label>Key <input type="password" autocomplete="off" value=${key} onInput=${change} pattern="[!-~ ]*" title="ASCII" /></label>`;
  return [key.trim(), field];
}

export function Try({ row, role }) {
  return html`
    <section class="panel try">
      <h2>Try it</h2>
      ${may(role, "scale")
        ? html`<${Form} row=${row} />`
        : html`<p class="quiet">Sending requests needs the role scale: a request may change what the service keeps.</p>`}
    </section>`;
}

function Form({ row }) {
  const contract = useContract(row.name);
  const [form, setForm] = useState({ method: row.route ? "GET" : "", path: null, headers: "", body: null });
  const [routes, setRoutes] = useState({});
  const [key, keyField] = useKey(row.name);
  const [answer, send, stop] = useTry(row.name);
  if (!contract) return html`<p class="quiet">...</p>`;
  if (contract.problem) return html`<p class="bad">${contract.problem}</p>`;
  const rpcs = new Map(contract.methods.map((one) => [`gRPC ${one.path}`, one]));
  const untold = row.grpc_services.filter((name) => !contract.methods.some(({ path }) => path.startsWith(`/${name}/`)));
  if (!row.route && !rpcs.size) return html`${NotHere(row, untold)}`;
  const method = form.method || [...rpcs.keys()][0];
  const path = form.path ?? contract.route ?? "";
  const rpc = rpcs.get(method);
  const body = form.body ?? rpc ? example(rpc.example) : example(routes[`${method} ${path}`]);
  const set = (changed) => setForm({ ...form, ...changed });
  const hasBody = rpc || !["GET", "HEAD"].includes(method);
  const submit = (event) => {
    event.preventDefault();
    const headers = headersIn(form.headers);
    send(rpc
      ? { method: "gRPC", path: rpc.path, headers, body, key }
      : { method, path, headers, body: hasBody ? body : "", key });
  };
  const look = async () => {
    const found = await send({ method: "GET", path: contract.route.replace(/\/$/, "") + OPENAPI, key });
    setRoutes(routesIn(found.text, contract.route));
  };
  return html`
    <form onSubmit=${submit}>
      <div class="row">
        <label>Method <select value=${method} onChange=${(event) => set({ method: event.target.value, body: null })}>
          ${row.route && METHODS.map((name) => html`<option value=${name}>${name}</option>`)}
          ${[...rpcs.keys()].map((name) => html`<option value=${name}>${name}</option>`)}
        </select></label>
        ${!rpc && html`
          <label class="wide">Path <input value=${path} required pattern="/.*" list="routes" onInput=${(event) => set({ path: event.target.value, body: null })} /></label>
          <datalist id="routes">${[...new Set(Object.keys(routes).map((one) => one.split(" ")[1]))].map((path) => html`<option value=${path} />`)}</datalist>
          <button type="button" onClick=${look} title=${`GET ${OPENAPI}`}>Look for its routes</button>`}
        ${keyField}
      </div>
      ${contract.auth !== "none" && html`<p class="quiet">HAProxy asks for a ${contract.auth === "jwt" ? "token of the identity provider" : "key (pierhead keys create)"}. It is kept until this tab is closed.</p>`}
      ${hasBody && html`<label>${rpc ? "Message" : "Body"}<textarea rows="6" spellcheck=${false} value=${body} onInput=${(event) => set({ body: event.target.value })}></textarea></label>`}
      <details><summary>Headers</summary>
        <label>One a line, as name: value<textarea rows="3" spellcheck=${false} value=${form.headers} onInput=${(event) => set({ headers: event.target.value })}></textarea></label>
      </details>
      <div class="row">
        <button type="submit" disabled=${answer?.isRunning}>Send</button>
        ${answer?.isRunning && html`<button type="button" onClick=${stop}>Stop</button>`}
      </div>
    </form>
    ${row.route && untold.length > 0 && html`${NotHere(row, untold)}`}
    <${Answer} answer=${answer} />`;
}

function NotHere(row, untold) {
  if (!untold.length) return html`<p class="quiet">HAProxy sends it nothing from outside: it has no x-serve.route and no x-serve.grpc_services. Try a service that calls it.</p>`;
  return html`
    <p class="quiet">The controller knows no descriptors of ${untold.join(", ")}: its image is not one of service classes. A gRPC client with its .proto file calls it at HAProxy's port for gRPC:</p>
    <pre tabindex="0" class="text">grpcurl -plaintext -proto FILE.proto -d '{}' HOST:9000 ${untold[0]}/METHOD</pre>`;
}

export function useContract(service) {
  const [contract, setContract] = useState(null);
  useEffect(() => {
    call("GET", `/api/v1/services/${encodeURIComponent(service)}/contract`).then(setContract, (error) => setContract({ problem: error.message }));
  }, [service]);
  return contract;
}

export function Answer({ answer }) {
  if (!answer) return null;
  const { head, end, text, id, isRunning } = answer;
  const status = head?.status || end?.status;
  const times = [
    head && `first byte after ${seconds(head.first_byte_s)}`,
    end?.total_s != null && `all after ${seconds(end.total_s)}`,
    end?.bytes != null && bytes(end.bytes),
  ];
  const isGood = /^2|^OK$/.test(status ?? "");
  return html`
    <div class="answer">
      <p role="status">
        ${status && html`<span class=${`state ${isGood ? "good" : "bad"}`}>${status}</span> `}
        ${isRunning && !head ? "..." : times.filter(Boolean).join(", ")}${" "}
        ${end?.problem && html`<span class="bad">${end.problem}</span>`}
      </p>
      ${id && html`<p class="quiet">Request id ${id}${end && html`, <a href=${`#/traces/${id}`}>where its time went</a>`}</p>`}
      ${head && html`
        <details><summary>Headers</summary>
          <pre tabindex="0" class="text">${head.headers.map(([name, value]) => `${name}: ${value}`).join("\n")}</pre>
        </details>`}
      ${text && html`<pre tabindex="0" class="text log" role="region" aria-label="Body">${isRunning ? text.slice(0, SHOWN) : pretty(text)}</pre>`}
      ${text.length > SHOWN && html`<p class="quiet">The first ${bytes(SHOWN)} are shown.</p>`}
    </div>`;
}

function pretty(text) {
  if (text.length > PRETTY || !/^\s*[[{]/.test(text)) return text.slice(0, SHOWN);
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const example = (value) => (value == null ? "" : JSON.stringify(value, null, 2));

function headersIn(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  return Object.fromEntries(lines.map((line) => [line.split(":")[0].trim(), line.slice(line.indexOf(":") + 1).trim()]));
}

// What an OpenAPI document names, as "POST /shop/buy", each with a body.
function routesIn(text, route) {
  try {
    const document = JSON.parse(text);
    const prefix = Object.keys(document.paths).some((path) => path.startsWith(route)) ? "" : route.replace(/\/$/, "");
    const found = {};
    for (const [path, methods] of Object.entries(document.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        const body = operation.requestBody?.content?.["application/json"];
        found[`${method.toUpperCase()} ${prefix}${path}`] = body && (body.example ?? valueOf(body.schema, document, 0));
      }
    }
    return found;
  } catch {
    return {}; // it has none: the answer says what it has
  }
}

function valueOf(schema, document, depth) {
  if (!schema || depth > 5) return null;
  if (schema.$ref) return valueOf(document.components?.schemas?.[schema.$ref.split("/").at(-1)], document, depth + 1);
  const given = schema.example ?? schema.examples?.[0] ?? schema.default ?? schema.const ?? schema.enum?.[0];
  if (given !== undefined) return given;
  const choice = (schema.anyOf ?? schema.oneOf ?? schema.allOf)?.[0];
  if (choice) return valueOf(choice, document, depth + 1);
  if (schema.type === "array") return [valueOf(schema.items, document, depth + 1)];
  if (schema.type === "object") return Object.fromEntries(Object.entries(schema.properties ?? {}).map(([name, one]) => [name, valueOf(one, document, depth + 1)]));
  return { integer: 1, number: 1.5, boolean: true, string: "text" }[schema.type] ?? null;
}
