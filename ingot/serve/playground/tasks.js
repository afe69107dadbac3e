// What models answer that do not talk: classes, scores, masks, and how alike texts are. For each task
// what it is called, what to try, the request, and its answer as elements.
import { h } from "./dom.js";

const DIVIDER = /\n---\n/;
const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

export const TASKS = {
  classes: {
    name: "Classes", route: "predict", placeholder: "A text to put into a class",
    tries: ["A film that one does not forget.", "The heating was broken all week.", "It arrived on Tuesday."],
    body: (text) => ({ instances: [text] }),
    show: ({ predictions: [one] }) => bars(Object.entries(one.scores)),
  },
  score: {
    name: "Score", route: "predict", placeholder: "A question, then after a line with --- an answer, and others after further such lines",
    tries: ["How do I cook rice?\n---\nRinse it, add twice the water, and let it stand covered.\n---\nNo idea."],
    body: (text) => ({ instances: judged(text).map(([, instance]) => instance) }),
    show: ({ predictions }, text) => {
      const found = predictions.map((one, place) => [judged(text)[place][0], Object.values(one.scores)[0]]);
      return rows(found.sort((one, other) => other[1] - one[1]).map(([answer, score]) => [answer, score.toFixed(3)]));
    },
  },
  masks: {
    name: "Masks", route: "predict", placeholder: "A text with [MASK] where something is left out",
    tries: ["The capital of France is [MASK].", "She poured the [MASK] into the [MASK]."],
    body: (text) => ({ instances: [text] }),
    show: ({ predictions: [one] }) => [
      h("p", {}, one.text),
      one.masks.map((mask, place) => [
        one.masks.length > 1 ? h("p", { class: "fine" }, `mask ${place + 1}`) : null,
        bars(mask.map((choice) => [choice.token_str, choice.score])),
      ]),
    ],
  },
  embeddings: {
    name: "Likeness", route: "embeddings", placeholder: "Texts to compare, one in each line",
    tries: ["The cat sleeps on the sofa.\nA kitten naps on the couch.\nInterest rates rose again."],
    body: (text) => ({ input: lines(text) }),
    show: ({ data }, text) => likeness(lines(text), data.map((one) => one.embedding)),
  },
};

/** Each answer to the question with the chat in which it is judged; without answers the text itself. */
function judged(text) {
  const [question, ...answers] = text.split(DIVIDER).map((part) => part.trim());
  if (!answers.length) return [[question, { text: question }]];
  return answers.map((content) => [content, { messages: [{ role: "user", content: question }, { role: "assistant", content }] }]);
}

/** Probabilities by name, the likeliest first. */
function bars(found) {
  const sorted = [...found].sort((one, other) => other[1] - one[1]);
  return rows(sorted.map(([name, share]) => [name, `${(100 * share).toFixed(1)} %`, share]));
}

/** Names and numbers below each other, with a bar for what is a share. */
function rows(found) {
  return h("div", { class: "shares" }, found.map(([name, number, share]) => h("div", { class: "share", style: { "--share": String(share ?? 0) } }, h("span", {}, name), h("b", {}, number))));
}

/** How alike texts are, each with each: the cosine of their vectors, which have length 1. */
function likeness(texts, vectors) {
  const cosine = (one, other) => one.reduce((sum, value, place) => sum + value * other[place], 0);
  const head = h("tr", {}, h("th", {}), texts.map((_, place) => h("th", { scope: "col" }, String(place + 1))));
  const body = texts.map((text, row) => h("tr", {}, h("th", { scope: "row" }, `${row + 1}. ${text}`), vectors.map((vector, column) => {
    const value = cosine(vectors[row], vector);
    return h("td", { class: "like", style: { "--share": String(row === column ? 0 : Math.max(0, value)) } }, value.toFixed(2));
  })));
  return h("div", { class: "wide" }, h("table", { class: "likeness" }, head, body));
}
