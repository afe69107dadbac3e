// Several runs over each other: curves, what their recipes differ in, figures and samples.
import { fill, h } from "../playground/dom.js";
import { api, query } from "./app.js";
import { colourOf } from "./chart.js";
import { showCurves } from "./curves.js";
import { short } from "./format.js";
import { sampleText } from "./run.js";

const MOST_BESIDE = 6, NEWEST = 6;

export async function compareView(root, params) {
  let runs = params.getAll("run");
  const newest = !runs.length;
  if (newest) runs = (await api("runs")).runs.filter((run) => run.step !== null).slice(0, NEWEST).map((run) => run.id);
  if (!runs.length) {
    fill(root, h("div", { class: "card empty" }, h("b", {}, "No curves yet"), "They appear here once a training has logged its first step."));
    return null;
  }
  const beside = runs.slice(0, MOST_BESIDE), curves = h("div"), differences = h("div");
  fill(root, h("div", { class: "title" }, h("h1", {}, newest ? "Newest runs" : "Runs over each other"), h("span", { class: "soft" }, newest ? "choose others in the table" : `${runs.length} ${runs.length === 1 ? "run" : "runs"}`)), curves, differences);
  const answer = await api(`compare?${query(beside.map((run) => ["run", run]))}`);
  const names = Object.fromEntries(answer.runs.map((run) => [run.id, run.name]));
  const shown = await showCurves(curves, runs, names);
  if (beside.length > 1) drawDifferences(differences, beside, answer, names);
  return shown;
}

function drawDifferences(root, runs, answer, names) {
  const heads = runs.map((run, index) => h("th", {}, h("span", { class: "swatch", style: { "--c": colourOf(index) } }), names[run] ?? run));
  const knobs = h("section", { class: "card", id: "differences" }, h("h2", {}, "Recipes differ in"), answer.knobs.length
    ? h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "knob"), heads.map((head) => head.cloneNode(true)))), h("tbody", {}, answer.knobs.map(({ knob, values }) => h("tr", {}, h("td", { class: "mono soft" }, knob), values.map((value) => h("td", {}, value ?? "—")))))))
    : h("p", { class: "lead" }, "Nothing: the recipes are the same."));
  const figures = h("section", { class: "card", id: "figures" }, h("h2", {}, "What came of it"), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "figure"), heads, h("th", { class: "n" }, runs.length === 2 ? "difference" : ""))), h("tbody", {}, answer.figures.map((figure) => figureRow(figure, runs))))));
  fill(root, h("div", { style: { height: "18px" } }), knobs, figures, samplesBeside(runs, answer.samples, names));
}

function figureRow({ figure, values, not_finite: lost, intervals, comparable }, runs) {
  const both = values.filter((value) => value !== null);
  const difference = h("td", { class: "n" }, both.length < 2 ? "" : !comparable ? "not comparable" : runs.length === 2 ? `${both[1] >= both[0] ? "+" : "−"}${short(Math.abs(both[1] - both[0]))}` : "");
  return h("tr", {}, h("td", { class: "mono soft" }, figure), values.map((value, index) => h("td", {}, lost[index] ? "nan" : value === null ? "—" : short(value, 5), intervals[index] ? h("small", {}, `${short(intervals[index][0])} to ${short(intervals[index][1])}`) : "")), difference);
}

function samplesBeside(runs, samples, names) {
  const steps = [...new Set(samples.flat().map((sample) => sample.step ?? Infinity))].sort((one, other) => one - other);
  if (!steps.length) return "";
  const grid = h("div"), label = h("b");
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value: steps.length - 1, "aria-label": "Step", oninput: () => draw() });
  function draw() {
    const step = steps[Number(slider.value)];
    label.textContent = step === Infinity ? "at evaluation" : `step ${step.toLocaleString("en")}`;
    const keys = [...new Set(samples.flat().map((sample) => sample.key))].slice(0, 8);
    fill(grid, keys.map((key) => h("div", { class: "samples", style: { "margin-bottom": "14px" } }, runs.map((run, index) => {
      const found = samples[index].filter((sample) => sample.key === key && (sample.step ?? Infinity) <= step).at(-1);
      return h("figure", {}, h("pre", {}, found ? sampleText(found) : h("span", { class: "soft" }, "none so far")), h("figcaption", {}, h("span", { class: "swatch", style: { "--c": colourOf(index) } }), names[run] ?? run, found && (found.step ?? Infinity) !== step ? `, from ${found.step === null ? "evaluation" : `step ${found.step.toLocaleString("en")}`}` : ""));
    }))));
  }
  draw();
  return h("section", { class: "card", id: "samples" }, h("div", { class: "titled" }, h("h2", {}, "Samples"), h("label", { class: "controls", style: { margin: 0 } }, steps.length > 1 ? slider : "", label)), grid);
}
