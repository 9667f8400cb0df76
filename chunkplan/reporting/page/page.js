"use strict";
// Draws what the block of JSON has: {chart: {label: figure}}. Colours of text and lines are those of the style sheet.
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
/** {chart: label of the figure that is drawn} */
const shown = {};
const isTouched = matchMedia("(pointer: coarse)").matches;
const config = {
  responsive: true,
  displaylogo: false,
  displayModeBar: "hover",
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
  showTips: false,
};

/** What depends on light or dark, as a template that all axes of a chart take it from. */
function template() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line") };
  return {
    layout: {
      font: { color: colour("--ink") },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--faint"), activecolor: colour("--ink") },
      xaxis: axis,
      yaxis: axis,
    },
  };
}

function draw(name, label) {
  shown[name] = label;
  for (const group of document.querySelectorAll(`.drawers[data-chart="${name}"]`)) {
    group.hidden = group.dataset.label !== label;
  }
  const { data, layout: { height, ...layout } } = charts[name][label];
  document.getElementById(name).style.height = `${height}px`;
  // A finger that moves over a chart scrolls the page.
  const dragmode = isTouched ? false : "zoom";
  const margin = { ...layout.margin }; // of its own, as it is changed
  return Plotly.react(name, data, { ...layout, margin, dragmode, template: template() }, config);
}

/**
 * Makes a chart higher by what lines of its legend take beyond the margin: its plot is as high as on any width. Where the
 * legend is as wide as the chart, it begins below the buttons.
 */
function makeRoom(name) {
  const chart = document.getElementById(name);
  const { height, margin } = charts[name][shown[name]].layout;
  const legend = chart.querySelector(".legend .bg")?.getBoundingClientRect();
  const buttons = chart.querySelector(".modebar")?.getBoundingClientRect();
  const isBelow = legend && buttons && legend.right > buttons.left;
  const above = isBelow ? buttons.bottom - chart.getBoundingClientRect().top : 0;
  const top = Math.max(margin.t, Math.ceil((legend?.height ?? 0) + above));
  const wanted = `${height + top - margin.t}px`;
  if (chart.style.height === wanted && chart.layout.margin.t === top) return;
  chart.style.height = wanted;
  Plotly.relayout(chart, { autosize: true, "margin.t": top });
}

/**
 * Shows `factor` of what is seen, moved by `shift` of it; 0 shows all. Never what lies outside of the data, nor less than
 * can be told apart.
 */
function zoom(name, factor, shift) {
  const { layout } = document.getElementById(name);
  const changes = {};
  for (const axis of Object.keys(layout).filter((each) => /^xaxis\d*$/.test(each))) {
    const { range: [low, high], minallowed: least, maxallowed: most } = layout[axis];
    const wanted = factor ? Math.max(factor * (high - low), layout.meta.narrowest) : most - least;
    const width = Math.min(wanted, most - least);
    const start = (low + high) / 2 + shift * (high - low) - width / 2;
    const first = Math.min(Math.max(start, least), most - width);
    changes[`${axis}.range`] = [first, first + width];
  }
  return Plotly.relayout(name, changes);
}

/** Opens what the chunk of a bar holds; of one that is not here, it says what shows it. */
function openChunk(name, { y: row, customdata }) {
  const group = document.querySelector(`.drawers[data-chart="${name}"]:not([hidden])`);
  if (!group || !customdata) return;
  const { step, ranks } = charts[name][shown[name]].layout.meta;
  const [rank, chunk] = [ranks[row], customdata[0]];
  const drawer = document.getElementById(`chunk-${step}-${rank}-${chunk}`);
  group.open = true;
  group.querySelector(".missing").textContent = drawer ? "" : `Chunk ${chunk} of rank ${rank} is not here.`;
  if (drawer) drawer.open = true;
  const summary = (drawer ?? group).querySelector("summary");
  summary.focus({ preventScroll: true });
  summary.scrollIntoView({ block: "start" });
}

for (const name of Object.keys(charts)) {
  draw(name, Object.keys(charts[name])[0]).then((chart) => {
    chart.on("plotly_afterplot", () => makeRoom(name));
    chart.on("plotly_click", ({ points }) => openChunk(name, points[0]));
    makeRoom(name);
  });
}

/** Says of a table that is wider than its place that there is more. */
const widths = new ResizeObserver((changed) => {
  for (const { target } of changed) {
    target.parentElement.classList.toggle("wide", target.scrollWidth > target.clientWidth);
  }
});
for (const table of document.querySelectorAll(".scroll")) widths.observe(table);

dark.addEventListener("change", () => {
  for (const name of Object.keys(charts)) Plotly.relayout(name, { template: template() });
});

for (const select of document.querySelectorAll("select[data-chart]")) {
  select.addEventListener("change", () => {
    for (const { id } of select.closest("section").querySelectorAll(".chart")) draw(id, select.value);
  });
}

for (const button of document.querySelectorAll("button[data-chart]")) {
  const { chart, factor, shift } = button.dataset;
  button.addEventListener("click", () => zoom(chart, Number(factor), Number(shift)));
}
