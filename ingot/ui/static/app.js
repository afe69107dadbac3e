// Routes of `ingot ui`, and what its views share.
import { fill, h } from "../playground/dom.js";
import { mountPlayground } from "../playground/playground.js";
import { compareView } from "./compare.js";
import { registryView } from "./registry.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";

const REFRESH_MS = 3000, ANSWER_MS = 60_000, MOST_MISSED = 1;
const view = document.getElementById("view"), stale = document.getElementById("stale");
let current = null, number = 0, heard = 0, missed = 0, refreshing = false;

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", `${location.pathname}#/`);
}

/** JSON of the server; an error has the server's own line. */
export async function api(path, body, more = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...more, ...(token ? { Authorization: `Bearer ${token}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
  let answer;
  try {
    answer = await fetch(`api/${path}`, { headers, ...(body ? { method: "POST", body: JSON.stringify(body) } : { signal: AbortSignal.timeout(ANSWER_MS) }) });
  } catch {
    throw new Error(SILENT);
  }
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(value.error ?? value.detail?.[0]?.msg ?? `the server answered ${answer.status}`);
  if (value.root) document.getElementById("root").textContent = `\u200e${value.root}`;
  return value;
}

const SILENT = "the server does not answer; is `ingot ui` still running?";
export const query = (values) => new URLSearchParams(values.filter(([, value]) => value !== null && value !== undefined)).toString();

const ROUTES = {
  "/": ["runs", runsView], "/run": ["runs", runView], "/compare": ["compare", compareView], "/registry": ["registry", registryView],
  "/play": ["play", (root) => mountPlayground(root, playSource)],
};

const playSource = {
  list: async () => (await api("models")).models,
  addressOf: (model) => model.address,
  lookAgain: (model, key) => api(`models/${model.number}`, undefined, key ? { "X-Model-Key": key } : {}),
  ask: (model, route, body, key, signal) => fetch(`api/models/${model.number}/${route}`, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...(key ? { "X-Model-Key": key } : {}), ...(sessionStorage.getItem("token") ? { Authorization: `Bearer ${sessionStorage.getItem("token")}` } : {}) },
  }),
};

async function show() {
  const [path, search] = (location.hash.slice(1) || "/").split("?");
  const [tab, open] = ROUTES[path] ?? ROUTES["/"];
  for (const link of document.querySelectorAll(".tab")) { if (link.dataset.tab === tab) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current"); }
  current?.close?.();
  const mine = ++number;
  const root = h("div");
  fill(view, root);
  scrollTo(0, 0);
  try {
    const opened = await open(root, new URLSearchParams(search));
    if (mine === number) current = opened ?? null; else opened?.close?.();
    told(null);
  } catch (error) {
    if (mine === number) fill(root, h("div", { class: "card error" }, error.message));
  }
}

async function refresh() {
  if (document.hidden || refreshing || !current?.refresh) return;
  refreshing = true;
  await current.refresh().then(() => told(null), told);
  refreshing = false;
}

/** Says when what is shown is older than it looks: `error` is why it was not read again. */
function told(error) {
  missed = error ? missed + 1 : 0;
  if (!error) heard = Date.now();
  const old = missed > MOST_MISSED, since = new Date(heard).toLocaleTimeString("en-GB");
  document.body.classList.toggle("old", old);
  stale.textContent = !old ? "" : error.message === SILENT ? `no answer since ${since}; what is shown is from then` : `${error.message}; what is shown is from ${since}`;
}

addEventListener("hashchange", show);
setInterval(refresh, REFRESH_MS);
show();
