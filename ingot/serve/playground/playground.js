// One model or two beside each other, asked in the same words: chat, completion, or another task.
import { copyFrom, fill, h, segmented } from "./dom.js";
import { TASKS } from "./tasks.js";

const KNOBS = [
  ["temperature", "temperature", { min: 0, max: 2, step: 0.1 }, 0.7],
  ["top_p", "top p", { min: 0.05, max: 1, step: 0.05 }, 1],
  ["max_tokens", "tokens at most", { min: 1, max: 8192, step: 1 }, 128],
  ["seed", "seed", { min: 0, max: 2147483647, step: 1, placeholder: "another each time" }, ""],
];
const TRIES = {
  chat: ["Who are you?", "Explain gradient descent in two sentences.", "Write a haiku about copper."],
  completions: ["Once upon a time", "def main(", "The capital of France is"],
  ...Object.fromEntries(Object.entries(TASKS).map(([name, task]) => [name, task.tries])),
};
const BROKEN = "the answer broke off";
const NAMES = { chat: "Chat", completions: "Completion", ...Object.fromEntries(Object.entries(TASKS).map(([name, task]) => [name, task.name])) };

/** Shows the playground in `root`. `source` lists models, looks at one again with its key, and asks them. */
export function mountPlayground(root, source) {
  const state = { mode: "completions", models: [], keys: new Map(), logprobs: false, stop: "", running: null, knobs: Object.fromEntries(KNOBS.map(([name, , , value]) => [name, value])) };
  const panels = h("div", { class: "panels" });
  const shown = [];
  const box = h("textarea", { rows: 1, "aria-label": "Prompt", oninput: () => grow(box), onkeydown: (event) => {
    if (event.isComposing || event.keyCode === 229) return; // Enter ends an input method's word
    if (event.key === "Enter" && !event.shiftKey && (["chat", "classes"].includes(state.mode) || event.ctrlKey || event.metaKey)) { event.preventDefault(); send(); }
  } });
  const go = h("button", { class: "main", type: "button", onclick: () => (state.running ? state.running.abort() : send()) }, "Send");
  const modes = h("div");
  const two = h("button", { type: "button", onclick: () => { shown.length === 1 ? addPanel() : dropPanel(); } }, "Two side by side");
  const knobs = h("div", { class: "card play-knobs", hidden: true }, knobFields());
  const sampling = h("button", { type: "button", "aria-expanded": "false", onclick: () => { knobs.hidden = !knobs.hidden; sampling.setAttribute("aria-expanded", String(!knobs.hidden)); } }, "Sampling");
  // A key is for the address that it was typed for: another one may be a stranger's.
  const keyOf = (model) => state.keys.get(source.addressOf(model)) ?? "";
  // Headers hold bytes, and a key is compared in those of UTF-8.
  const sent = (key) => String.fromCharCode(...new TextEncoder().encode(key ?? ""));
  fill(root, h("div", { class: "play" },
    h("div", { class: "play-bar" }, modes, sampling, two,
      h("div", { class: "grow" }, h("button", { class: "quiet", type: "button", onclick: (e) => copyFrom(e.currentTarget, asCurl()) }, "Copy as curl"), h("button", { class: "quiet", type: "button", onclick: (e) => copyFrom(e.currentTarget, asPython()) }, "Copy as Python"), h("button", { class: "quiet", type: "button", onclick: clear }, "Clear"))),
    knobs, panels, h("div", { class: "card ask" }, box, go)));

  function knobFields() {
    const fields = KNOBS.map(([name, text, range, value]) => h("label", {}, text, h("input", { type: "number", value, ...range, name, onchange: (event) => { state.knobs[name] = event.target.value === "" ? "" : Number(event.target.value); } })));
    fields.push(h("label", {}, "stop at", h("input", { type: "text", name: "stop", placeholder: "one|another", onchange: (event) => { state.stop = event.target.value; } })));
    fields.push(h("label", { class: "check" }, h("input", { type: "checkbox", name: "logprobs", onchange: (event) => { state.logprobs = event.target.checked; } }), "show probabilities"));
    return fields;
  }

  function setMode(mode) {
    state.mode = mode;
    // Servers of others do not say what their models answer.
    const offered = (state.models[0]?.tasks ?? ["chat", "completions"]).filter((name) => NAMES[name]);
    fill(modes, offered.length > 1 ? segmented("Kind of request", offered.map((name) => [name, NAMES[name]]), mode, (value) => { setMode(value); clear(); }) : null);
    sampling.hidden = mode in TASKS;
    knobs.hidden ||= sampling.hidden;
    box.placeholder = TASKS[mode]?.placeholder ?? (mode === "chat" ? "Say something" : "Text to go on from");
    box.title = ["chat", "classes"].includes(mode) ? "Enter sends, Shift+Enter is a new line" : "Ctrl+Enter sends";
    box.classList.toggle("raw", mode === "completions");
  }

  async function load() {
    try {
      state.models = await source.list();
    } catch (error) {
      fill(panels, h("div", { class: "card error" }, error.message));
      return;
    }
    if (!state.models.length) {
      fill(panels, h("div", { class: "card empty" }, h("b", {}, "No model to talk with"), "Serve one and name its address:", h("br"), h("code", {}, "ingot serve runs/quickstart & ingot ui runs --model http://127.0.0.1:8000")));
      go.disabled = two.disabled = true;
      return;
    }
    two.hidden = state.models.length < 2 && !source.lookAt;
    shown.splice(0);
    fill(panels);
    setFirstMode();
    addPanel();
  }

  function setFirstMode() {
    const [first] = state.models;
    setMode(first.tasks?.[0] ?? (first.chat ? "chat" : "completions"));
  }

  /** Takes the key of a model's address, and looks again at what answers there. */
  async function setKey(asked, key) {
    const address = source.addressOf(asked);
    state.keys.set(address, key);
    const changed = shown.filter((panel) => source.addressOf(panel.model) === address);
    for (const panel of changed) Object.assign(panel, { turns: [], asked: false });
    const found = await source.lookAgain(asked, sent(key));
    const now = (model) => (found && source.addressOf(model) === address ? found : model);
    state.models = state.models.map(now);
    if (found && state.models[0] === found) setFirstMode();
    for (const panel of changed) {
      panel.model = now(panel.model);
      showHead(panel);
      if (!panel.asked) showEmpty(panel); // else an answer stands there, or comes
    }
  }

  function addPanel() {
    const panel = { model: state.models[Math.min(shown.length, state.models.length - 1)], turns: [] };
    panel.talk = h("div", { class: "talk", "aria-live": "polite" });
    panel.foot = h("div", { class: "panel-foot" });
    panel.head = h("div", { class: "panel-head" });
    panel.element = h("section", { class: "card panel-card" }, panel.head, panel.talk, panel.foot);
    shown.push(panel);
    panels.append(panel.element);
    showHead(panel);
    showEmpty(panel);
    two.textContent = shown.length === 2 ? "One model" : "Two side by side";
  }

  function showHead(panel) {
    const others = source.lookAt ? [h("option", { value: "other" }, "another address …")] : [];
    const select = h("select", { "aria-label": "Model", onchange: async () => {
      if (select.value !== "other") { panel.model = state.models[Number(select.value)]; return showHead(panel); }
      const address = prompt("Address of another ingot serve (it must allow this page: serve.cors)", "http://127.0.0.1:8001")?.replace(/\/+$/, "");
      if (address) { const found = await source.lookAt(address, sent(state.keys.get(address))); if (found.error) alert(found.error); else { state.models.push(found); panel.model = found; } }
      showHead(panel);
    } }, state.models.map((model, number) => h("option", { value: String(number), selected: model === panel.model }, model.name)), others);
    const at = source.addressOf(panel.model);
    const key = h("input", { type: "password", placeholder: "API key", "aria-label": "API key", hidden: !panel.model.needs_key && !state.keys.has(at), autocomplete: "off", value: keyOf(panel.model), onchange: () => setKey(panel.model, key.value) });
    fill(panel.head, state.models.length > 1 || others.length ? select : h("b", {}, panel.model.name), key, h("span", { class: "fine" }, panel.model.error ? "does not answer" : panel.model.needs_key ? "needs its API key" : panel.model.kind || ""));
  }

  function dropPanel() {
    shown.pop().element.remove();
    two.textContent = "Two side by side";
  }

  function showEmpty(panel) {
    if (panel.model.error) { fill(panel.talk, h("p", { class: "error card" }, panel.model.error)); return; }
    fill(panel.talk, h("div", { class: "empty" }, "Nothing asked yet. Try one of these:", h("div", { class: "suggest" }, TRIES[state.mode].map((text) => h("button", { type: "button", onclick: () => { box.value = text; grow(box); send(); } }, text)))));
    fill(panel.foot);
  }

  function clear() {
    state.running?.abort();
    for (const panel of shown) { panel.turns = []; showEmpty(panel); }
    box.value = "";
    grow(box);
  }

  function request(panel, prompt) {
    if (state.mode in TASKS) return TASKS[state.mode].body(prompt);
    const set = Object.entries(state.knobs).filter(([, value]) => value !== "");
    const body = { model: panel.model.name, ...Object.fromEntries(set) };
    if (state.stop) body.stop = state.stop.split("|").filter(Boolean).map((text) => text.replace(/\\n/g, "\n"));
    if (state.mode === "chat") {
      body.messages = [...panel.turns.map(({ role, content }) => ({ role, content })), { role: "user", content: prompt }];
      if (state.logprobs) { body.logprobs = true; body.top_logprobs = 5; }
    } else {
      body.prompt = prompt;
      if (state.logprobs) body.logprobs = 5;
    }
    return body;
  }

  async function send() {
    const prompt = box.value;
    if (!prompt.trim() || state.running) return;
    state.running = new AbortController();
    go.textContent = "Stop";
    if (state.mode === "chat") { box.value = ""; grow(box); }
    const answered = await Promise.all(shown.map((panel) => answer(panel, prompt, state.running.signal)));
    state.running = null;
    go.textContent = "Send";
    if (answered.includes(false) && !answered.includes(true) && !box.value) { box.value = prompt; grow(box); }
  }

  /** What is no text: asked at once, shown whole. */
  async function look(panel, prompt, signal) {
    const task = TASKS[state.mode], { turns } = panel, began = performance.now();
    fill(panel.foot);
    try {
      const response = await source.ask(panel.model, task.route, request(panel, prompt), sent(keyOf(panel.model)), signal);
      if (!response.ok) throw new Error(await reason(response));
      const told = await response.json();
      if (panel.turns !== turns) return;
      fill(panel.talk, h("div", { class: "turn user" }, prompt), task.show(told, prompt));
      fill(panel.foot, h("span", {}, `${(performance.now() - began).toFixed(0)} ms`));
    } catch (error) {
      if (panel.turns === turns) fill(panel.foot, error.name === "AbortError" ? "stopped" : h("span", { class: "error" }, error.message));
    }
  }

  /** Asks for text and shows it as it comes. Returns whether any came; nothing where it was cleared away meanwhile. */
  async function answer(panel, prompt, signal) {
    const { mode } = state, { turns } = panel;
    panel.asked = true;
    if (mode in TASKS) return look(panel, prompt, signal);
    const body = request(panel, prompt), began = performance.now();
    const asked = h("div", { class: "turn user" }, prompt), out = h("div", { class: `turn assistant waiting ${mode === "chat" ? "" : "raw"}` });
    if (mode === "chat") {
      if (!turns.length) fill(panel.talk);
      panel.talk.append(asked, out);
    } else {
      fill(panel.talk, out);
      out.append(h("span", { class: "prompt" }, prompt));
    }
    const told = { text: "", tokens: 0, first: 0, finish: "" };
    let failed = "";
    try {
      const response = await source.ask(panel.model, mode, { ...body, stream: true, stream_options: { include_usage: true } }, sent(keyOf(panel.model)), signal);
      if (!response.ok) throw new Error(await reason(response));
      for await (const chunk of events(response)) {
        if (panel.turns !== turns) return;
        if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
        if (chunk.usage) told.tokens = chunk.usage.completion_tokens;
        const [choice] = chunk.choices ?? [];
        if (!choice) continue;
        const text = choice.text ?? choice.delta?.content ?? "";
        if (text && !told.first) told.first = performance.now() - began;
        told.text += text;
        told.finish = choice.finish_reason ?? told.finish;
        const low = panel.talk.scrollHeight - panel.talk.scrollTop - panel.talk.clientHeight < 60;
        out.append(...pieces(choice, text));
        if (low) panel.talk.scrollTop = panel.talk.scrollHeight;
      }
    } catch (error) {
      failed = error.name === "AbortError" ? "stopped" : error.message;
    }
    if (panel.turns !== turns) return;
    out.classList.remove("waiting");
    if (mode === "chat" && failed && !told.text) { // as if it had not been asked
      asked.remove(); out.remove();
      if (!turns.length) showEmpty(panel);
    }
    const seconds = (performance.now() - began) / 1000;
    const facts = [told.tokens ? `${told.tokens} tokens` : "", told.tokens ? `${(told.tokens / seconds).toFixed(1)} tokens/s` : "", told.first ? `first after ${told.first.toFixed(0)} ms` : "", told.finish === "length" ? "cut at the most tokens" : ""];
    fill(panel.foot, failed && failed !== "stopped" ? h("span", { class: "error" }, failed) : failed, facts.filter(Boolean).map((fact) => h("span", {}, fact)));
    if (!told.text && !failed) out.append(h("span", { class: "soft" }, "(an empty answer)"));
    if (mode === "chat" && (told.text || !failed)) turns.push({ role: "user", content: prompt }, { role: "assistant", content: told.text });
    return Boolean(told.text) || !failed;
  }

  const last = () => { const panel = shown[0] ?? { model: { name: "model" }, turns: [] }; return request(panel, box.value || panel.turns.at(-2)?.content || TRIES[state.mode][0]); };
  const path = () => pathOf(TASKS[state.mode]?.route ?? state.mode);
  const keyed = () => keyOf(shown[0]?.model ?? {}) !== "";
  const address = () => source.addressOf(shown[0]?.model ?? {}) ?? "http://127.0.0.1:8000";

  function asCurl() {
    const data = JSON.stringify(last(), null, 1).replace(/'/g, "'\\''");
    return `curl ${address()}${path()} \\\n  -H 'Content-Type: application/json' \\\n${keyed() ? "  -H \"Authorization: Bearer $API_KEY\" \\\n" : ""}  -d '${data}'`;
  }

  function asPython() {
    const body = last();
    if (state.mode in TASKS) {
      const headers = keyed() ? `, headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}` : "";
      return `${keyed() ? "import os\n\n" : ""}import httpx\n\nanswer = httpx.post(\n    "${address()}${path()}",\n    json=${python(body)}${headers}\n)\nprint(answer.json())\n`;
    }
    const call = state.mode === "chat" ? "client.chat.completions.create" : "client.completions.create";
    const given = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
    const answer = state.mode === "chat" ? "answer.choices[0].message.content" : "answer.choices[0].text";
    return `from openai import OpenAI\n\nclient = OpenAI(base_url="${address()}/v1", api_key=${keyed() ? "os.environ[\"API_KEY\"]" : "\"none\""})\nanswer = ${call}(\n${given}\n)\nprint(${answer})\n`.replace(/^/, keyed() ? "import os\n\n" : "");
  }

  setMode("completions");
  load();
}

/** Where a kind of request goes. */
export function pathOf(route) {
  return { chat: "/v1/chat/completions", predict: "/predict" }[route] ?? `/v1/${route}`;
}

/** A value as Python writes it. */
export function python(value) {
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

async function reason(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.error ?? body.detail ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The JSON of a stream of server-sent events; an error where it ends before the answer does. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", finished = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += value ?? "";
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = done ? "" : blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const chunk = parsed(data);
        finished ||= Boolean(chunk.choices?.[0]?.finish_reason);
        yield chunk;
      }
      if (done && finished) return;
      if (done) throw new Error(BROKEN);
    }
  } finally {
    reader.cancel().catch(() => {}); // of whoever reads no further
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Error(BROKEN); // amid a line
  }
}

/** The tokens of a chunk in colours where their probabilities came with it, else its text. */
function pieces(choice, text) {
  const told = choice.logprobs;
  if (told?.content) return told.content.map((one) => token(one.token, one.logprob, one.top_logprobs.map((top) => [top.token, top.logprob])));
  if (told?.tokens) return told.tokens.map((one, index) => token(one, told.token_logprobs[index], Object.entries(told.top_logprobs?.[index] ?? {})));
  return [text];
}

function token(text, logprob, tops) {
  const probability = Math.exp(logprob ?? 0);
  const element = h("span", { class: "token", style: { "--doubt": String((1 - probability).toFixed(3)) } }, text);
  let box = null;
  element.addEventListener("pointerenter", () => {
    const rows = [...tops].sort((one, other) => other[1] - one[1]).map(([name, value]) => h("div", {}, h("b", {}, JSON.stringify(name)), h("span", {}, percent(Math.exp(value)))));
    box = h("div", { class: "tops" }, rows.length ? rows : h("div", {}, h("b", {}, JSON.stringify(text)), h("span", {}, percent(probability))));
    document.body.append(box);
    const place = element.getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${place.bottom + box.offsetHeight + 8 > innerHeight ? place.top - box.offsetHeight - 4 : place.bottom + 4}px`;
  });
  element.addEventListener("pointerleave", () => { box?.remove(); box = null; });
  return element;
}

const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;

function grow(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
