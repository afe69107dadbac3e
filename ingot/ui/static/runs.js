// All runs: a table that filters and sorts; choosing some leads to their curves.
import { fill, h, segmented } from "../playground/dom.js";
import { api } from "./app.js";
import { ago, count, duration, money, percent, short, whole } from "./format.js";

const COLUMNS = [
  ["name", "run", "text"], ["state", "state", "text"], ["step", "progress", "number"], ["loss", "loss", "number", short], ["validation", "validation", "number", short],
  ["bits", "bits/byte", "number", short], ["tokens_per_s", "tokens/s", "number", count],
  ["goodput", "goodput", "number", percent], ["restarts", "restarts", "number", whole], ["cost", "cost", "number", money], ["changed", "changed", "number", ago],
];
const KEPT = ["name", "state", "step", "changed"];
const ROWS = 100; // as many more each time the end comes near
const STATES = [["", "All"], ["live", "Running"], ["bad", "Failed"]];
const state = { filter: "", mood: "", sort: "changed", down: true, picked: new Set() };

export async function runsView(root) {
  let runs = [], shownColumns = "", limit = ROWS;
  const cells = new Map();
  const head = h("tr"), body = h("tbody"), told = h("span", { class: "soft" }), bar = h("div", { class: "actions", hidden: true });
  const search = h("input", { type: "search", placeholder: "Filter by name, model, state", "aria-label": "Filter", value: state.filter, oninput: () => { state.filter = search.value; draw(); } });
  const sortby = h("select", { class: "sortby", "aria-label": "Sort by", onchange: () => { state.sort = sortby.value; state.down = !["name", "state"].includes(sortby.value); draw(); } }, COLUMNS.map(([key, title]) => h("option", { value: key, selected: key === state.sort }, `by ${title}`)));
  const table = h("section", { class: "card runs" }, h("div", { class: "wide" }, h("table", {}, h("thead", {}, head), body)));
  fill(root, h("div", { class: "title" }, h("h1", {}, "Runs"), told, h("div", { class: "grow" }, segmented("State", STATES, state.mood, (value) => { state.mood = value; draw(); }), sortby, search)), table, bar);

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-id]");
    if (!row) return;
    if (event.target.closest("input")) { pick(row.dataset.id, event.target.checked); return; }
    if (!event.target.closest("a")) location.hash = `#/run?${new URLSearchParams({ run: row.dataset.id })}`;
  });

  function pick(id, on) {
    if (on) state.picked.add(id); else state.picked.delete(id);
    draw();
  }

  function drawHead(columns) {
    const all = h("input", { type: "checkbox", "aria-label": "Choose all that are shown", onchange: () => { for (const run of visible()) if (all.checked) state.picked.add(run.id); else state.picked.delete(run.id); draw(); } });
    fill(head, h("th", {}, all), columns.map(([key, title, kind]) => h("th", { class: kind === "number" && key !== "step" ? "n" : "", "data-key": key }, h("button", { type: "button", onclick: () => { state.down = state.sort === key ? !state.down : kind === "number"; state.sort = key; draw(); } }, title))));
  }

  function visible() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => (!state.mood || run.mood === state.mood) && words.every((word) => run.text.includes(word)));
    const sign = state.down ? -1 : 1, key = state.sort;
    return found.sort((one, other) => {
      const [a, b] = [one[key], other[key]];
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    });
  }

  function draw() {
    const columns = COLUMNS.filter(([key]) => KEPT.includes(key) || runs.some((run) => run[key] !== null && (key !== "restarts" || run[key] > 0)));
    const signature = columns.map(([key]) => key).join();
    if (signature !== shownColumns) { shownColumns = signature; cells.clear(); drawHead(columns); }
    for (const cell of head.children) { if (cell.dataset.key === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending"); else cell.removeAttribute("aria-sort"); }
    const shown = visible();
    const rows = shown.slice(0, limit).map((run) => {
      const picked = state.picked.has(run.id), key = JSON.stringify([run, picked, ago(run.changed)]), known = cells.get(run.id);
      if (known?.key === key) return known.row;
      const row = rowOf(run, columns, picked);
      cells.set(run.id, { key, row });
      return row;
    });
    if (rows.length !== body.children.length || rows.some((row, index) => row !== body.children[index])) body.replaceChildren(...rows);
    const running = runs.filter((run) => run.running).length;
    told.textContent = [shown.length === runs.length ? `${runs.length}` : `${shown.length} of ${runs.length}`, running ? `${running} running` : ""].filter(Boolean).join(" · ");
    if (!rows.length) fill(body, h("tr", {}, h("td", { colspan: String(columns.length + 1) }, h("div", { class: "empty" }, runs.length ? [h("b", {}, "No run is like that"), "Take the filter away to see all."] : [h("b", {}, "No runs here yet"), "The first one appears by itself once it begins:", h("br"), h("code", {}, "ingot run quickstart")]))));
    drawBar();
  }

  function drawBar() {
    const ids = runs.map((run) => run.id).filter((id) => state.picked.has(id));
    bar.hidden = !ids.length;
    const address = `#/compare?${new URLSearchParams(ids.map((id) => ["run", id]))}`;
    fill(bar, h("b", {}, `${ids.length} chosen`), h("button", { class: "main", type: "button", onclick: () => { location.hash = address; } }, ids.length === 1 ? "Curves" : "Curves and differences"), h("button", { class: "quiet", type: "button", onclick: () => { state.picked.clear(); draw(); } }, "None"));
  }

  const end = h("div");
  root.append(end);
  const watch = new IntersectionObserver(([entry]) => { if (entry.isIntersecting && body.children.length < visible().length) { limit += ROWS; draw(); } }, { rootMargin: "600px" });
  watch.observe(end);

  async function refresh() {
    const answer = await api("runs");
    runs = answer.runs.map((run) => ({ ...run, text: [run.id, run.name, run.state, run.model, run.objective, run.gate].join(" ").toLowerCase() }));
    draw();
    if (runs.some((run) => run.pending) && root.isConnected) setTimeout(() => refresh().catch(() => {}), 50);
  }

  await refresh();
  return { refresh, close: () => watch.disconnect() };
}

function rowOf(run, columns, picked) {
  const cells = columns.map(([key, title, kind, format]) => {
    if (key === "name") return h("td", { class: "who" }, h("a", { href: `#/run?${new URLSearchParams({ run: run.id })}`, title: run.id }, run.name), h("small", { title: run.error }, run.error || [run.id === run.name ? "" : run.id, run.objective, count(run.parameters), run.model].filter(Boolean).join(" · ")));
    if (key === "state") return h("td", {}, h("span", { class: `pill ${run.mood}`, title: run.state }, run.state));
    if (key === "step") return h("td", { class: `steps ${run.running ? "live" : ""}` }, progress(run));
    const text = run.not_finite.includes(key) ? "nan" : format(run[key]);
    return h("td", { class: `n more ${text === "" || (key === "restarts" && !run[key]) ? "none" : ""}`, "data-label": title }, text);
  });
  return h("tr", { "data-id": run.id, class: picked ? "picked" : "" }, h("td", {}, h("input", { type: "checkbox", "aria-label": `Choose ${run.name}`, checked: picked })), cells);
}

function progress(run) {
  if (run.step === null && run.last === null) return "";
  const left = run.left_s === null ? "" : `, ${duration(run.left_s)} left`;
  const share = run.last ? Math.min((run.step ?? 0) / run.last, 1) : 0;
  return [h("span", { class: "fine" }, `${whole(run.step ?? 0)}${run.last ? ` of ${whole(run.last)}` : " steps"}${left}`), run.last ? h("span", { class: "bar", style: { "--share": share.toFixed(4) } }, h("i")) : ""];
}
