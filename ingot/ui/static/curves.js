// The curves of some runs: a grid of charts with common controls.
import { fill, h, segmented } from "../playground/dom.js";
import { api, query } from "./app.js";
import { Chart, colourOf } from "./chart.js";
import { count, elapsed, rounded, whole } from "./format.js";

const FIRST = ["train/loss", "validation/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "train/mfu", "memory/peak_gb", "gpu/util"];
const MOST_BANDS = 4;
const state = { axis: "step", smoothing: 0, log: false };
const FORMATS = { step: whole, tokens: (value, apart) => (apart ? rounded(value, apart) : count(value)), time: elapsed };
const NAMES = { "train/loss": "Training loss", "validation/loss": "Validation loss", "train/lr": "Learning rate", "train/grad_norm": "Gradient norm", "train/tokens_per_s": "Tokens per second", "train/mfu": "Model FLOPs utilisation", "memory/peak_gb": "Peak memory, GB", "gpu/util": "GPU use", "gpu/memory": "GPU memory", "train/examples_per_s": "Examples per second" };

/** Shows the curves of `runs` in `root`; resolves to { refresh, close }. */
export async function showCurves(root, runs, names = {}) {
  const charts = new Map(), hidden = new Set(), extra = new Set();
  let range = null, known = [], latest = {}, waiting = false, again = false, drawing = false;
  const grid = h("div", { class: "charts" }), more = h("details", {}), note = h("span", { class: "fine" });
  const back = h("button", { type: "button", hidden: true, onclick: () => zoom(null, null) }, "See all again");
  const smoothing = h("input", { type: "range", min: 0, max: 3, step: 0.05, value: -Math.log10(1 - state.smoothing), "aria-label": "Smoothing", oninput: () => { state.smoothing = 1 - 10 ** -smoothing.value; load(); } }); // 0 to 0.999
  const log = h("input", { type: "checkbox", checked: state.log, onchange: () => { state.log = log.checked; draw(); } });
  const controls = h("div", { class: "controls" }, segmented("Axis", [["step", "Steps"], ["tokens", "Tokens"], ["time", "Time"]], state.axis, (value) => { state.axis = value; range = null; back.hidden = true; load(); }), h("label", {}, "smoothing", smoothing), h("label", {}, log, "log scale"), back, note);
  const legend = h("div", { class: "legend" }, runs.length < 2 ? "" : runs.map((run, index) => h("button", { type: "button", "aria-pressed": "true", title: run, onclick: (event) => { if (hidden.delete(run)) event.currentTarget.setAttribute("aria-pressed", "true"); else { hidden.add(run); event.currentTarget.setAttribute("aria-pressed", "false"); } draw(); } }, h("i", { style: { "--c": colourOf(index) } }), h("span", {}, names[run] ?? run))));
  fill(root, controls, runs.length > 1 ? legend : "", grid, more);

  function zoom(low, high) {
    range = low === null ? null : [low, high];
    back.hidden = !range;
    load();
  }

  async function load() {
    if (waiting) { again = true; return; }
    waiting = true;
    try {
      const wide = grid.clientWidth || 800, points = runs.length === 1 ? Math.min(1600, wide) : Math.max(150, Math.min(700, Math.round(wide / 2), Math.round(4000 / runs.length)));
      const keys = known.length ? [...FIRST.filter((key) => known.includes(key)), ...extra] : FIRST;
      const values = [...runs.map((run) => ["run", run]), ...keys.map((key) => ["key", key]), ["axis", state.axis], ["points", Math.round(points)], ["bands", runs.length <= MOST_BANDS], ["smoothing", state.smoothing]];
      if (range) values.push(["low", range[0]], ["high", range[1]]);
      const answer = await api(`curves?${query(values)}`);
      if (answer.keys.join() !== known.join()) { known = answer.keys; drawMore(); }
      note.textContent = answer.left_out ? `the first ${runs.length - answer.left_out} of ${runs.length} runs` : "";
      latest = answer.curves;
      draw();
    } finally {
      waiting = false;
      if (again) { again = false; load(); }
    }
  }

  function drawMore() {
    const others = known.filter((key) => !FIRST.includes(key));
    if (!others.length) return;
    fill(more, h("summary", {}, `${others.length} more curves`), h("div", { class: "legend", style: { "margin-top": "10px" } }, others.map((key) => h("button", { type: "button", "aria-pressed": String(extra.has(key)), onclick: (event) => {
      if (!extra.delete(key)) extra.add(key);
      event.currentTarget.setAttribute("aria-pressed", String(extra.has(key)));
      load();
    } }, h("span", {}, key)))));
  }

  function draw() {
    if (!drawing) { drawing = true; requestAnimationFrame(drawNow); }
  }

  function drawNow() {
    drawing = false;
    const keys = Object.keys(latest).filter((key) => Object.values(latest[key]).some(Boolean));
    for (const [key, { card, chart }] of charts) if (!keys.includes(key)) { chart.close(); card.remove(); charts.delete(key); }
    for (const key of keys) {
      if (!charts.has(key)) {
        const box = h("div", { class: "chart" }), card = h("section", { class: `card ${key === "train/loss" ? "first" : ""}` }, h("h3", {}, NAMES[key] ?? key, h("span", { class: "fine" }, NAMES[key] ? key : "")), box);
        grid.append(card);
        charts.set(key, { card, chart: new Chart(box, { zoom }) });
      }
      const series = runs.map((run, index) => ({ name: names[run] ?? run, run, index, ...(latest[key][run] ?? { x: [], y: [], lost: null }) })).filter((one) => !hidden.has(one.run) && (one.x.length || one.lost !== null));
      charts.get(key).chart.set(series, { log: state.log, range, label: NAMES[key] ?? key, axis: state.axis, formatX: FORMATS[state.axis], unit: state.axis === "step" ? "step " : "" });
    }
    if (!keys.length) fill(grid, h("div", { class: "card empty" }, h("b", {}, "Nothing was logged yet"), state.axis === "tokens" ? "Tokens are known where the recipe has train.global_batch and data.seq_len." : "Curves appear with the first logged step."));
    else for (const empty of grid.querySelectorAll(":scope > .empty")) empty.remove();
  }

  await load();
  return { refresh: () => (range ? Promise.resolve() : load()), close: () => { for (const { chart } of charts.values()) chart.close(); } };
}
