// What happened: the newest first, filtered by words.

import { html, useState } from "./lib/preact.js";
import { State } from "./parts.js";
import { clock } from "./words.js";

export function Events({ events }) {
  return html`<h1>Events</h1><${EventList} events=${[...events.values()]} />`;
}

export function EventList({ events, most = 200 }) {
  const [words, setWords] = useState("");
  const wanted = words.toLowerCase();
  const found = events
    .filter(({ kind, service, message }) => `${kind} ${service} ${message}`.toLowerCase().includes(wanted))
    .sort((one, other) => other.seq - one.seq);
  return html`
    <label class="filter">Filter <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
    <ol class="events">
      ${found.slice(0, most).map((event) => html`
        <li key=${event.seq}>
          <time datetime=${new Date(event.at * 1000).toISOString()}>${clock(event.last_at)}</time>
          <${State} state=${event.outcome} />
          <span class="message">${event.message}${event.times > 1 ? ` (${event.times} times)` : ""}</span>
        </li>`)}
    </ol>
    ${found.length > most && html`<p class="quiet">These are the newest ${most} of ${found.length}.</p>`}
    ${found.length === 0 && html`<p class="quiet">Nothing.</p>`}`;
}
