// The traffic of a service, drawn by uPlot.

import { html, useEffect, useRef } from "./lib/preact.js";
import uPlot from "./lib/uplot.js";
import { clock, count, latest, rate, seconds } from "./words.js";

const PLOTS = [
  { title: "Requests and errors a second", show: rate, lines: [["rate", "requests"], ["errors", "errors"]] },
  { title: "Duration", show: seconds, lines: [["p50_s", "p50"], ["p99_s", "p99"]] },
  { title: "In flight and waiting", show: count, lines: [["ongoing", "in flight"], ["queued", "waiting"]] },
];
const HEIGHT = 150;

export function Plots({ name, traffic, at, step }) {
  if (!traffic) return html`<section class="panel"><h2>Traffic</h2><p class="quiet">No numbers yet.</p></section>`;
  return html`
    <section class="panel">
      <h2>Traffic of the last 15 minutes</h2>
      <div class="plots">${PLOTS.map((plot) => html`<${Plot} key=${name + plot.title} ...${plot} traffic=${traffic} at=${at} step=${step} />`)}</div>
    </section>`;
}

function Plot({ title, show, lines, traffic, at, step }) {
  const place = useRef(null);
  const plot = useRef(null);
  const times = traffic.rate.map((_, number) => at - (traffic.rate.length - 1 - number) * step);
  const data = [times, ...lines.map(([member]) => traffic[member])];
  useEffect(() => {
    const colours = getComputedStyle(place.current);
    const axis = { stroke: colours.color, grid: { stroke: colours.getPropertyValue("--line"), width: 1 }, font: "11px system-ui" };
    plot.current = new uPlot(
      {
        width: place.current.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { y: false },
        scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-6) * 1.05] } },
        axes: [{ ...axis, values: (_, times) => times.map((at) => clock(at).slice(0, 5)) }, { ...axis, size: 60, values: (_, values) => values.map(show) }],
        series: [{}, ...lines.map(([, label], number) => ({ label, width: 1.5, stroke: colours.getPropertyValue(`--plot-${number}`), points: { show: false } }))],
      },
      data,
      place.current,
    );
    const observer = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(data), [at]);
  return html`
    <figure>
      <figcaption>${title}: ${lines.map(([member, label], number) => html`
        <span class=${`key plot-${number}`}>${label} ${show(latest(traffic[member]))}</span> `)}</figcaption>
      <div ref=${place} class="plot"></div>
    </figure>`;
}
