// One run: where it stands, its curves, what it costs and loses, what it writes and reads.
import { copyFrom, fill, h, segmented } from "../playground/dom.js";
import { api, query } from "./app.js";
import { showCurves } from "./curves.js";
import { ago, clock, duration, interval, moment, money, percent, short, whole } from "./format.js";

const BAD = ["failure", "killed", "hang", "lost", "give_up"];

export async function runView(root, params) {
  const id = params.get("run") ?? ".";
  const head = h("div"), curves = h("div"), rest = h("div"), data = h("div");
  fill(root, head, curves, h("div", { style: { height: "18px" } }), rest, data);
  let last = "";
  async function refresh() {
    const run = await api(`run?${query([["run", id]])}`);
    drawHead(head, run);
    const now = JSON.stringify({ ...run, step: 0, left_s: 0, changed: 0, tokens_per_s: 0, loss: 0 });
    if (now !== last) { last = now; drawRest(rest, run); }
    return run;
  }
  const first = await refresh();
  document.title = `${first.name} · ingot`;
  const shown = await showCurves(curves, [id]);
  showData(data, id);
  let running = first.running;
  return {
    refresh: async () => { const run = await refresh(); if (running || run.running) await shown.refresh(); running = run.running; },
    close: () => { shown.close(); document.title = "ingot"; },
  };
}

function drawHead(root, run) {
  const share = run.last ? Math.min((run.step ?? 0) / run.last, 1) : 0;
  const tiles = [...run.tiles];
  if (run.cost !== null) tiles.push({ name: "cost so far", value: money(run.cost), remark: "at the price of the plan" });
  if (run.goodput !== null && !tiles.some((tile) => tile.name === "goodput")) tiles.push({ name: "goodput", value: percent(run.goodput), remark: run.restarts ? `${run.restarts} restart${run.restarts > 1 ? "s" : ""}` : "no restart" });
  fill(root,
    h("div", { class: "title" }, h("a", { href: "#/", class: "soft" }, "Runs"), h("span", { class: "soft" }, "/"), h("h1", {}, run.name), h("span", { class: `pill ${run.mood}`, title: run.state }, run.state), h("span", { class: "fine grow", title: clock(run.changed) }, run.running ? "" : `last changed ${ago(run.changed)}`)),
    h("p", { class: "lead" }, run.sentence),
    run.notes.length ? h("section", { class: "card" }, run.notes.map((note) => h("p", { class: "fine" }, note))) : "",
    run.running && run.last ? h("div", { class: "progress" }, h("span", { class: "bar live", role: "progressbar", "aria-valuenow": String(run.step ?? 0), "aria-valuemax": String(run.last), style: { "--share": share.toFixed(4) } }, h("i")), h("p", {}, h("span", {}, h("b", {}, `step ${whole(run.step ?? 0)}`), ` of ${whole(run.last)}`), h("span", {}, run.left_s === null ? "" : `about ${duration(run.left_s)} left`))) : "",
    run.failure ? failure(run.failure) : "",
    tiles.length ? h("dl", { class: "tiles" }, tiles.map((tile) => h("div", {}, h("dt", {}, tile.name), h("dd", { title: tile.value }, tile.value), tile.remark ? h("dd", { class: "remark" }, tile.remark) : ""))) : "");
}

function failure(told) {
  return h("section", { class: "card failure", id: "failure" }, h("h2", {}, told.title), h("p", { class: "cause" }, told.cause),
    h("dl", { class: "knobs" }, [["when", moment(told.when)], ["kept", told.kept], ["look at", told.where]].filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("p", { class: "fine", style: { "margin-top": "12px" } }, "This goes on from there: ", h("button", { class: "quiet", type: "button", onclick: (event) => copyFrom(event.currentTarget, told.command) }, "Copy")), h("pre", { class: "yaml" }, told.command));
}

function drawRest(root, run) {
  fill(root,
    run.goodput_account ? goodput(run.goodput_account) : "",
    run.evaluation || run.gate_report ? h("div", { class: "pair" }, run.evaluation ? evaluation(run.evaluation) : "", run.gate_report ? gate(run.gate_report) : "") : "",
    run.samples.length || run.answer ? samples(run) : "",
    run.plan ? plan(run.plan) : "",
    run.decisions.length ? h("section", { class: "card" }, h("h2", {}, "Decided by ingot"), run.decisions.map((line) => h("p", { class: "lead" }, line))) : "",
    run.steps.length ? h("section", { class: "card" }, h("h2", {}, "Steps"), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["step", "seconds", "result", "look at"].map((name) => h("th", { class: name === "seconds" ? "n" : "" }, name)))), h("tbody", {}, run.steps.map((step) => h("tr", {}, h("td", { class: "strong" }, step.step), h("td", { class: "n" }, step.seconds.toFixed(1)), h("td", {}, step.result), h("td", { class: "mono soft" }, step.where))))))) : "",
    run.events.length ? events(run) : "",
    recipe(run));
}

function goodput(account) {
  const losses = account.incidents.length ? h("div", { class: "wide", style: { "margin-top": "12px" } }, h("table", {}, h("thead", {}, h("tr", {}, ["lost", "when", "rank", "step", "cost", "cause"].map((name) => h("th", { class: name === "when" ? "n" : "" }, name)))), h("tbody", {}, account.incidents.map((one) => h("tr", {}, h("td", { class: "strong" }, one.kind), h("td", { class: "n" }, clock(one.wall)), h("td", {}, one.ranks), h("td", {}, one.steps), h("td", { class: "strong" }, one.cost), h("td", { class: "cause" }, one.cause)))))) : "";
  return h("section", { class: "card", id: "goodput" }, h("div", { class: "titled" }, h("h2", {}, "Goodput"), h("span", { class: "fine" }, `${account.attempts.length} ${account.attempts.length === 1 ? "attempt" : "attempts"}, ${duration(account.wall_s)}`)), h("p", { class: "lead" }, `${account.sentence[0].toUpperCase()}${account.sentence.slice(1)}.`),
    h("div", { class: "strip", role: "img", "aria-label": account.sentence }, account.parts.map((part) => h("i", { class: part.part, title: `${part.name}: ${duration(part.seconds)}`, style: { "--share": String(part.seconds) } }))),
    h("div", { class: "keys" }, account.parts.map((part) => h("span", {}, h("span", { class: `swatch ${part.part}` }), part.name, " ", h("b", {}, percent(part.seconds / (account.wall_s || 1)))))), losses);
}

function evaluation({ metrics }) {
  return h("section", { class: "card", id: "evaluation" }, h("h2", {}, "Evaluation"), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "metric"), h("th", { class: "n" }, "value"), h("th", {}, "95 % interval"), h("th", { class: "n" }, "n"))), h("tbody", {}, metrics.map((metric) => {
    const ends = metric.ci_low === null ? [metric.value, metric.value] : [metric.ci_low, metric.ci_high], words = interval(metric);
    const all = [...ends, metric.value, ...(metric.base ? [metric.base.value] : [])];
    const low = Math.min(...all), high = Math.max(...all), pad = (high - low) * 0.12 || 1, at = (value) => String(((value - low + pad) / (high - low + 2 * pad)).toFixed(4));
    return h("tr", {}, h("td", {}, metric.key, h("small", {}, `${metric.direction} is better`)), h("td", { class: "n strong" }, short(metric.value), metric.base ? h("small", {}, `base ${short(metric.base.value)}`) : ""), h("td", {}, h("div", { class: "interval", title: words, style: { "--low": at(ends[0]), "--high": at(ends[1]), "--at": at(metric.value), "--base": metric.base ? at(metric.base.value) : "0" } }, h("i"), metric.base ? h("s", { title: `base ${short(metric.base.value)}` }) : "", h("u")), h("small", {}, words)), h("td", { class: "n" }, whole(metric.n)));
  })))));
}

function gate(report) {
  const metrics = Array.isArray(report.metrics) ? report.metrics : [];
  return h("section", { class: "card", id: "gate" }, h("h2", {}, "Gate"), h("p", { class: `verdict ${report.decision}` }, report.decision), h("p", { class: "lead" }, report.reason), metrics.length ? h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "metric"), h("th", { class: "n" }, "this model"), h("th", { class: "n" }, report.live ? `live v${report.live.version}` : "live"))), h("tbody", {}, metrics.map((metric) => h("tr", {}, h("td", {}, metric.metric, h("small", {}, `${metric.direction} is better`)), h("td", { class: `n ${metric.better ? "best" : "strong"}` }, short(metric.candidate, 5)), h("td", { class: "n" }, typeof metric.live === "number" ? short(metric.live, 5) : "none")))))) : "", report.time ? h("p", { class: "fine", style: { "margin-top": "8px" } }, `decided ${moment(Date.parse(report.time) / 1000) || report.time}`) : "");
}

/** A sample as prompt and what was written. */
export function sampleText({ prompt, completion }) {
  return [h("b", {}, prompt), completion];
}

function samples(run) {
  const steps = [...new Set(run.samples.map((sample) => sample.step ?? Infinity))].sort((one, other) => one - other);
  const grid = h("div", { class: "samples" }), label = h("b");
  const slider = h("input", { type: "range", min: 0, max: Math.max(steps.length - 1, 0), step: 1, value: steps.length - 1, "aria-label": "Step", oninput: () => draw() });
  function draw() {
    const step = steps[Number(slider.value)];
    label.textContent = step === Infinity ? "at evaluation" : step === undefined ? "" : `step ${whole(step)}`;
    fill(grid, run.samples.filter((sample) => (sample.step ?? Infinity) === step).map((sample) => h("figure", {}, h("pre", {}, sampleText(sample)))),
      run.answer?.completion ? h("figure", {}, h("pre", {}, h("b", {}, run.answer.prompt ?? ""), run.answer.completion), h("figcaption", {}, "answered over HTTP by the served model")) : "");
  }
  draw();
  return h("section", { class: "card", id: "samples" }, h("div", { class: "titled" }, h("h2", {}, "What it writes"), h("label", { class: "controls", style: { margin: 0 } }, steps.length > 1 ? slider : "", label)), grid);
}

function plan(told) {
  return h("section", { class: "card" }, h("h2", {}, "Planned and come"), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["figure", "was to be", "came", "of the range"].map((name) => h("th", {}, name)))), h("tbody", {}, told.figures.map((figure) => h("tr", {}, h("td", { class: "strong" }, figure.what), h("td", {}, figure.planned), h("td", {}, figure.came), h("td", {}, figure.verdict)))))), told.remark ? h("p", { class: "fine" }, told.remark) : "");
}

function events(run) {
  const rows = [...run.events].reverse().map((event) => h("li", {}, h("span", { class: "soft" }, clock(event.t_wall)), h("b", { class: BAD.includes(event.kind) ? "bad" : "" }, event.kind), h("span", {}, [event.step === null || event.step === undefined ? "" : `step ${whole(event.step)}`, event.cause ?? ""].filter(Boolean).join(": "))));
  return h("section", { class: "card", id: "events" }, h("div", { class: "titled" }, h("h2", {}, "What happened"), run.events_before ? h("span", { class: "fine" }, `${whole(run.events_before)} earlier ones are in events.jsonl`) : ""), h("ol", { class: "events" }, rows));
}

function recipe(run) {
  const knobs = (pairs) => h("dl", { class: "knobs" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  const lineage = Object.entries(run.lineage);
  return h("section", { class: "card", id: "recipe" }, h("h2", {}, "Recipe"), run.knobs.length ? [h("p", { class: "lead" }, "Where it differs from the defaults:"), knobs(run.knobs)] : "", run.recipe ? h("details", {}, h("summary", {}, "The whole recipe, defaults included"), h("pre", { class: "yaml" }, run.recipe)) : "", lineage.length ? h("details", {}, h("summary", {}, "Where the model comes from"), knobs(lineage)) : "", h("p", { class: "fine mono", style: { "margin-top": "12px", "overflow-wrap": "anywhere" } }, run.root));
}

function showData(root, id) {
  const at = { split: "train", first: 0 }, COUNT = 3;
  const body = h("div"), told = h("span", { class: "fine" }), splits = h("span");
  async function load() {
    let answer;
    try {
      answer = await api(`data?${query([["run", id], ["split", at.split], ["first", at.first], ["count", COUNT]])}`);
    } catch (error) {
      fill(body, h("p", { class: "lead" }, error.message));
      return;
    }
    const total = answer.splits[at.split] ?? 0;
    fill(splits, Object.keys(answer.splits).length > 1 ? segmented("Split", Object.keys(answer.splits).map((name) => [name, name]), at.split, (value) => { at.split = value; at.first = 0; load(); }) : "");
    told.textContent = `${whole(total)} documents, ${whole(answer.tokens[at.split] ?? 0)} tokens in ${at.split}`;
    const step = (by) => h("button", { type: "button", disabled: by < 0 ? at.first === 0 : at.first + COUNT >= total, onclick: () => { at.first = Math.max(at.first + by, 0); load(); } }, by < 0 ? "Back" : "Next");
    fill(body, h("p", { class: "fine", style: { margin: "0 0 12px" } }, h("span", { class: "trained key-trained" }, "trained"), " ", h("span", { class: "key-not" }, "not trained"), " ", h("span", { class: "special" }, "special tokens")),
      answer.examples.map((example) => h("div", { class: "example" }, example.parts.map((part) => [h("header", {}, h("span", {}, `${example.number + 1}${part.name === "tokens" ? "" : `, ${part.name}`}`), h("span", {}, `${whole(part.tokens)} tokens, ${whole(part.trained)} trained`), part.label ? h("span", {}, `label ${part.label}`) : "", h("span", { class: "mono" }, example.source)), h("pre", {}, part.pieces.map(([text, trained, special]) => h("span", { class: `${trained ? "trained" : ""} ${special ? "special" : ""}` }, text)))]))),
      h("div", { class: "controls", style: { margin: 0 } }, step(-COUNT), step(COUNT)));
  }
  const open = h("button", { type: "button", onclick: () => { open.remove(); load(); } }, "Show examples");
  fill(body, open);
  fill(root, h("section", { class: "card", id: "data" }, h("div", { class: "titled" }, h("h2", {}, "Data as the model sees it"), told, splits), body));
}
