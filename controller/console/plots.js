// The traffic of a service, drawn by uPlot.

import { html, useEffect, useRef } from "./lib/preact.js";
import uPlot from "./lib/uplot.js";
import { clock, count, latest, rate, seconds } from "./words.js";

export const TRAFFIC = [
  { title: "Requests and errors a second", show: rate, lines: [["rate", "requests"], ["errors", "errors"]] },
  { title: "Duration", show: seconds, lines: [["p50_s", "p50"], ["p99_s", "p99"]] },
  { title: "In flight and waiting", show: count, lines: [["ongoing", "in flight"], ["queued", "waiting"]] },
];
const HEIGHT = 150;

export function Plots({ name, title, plots, values, at, step }) {
  return html`
    <section class="panel">
      <h2>${title}</h2>
      ${values
        ? html`<div class="plots">${plots.map((plot) => html`<${Plot} key=${name + plot.title} ...${plot} values=${values} at=${at} step=${step} />`)}</div>`
        : html`<p class="quiet">No numbers yet.</p>`}
    </section>`;
}

// The colours are asked for at each drawing: they are those of the theme.
function Plot({ title, show, lines, values, at, step }) {
  const place = useRef(null);
  const plot = useRef(null);
  const first = values[lines[0][0]];
  const times = first.map((_, number) => at - (first.length - 1 - number) * step);
  const data = [times, ...lines.map(([member]) => values[member])];
  useEffect(() => {
    const colour = (name) => () => getComputedStyle(place.current).getPropertyValue(name);
    const axis = { stroke: colour("color"), grid: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
    plot.current = new uPlot(
      {
        width: place.current.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { y: false },
        scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-6) * 1.05] } },
        axes: [{ ...axis, values: (_, times) => times.map((at) => clock(at).slice(0, 5)) }, { ...axis, size: 60, values: (_, values) => values.map(show) }],
        series: [{}, ...lines.map(([, label], number) => ({ label, width: 1.5, stroke: colour(`--plot-${number}`), points: { show: false } }))],
      },
      data,
      place.current,
    );
    const observer = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    observer.observe(place.current);
    const theme = new MutationObserver(() => plot.current.redraw(false));
    theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      observer.disconnect();
      theme.disconnect();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(data), [at]);
  return html`
    <figure>
      <figcaption>${title}: ${lines.map(([member, label], number) => html`
        <span class=${`key plot-${number}`}>${label} ${show(latest(values[member]))}</span> `)}</figcaption>
      <div ref=${place} class="plot"></div>
    </figure>`;
}
