// The playground of `ingot serve`: the model of this server, and others by address where they allow
// this origin (serve.cors).
import { mountPlayground, pathOf } from "./playground.js";

const here = new URL(".", location.href).href.replace(/\/$/, "");
document.getElementById("where").textContent = new URL(here).host;

async function lookAt(address, key) {
  const about = { address, name: address };
  try {
    const answer = await fetch(`${address}/v1/models`, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (answer.status === 401) return { ...about, needs_key: true };
    const [model] = (await answer.json()).data;
    return { ...about, name: model.id, kind: model.kind, chat: model.chat, tasks: model.tasks };
  } catch (error) {
    return { ...about, error: `${address} does not answer, or does not allow this page` };
  }
}

mountPlayground(document.getElementById("play"), {
  list: async () => [await lookAt(here)],
  addressOf: (model) => model.address,
  lookAgain: (model, key) => lookAt(model.address, key),
  ask: (model, route, body, key, signal) =>
    fetch(`${model.address}${pathOf(route)}`, {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
    }),
  lookAt,
});
