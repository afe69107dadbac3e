// Curves on a canvas: zoom by dragging, the values under the pointer, smoothing and log scale.
import { fill, h } from "../playground/dom.js";
import { rounded, short } from "./format.js";

const LIGHT = ["#c94f14", "#1f6f8b", "#2f7d4f", "#8e4fb3", "#a87908", "#c2386b", "#4a6fd0", "#6b7a1f", "#7a5c46", "#0f9b8e"];
const DARK = ["#ff8b47", "#62bfdc", "#6cc48f", "#c08be0", "#e3b04b", "#f07aa6", "#8fa8ff", "#b4c45a", "#c2a08a", "#4fd1c5"];
const TIMES = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((one) => 60 * one), ...[1, 2, 3, 6, 12, 24].map((one) => 3600 * one)];
const FEW = 40; // so many points are drawn one by one, as they are
const dark = matchMedia("(prefers-color-scheme: dark)");
export const colourOf = (index) => (dark.matches ? DARK : LIGHT)[index % LIGHT.length];

/** What the drawn value of a curve is, where it is not just what was logged. */
function kind({ smooth, n, x }) {
  if (smooth) return "smoothed";
  const fewest = Math.floor(n / x.length), most = Math.ceil(n / x.length);
  return most === 1 ? "" : `mean of ${fewest === most ? most : `${fewest} to ${most}`} logged`;
}

/** Round numbers from low to high. */
export function ticks(low, high, wanted, kind = "number") {
  const rough = (high - low) / Math.max(wanted, 1), power = 10 ** Math.floor(Math.log10(rough));
  const steps = kind === "time" && rough > 1 ? TIMES : [1, 2, 5, 10].map((one) => one * power);
  let step = steps.find((one) => one >= rough) ?? Math.ceil(rough / steps.at(-1)) * steps.at(-1);
  if (kind === "step") step = Math.max(step, 1);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

/** Labels of the horizontal axis, at least two where there are two to be had. */
export function across(low, high, wanted, kind) {
  let found = [];
  for (let more = 0; found.length < 2 && more < 4; more += 1) found = ticks(low, high, wanted + more, kind);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) for (const one of [1, 2, 5]) { const value = one * 10 ** power; if (value >= low && value <= high) found.push(value); }
  return found.length > 8 ? found.filter((value) => /^1(e|0|$|\.)/.test(String(value)) || Math.log10(value) % 1 === 0) : found.length > 1 ? found : ticks(low, high, 4);
}

export class Chart {
  /** `zoom(low, high)` is called when a range was dragged, `zoom(null, null)` to see all again. */
  constructor(root, { zoom, formatX = short }) {
    this.root = root;
    this.options = { log: false, formatX };
    this.series = [];
    this.canvas = h("canvas", { role: "img" });
    this.over = h("canvas", { "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", hidden: true });
    fill(root, this.canvas, this.over, this.tip);
    this.zoom = zoom;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(root);
    this.visible = false;
    this.watch = new IntersectionObserver(([entry]) => { this.visible = entry.isIntersecting; if (this.visible && this.stale) this.draw(); }, { rootMargin: "150px" });
    this.watch.observe(root);
    this.redraw = () => this.draw();
    dark.addEventListener("change", this.redraw);
    root.addEventListener("pointermove", (event) => this.#move(event));
    root.addEventListener("pointerleave", () => this.#leave());
    root.addEventListener("pointerdown", (event) => { if (event.button === 0) { this.from = this.#at(event); root.setPointerCapture(event.pointerId); } });
    root.addEventListener("pointerup", (event) => this.#release(event));
    root.addEventListener("pointercancel", () => { this.from = null; this.#leave(); });
    root.addEventListener("dblclick", () => this.zoom?.(null, null));
  }

  close() {
    this.observer.disconnect();
    this.watch.disconnect();
    dark.removeEventListener("change", this.redraw);
  }

  /** `series`: { name, index, x, y, smooth, low, high, n, lost } each; `options`: label, log, range of x. */
  set(series, options = {}) {
    this.series = series.map((one) => ({ ...one, drawn: one.smooth ?? one.y }));
    Object.assign(this.options, options);
    this.canvas.setAttribute("aria-label", `${this.options.label} of ${series.map((one) => one.name).join(", ")}`);
    this.draw();
  }

  #bounds() {
    const { range, log } = this.options;
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const one of this.series) {
      for (let i = 0; i < one.x.length; i += 1) {
        const x = one.x[i];
        if (range && (x < range[0] || x > range[1])) continue;
        if (x < x0) x0 = x;
        if (x > x1) x1 = x;
        const [low, high] = one.smooth ? [one.smooth[i], one.smooth[i]] : [one.low?.[i] ?? one.y[i], one.high?.[i] ?? one.y[i]];
        if (low < y0 && !(log && low <= 0)) y0 = low;
        if (high > y1) y1 = high;
      }
    }
    for (const { lost } of this.#lost(...(range ?? []))) { x0 = Math.min(x0, lost); x1 = Math.max(x1, lost); }
    if (range) [x0, x1] = range;
    if (x0 === Infinity || y0 === Infinity) return null;
    const only = x0 === x1 ? x0 : null;
    if (only !== null) { x0 -= 0.5; x1 += 0.5; }
    if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
    this.isLog = log && y0 > 0;
    const pad = this.isLog ? (y1 / y0) ** 0.06 : (y1 - y0) * 0.06;
    return { only, x0, x1, y0: this.isLog ? y0 / pad : y0 - pad, y1: this.isLog ? y1 * pad : y1 + pad };
  }

  /** The series that cease to be finite, where that is in sight. */
  #lost(low = -Infinity, high = Infinity) {
    return this.series.filter(({ lost }) => lost !== null && lost >= low && lost <= high);
  }

  draw() {
    const width = this.root.clientWidth, height = this.root.clientHeight, scale = devicePixelRatio || 1;
    if (!width || !height) return;
    this.stale = !this.visible;
    if (this.stale) return;
    for (const canvas of [this.canvas, this.over]) {
      if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
      const context = canvas.getContext("2d");
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
    }
    const c = this.canvas.getContext("2d"), style = getComputedStyle(this.root), soft = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
    c.font = `11.5px ${style.fontFamily}`;
    this.box = null;
    const bounds = this.#bounds();
    if (!bounds) { c.fillStyle = soft; c.textAlign = "center"; c.fillText(this.series.some(({ lost }) => lost !== null) ? "no finite number here" : "nothing logged here yet", width / 2, height / 2); return; }
    const yTicks = this.isLog ? logTicks(bounds.y0, bounds.y1) : ticks(bounds.y0, bounds.y1, Math.max(2, height / 55));
    const apart = yTicks[1] - yTicks[0], label = (value) => (yTicks.length < 2 || (this.isLog && yTicks[1] >= 2 * yTicks[0]) ? short(value) : rounded(value, apart));
    const left = Math.ceil(Math.max(...yTicks.map((value) => c.measureText(label(value)).width), 18)) + 10, right = width - 6, top = 8, bottom = height - 22;
    const x = (value) => left + ((value - bounds.x0) / (bounds.x1 - bounds.x0)) * (right - left);
    // On a log scale zero has no place: a picture's height below, out of sight.
    const lift = this.isLog ? (value) => (value > 0 ? (Math.log(value) - Math.log(bounds.y0)) / (Math.log(bounds.y1) - Math.log(bounds.y0)) : -1) : (value) => (value - bounds.y0) / (bounds.y1 - bounds.y0);
    const y = (value) => bottom - lift(value) * (bottom - top);
    this.box = { ...bounds, left, right, top, bottom, x, y, width, height };
    c.strokeStyle = line; c.fillStyle = soft; c.lineWidth = 1; c.textBaseline = "middle"; c.textAlign = "right";
    for (const value of yTicks) { const at = Math.round(y(value)) + 0.5; c.beginPath(); c.moveTo(left, at); c.lineTo(right, at); c.stroke(); c.fillText(label(value), left - 7, at); }
    c.textBaseline = "alphabetic"; c.textAlign = "center";
    const xTicks = bounds.only === null ? across(bounds.x0, bounds.x1, Math.max(2, (right - left) / 95), this.options.axis) : [bounds.only];
    for (const value of xTicks) { const text = this.options.formatX(value, xTicks.length > 1 ? xTicks[1] - xTicks[0] : undefined), half = c.measureText(text).width / 2; c.fillText(text, Math.min(Math.max(x(value), left + half - 4), right - half), height - 5); }
    c.save(); c.beginPath(); c.rect(left - 5, top - 4, right - left + 10, bottom - top + 8); c.clip();
    for (const one of this.series) this.#line(c, one, x, y);
    c.restore();
    this.#lost(bounds.x0, bounds.x1).forEach((one, row) => this.#end(c, one, Math.round(x(one.lost)) + 0.5, row));
  }

  /** A mark where a curve ceases to be finite, its words on the side that has more room. */
  #end(c, one, at, row) {
    const { left, right, top, bottom } = this.box;
    c.strokeStyle = c.fillStyle = colourOf(one.index);
    c.lineWidth = 1.5; c.setLineDash([4, 3]); c.beginPath(); c.moveTo(at, top); c.lineTo(at, bottom); c.stroke(); c.setLineDash([]);
    const late = at > (left + right) / 2;
    c.textAlign = late ? "right" : "left";
    c.fillText(`not finite from ${this.options.unit}${this.options.formatX(one.lost)}`, at + (late ? -6 : 6), top + 9 + 14 * row);
  }

  #line(c, one, x, y) {
    c.strokeStyle = c.fillStyle = colourOf(one.index);
    c.lineJoin = "round";
    const path = (values) => { c.beginPath(); for (let i = 0; i < values.length; i += 1) c.lineTo(x(one.x[i]), y(values[i])); c.stroke(); };
    if (one.low && this.series.length <= 12) {
      c.globalAlpha = one.smooth ? 0.1 : 0.2;
      c.beginPath();
      for (let i = 0; i < one.x.length; i += 1) c.lineTo(x(one.x[i]), y(one.high[i]));
      for (let i = one.x.length - 1; i >= 0; i -= 1) c.lineTo(x(one.x[i]), y(one.low[i]));
      c.fill();
    } else if (one.smooth && this.series.length <= 12) { c.globalAlpha = 0.2; c.lineWidth = 1; path(one.y); }
    c.globalAlpha = 1;
    c.lineWidth = this.series.length > 20 ? 1.1 : 1.9;
    path(one.drawn);
    if (one.x.length <= FEW) for (let i = 0; i < one.x.length; i += 1) { c.beginPath(); c.arc(x(one.x[i]), y(one.drawn[i]), 2.6, 0, 7); c.fill(); }
  }

  #at(event) {
    return event.clientX - this.root.getBoundingClientRect().left;
  }

  #move(event) {
    if (!this.box) return;
    const { left, right, top, bottom, x0, x1, x, y, width } = this.box, at = Math.min(Math.max(this.#at(event), left), right), c = this.over.getContext("2d");
    c.clearRect(0, 0, width, this.box.height);
    const style = getComputedStyle(this.root);
    if (this.from !== null && this.from !== undefined && Math.abs(at - this.from) > 4) {
      c.fillStyle = style.getPropertyValue("--cool"); c.globalAlpha = 0.15; c.fillRect(Math.min(this.from, at), top, Math.abs(at - this.from), bottom - top); c.globalAlpha = 1;
    }
    const value = x0 + ((at - left) / (right - left)) * (x1 - x0);
    const near = [];
    for (const one of this.series) { const i = nearest(one.x, value); if (i >= 0 && Math.abs(x(one.x[i]) - at) < 60) near.push({ one, i, apart: Math.abs(one.x[i] - value) }); }
    if (!near.length) { this.tip.hidden = true; return; }
    const anchor = near.reduce((best, each) => (each.apart < best.apart ? each : best)), place = x(anchor.one.x[anchor.i]);
    c.strokeStyle = style.getPropertyValue("--calm"); c.setLineDash([3, 3]); c.beginPath(); c.moveTo(place, top); c.lineTo(place, bottom); c.stroke(); c.setLineDash([]);
    for (const { one, i } of near) { c.fillStyle = colourOf(one.index); c.beginPath(); c.arc(x(one.x[i]), y(one.drawn[i]), 3.6, 0, 7); c.fill(); }
    near.sort((a, b) => a.one.drawn[a.i] - b.one.drawn[b.i]);
    const kinds = new Set(near.map(({ one }) => kind(one)));
    fill(this.tip, h("div", { class: "soft" }, [this.options.formatX(anchor.one.x[anchor.i]), ...kinds].filter(Boolean).join(", ")), near.slice(0, 10).map(({ one, i }) => h("div", {}, h("i", { style: { "--c": colourOf(one.index) } }), this.series.length > 1 ? h("span", {}, one.name) : "", h("b", {}, short(one.drawn[i])))), near.length > 10 ? h("div", { class: "soft" }, `and ${near.length - 10} more`) : "");
    this.tip.hidden = false;
    const size = this.tip.offsetWidth;
    this.tip.style.left = `${place + size + 20 > width ? Math.max(place - size - 12, 0) : place + 12}px`;
    this.tip.style.top = `${top + 6}px`;
  }

  #leave() {
    this.tip.hidden = true;
    if (this.box) this.over.getContext("2d").clearRect(0, 0, this.box.width, this.box.height);
  }

  #release(event) {
    const from = this.from;
    this.from = null;
    if (from === null || from === undefined || !this.box) return;
    const at = this.#at(event), { left, right, x0, x1 } = this.box;
    if (Math.abs(at - from) < 8) return;
    const value = (place) => x0 + ((Math.min(Math.max(place, left), right) - left) / (right - left)) * (x1 - x0);
    this.#leave();
    const low = value(Math.min(from, at)), high = value(Math.max(from, at));
    this.zoom?.(...(this.options.axis === "time" ? [low, high] : [Math.floor(low), Math.ceil(high)])); // steps and tokens are whole
  }
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  if (high < 0) return -1;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle + 1; else high = middle; }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}
