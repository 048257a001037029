// The REST API: calls, and the stream of what the page shows. A token is kept for this tab alone.

import { now, setClock } from "./words.js";

const TOKEN = "pierhead-token";
const RETRY_MS = [500, 1000, 2000, 5000];
const ANSWER_MS = 30_000;
const SILENT_MS = 40_000; // the stream says at least every 15 s that it is alive

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(method, path, body) {
  const response = await request(method, path, body, AbortSignal.timeout(ANSWER_MS));
  return response.json();
}

// The parts of an answer, as they come. Raises ApiError; the signal ends it.
export async function* stream(method, path, body, signal) {
  const response = await request(method, path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      const messages = (rest + value).split("\n\n");
      rest = messages.pop();
      for (const message of messages) if (message.startsWith("data: ")) yield JSON.parse(message.slice(6));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function request(method, path, body, signal) {
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch {
    throw new ApiError(0, "the controller does not answer");
  }
  setClock(response.headers.get("date"));
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new ApiError(response.status, said?.error?.message ?? `the controller answered ${response.status}`);
}

const DRAWN_MS = 400; // an event is seen within a second, and a busy stack is drawn twice in it

// What the page shows, part by part (see /api/v1/live). Listeners are called at once, and then at most every DRAWN_MS.
class Store {
  stack = null;
  plan = null;
  services = new Map();
  events = new Map();
  connection = { state: "connecting", since: now(), problem: "" };
  #listeners = new Set();
  #isDue = false;
  #drawnAt = -DRAWN_MS;
  #attempt = null;

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  changed() {
    if (this.#isDue) return;
    this.#isDue = true;
    const draw = () => {
      this.#isDue = false;
      this.#drawnAt = performance.now();
      this.#listeners.forEach((listener) => listener());
    };
    setTimeout(() => requestAnimationFrame(draw), Math.max(0, this.#drawnAt + DRAWN_MS - performance.now()));
  }

  // Ends the present stream, if there is one, and begins another.
  watch() {
    this.stop();
    this.#attempt = new AbortController();
    this.#follow(this.#attempt.signal);
  }

  // A browser has few connections to one address: a tab that nobody sees gives its own back.
  stop() {
    this.#attempt?.abort();
  }

  async #follow(signal) {
    for (let failures = 0; !signal.aborted; failures += 1) {
      let error = new ApiError(0, "the controller has ended the connection");
      const silence = new AbortController();
      const either = AbortSignal.any([signal, silence.signal]);
      try {
        const response = await request("GET", "/api/v1/live", undefined, either);
        await this.#read(response, either, silence, () => (failures = 0));
      } catch (raised) {
        error = silence.signal.aborted ? new ApiError(0, "the controller says nothing") : raised;
      }
      if (signal.aborted) return;
      const isRefused = error.status === 403;
      this.#set(isRefused ? "refused" : "lost", error.message ?? String(error));
      if (isRefused) return; // until there is a token
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    }
  }

  async #read(response, signal, silence, isAlive) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const next = { services: new Map(), events: new Map() }; // what was seen before stays until all is here again
    let rest = "";
    for (;;) {
      const timer = setTimeout(() => silence.abort(), SILENT_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(timer));
      if (done || signal.aborted) return;
      isAlive();
      const messages = (rest + value).split("\n\n");
      rest = messages.pop();
      for (const message of messages) {
        if (message.startsWith("data: ")) this.#take(next, JSON.parse(message.slice(6)));
      }
      if (next.plan && (next.stack.settled || !this.stack?.settled)) Object.assign(this, next);
      this.#set("live", "");
    }
  }

  #take(next, { part, value }) {
    const [kind, ...name] = part.split("/");
    const kept = { service: next.services, event: next.events }[kind];
    if (!kept) next[kind] = value;
    else if (value === null) kept.delete(name.join("/"));
    else kept.set(name.join("/"), value);
    if (kept === next.events && kept.size > 1000) kept.delete(kept.keys().next().value);
  }

  #set(state, problem) {
    if (state !== this.connection.state) this.connection = { state, since: now(), problem };
    else this.connection.problem = problem;
    this.changed();
  }
}

export const store = new Store();
