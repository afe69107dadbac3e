// Registered versions and the live pointer; promoting and rolling back where the server allows it.
import { fill, h } from "../playground/dom.js";
import { api } from "./app.js";
import { ago, clock, interval, short } from "./format.js";

export async function registryView(root) {
  let last = "";
  async function refresh() {
    const answer = await api("registry");
    const now = JSON.stringify(answer);
    if (now === last) return;
    last = now;
    draw(root, answer, async (path, body, question) => {
      if (!confirm(question)) return;
      try { await api(`registry/${path}`, body); } catch (error) { alert(error.message); }
      await refresh();
    });
  }
  await refresh();
  return { refresh };
}

function draw(root, { names, acts }, act) {
  fill(root, h("div", { class: "title" }, h("h1", {}, "Registry"), h("span", { class: "soft" }, acts ? "" : "read-only; start with --allow-actions to promote and roll back")),
    h("p", { class: "soft" }, "The registry of this folder; versions in Vertex AI are listed by Google's console."),
    names.length ? names.map((name) => card(name, acts, act)) : h("div", { class: "card empty" }, h("b", {}, "Nothing is registered yet"), "A run's model gets here by", h("br"), h("code", {}, "ingot register RECIPE")));
}

function card(name, acts, act) {
  const keys = [...new Set(name.versions.flatMap((version) => Object.keys(version.metrics)))].slice(0, 4);
  const rows = name.versions.map((version) => {
    const live = version.number === name.live;
    return h("tr", {}, h("td", { class: "strong" }, `v${version.number} `, live ? h("span", { class: "pill good" }, "live") : ""), h("td", {}, version.run ?? ""), keys.map((key) => { const metric = version.metrics[key]; return h("td", { class: "n" }, metric ? short(metric.value) : "—", metric ? h("small", {}, interval(metric)) : ""); }), h("td", { class: "mono soft" }, version.model_hash.slice(0, 12)), h("td", { class: "n" }, ago(version.created)),
      acts ? h("td", { class: "n" }, live ? "" : h("button", { type: "button", onclick: () => act("promote", { name: name.name, version: version.number, instead_of: name.live }, `Make ${name.name} v${version.number} live?`) }, "Promote")) : "");
  });
  return h("section", { class: "card" }, h("div", { class: "titled" }, h("h2", {}, name.name), acts && name.history.length > 1 ? h("button", { type: "button", onclick: () => act("rollback", { name: name.name, instead_of: name.live }, `Make the version that was live before v${name.live} live again?`) }, "Roll back") : ""),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "version"), h("th", {}, "run"), keys.map((key) => h("th", { class: "n" }, key)), h("th", {}, "model"), h("th", { class: "n" }, "registered"), acts ? h("th") : "")), h("tbody", {}, rows))),
    name.history.length ? h("details", {}, h("summary", {}, name.history.length === 1 ? "1 change of what is live" : `${name.history.length} changes of what is live`), h("ol", { class: "events", style: { "margin-top": "8px" } }, name.history.map((turn) => h("li", {}, h("span", { class: "soft" }, clock(turn.time)), h("b", {}, `v${turn.version}`), h("span", {}, turn.reason))))) : "");
}
