// What the controller does now, and what it would do next.

import { html } from "./lib/preact.js";

export function Plan({ plan }) {
  return html`<h1>Plan</h1><${PlanText} plan=${plan} />`;
}

export function PlanText({ plan }) {
  return html`
    ${plan.in_progress.length > 0 && html`
      <h2>In progress</h2>
      <ul>${plan.in_progress.map((step) => html`<li>${step.does}: <span class="quiet">${step.cause}</span></li>`)}</ul>`}
    <pre tabindex="0" class="text">${plan.text}</pre>`;
}
