// Numbers and times for people.
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

/** 12.3 k and the like; small numbers with four figures. */
export function short(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size >= 1e4) return count(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

/** A label of an axis, with only as many figures as labels that are `apart` need. */
export function rounded(value, apart) {
  if (!value) return "0";
  const size = Math.abs(value), power = (one) => Math.floor(Math.log10(one) + 1e-9), digits = Math.min(Math.max(power(size) - power(apart) + 1, 1), 15);
  if (size < 1e-3) return value.toExponential(digits - 1);
  if (size < 1e4) return value.toFixed(Math.max(-power(apart), 0));
  const [unit, name] = UNITS.find(([one]) => size >= one);
  return `${Number((value / unit).toPrecision(digits))} ${name}`;
}

/** The 95 % interval of a metric, or that it is not known. */
export function interval({ ci_low: low, ci_high: high }) {
  return low === null ? "not known" : `${short(low)} to ${short(high)}`;
}

export function count(value) {
  if (value === null || value === undefined) return "";
  for (const [unit, name] of UNITS) if (Math.abs(value) >= unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
  return String(Number(value.toPrecision(3)));
}

export const whole = (value) => (value === null || value === undefined ? "" : Math.round(value).toLocaleString("en"));
export const percent = (value) => (value === null || value === undefined ? "" : `${(100 * value).toFixed(value > 0.995 && value < 1 ? 2 : 1)} %`);
export const money = (value) => (value === null || value === undefined ? "" : `$${value.toFixed(2)}`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const all = Math.max(0, Math.round(seconds)), two = (value) => String(Math.floor(value)).padStart(2, "0");
  if (all < 60) return `${all}s`;
  if (all < 3600) return `${Math.floor(all / 60)}m ${two(all % 60)}s`;
  if (all < 172800) return `${Math.floor(all / 3600)}h ${two((all % 3600) / 60)}m`;
  return `${Math.floor(all / 86400)}d ${two((all % 86400) / 3600)}h`;
}

/** A time since the beginning, down to the unit in which labels that are `apart` differ. */
export function elapsed(seconds, apart = 1) {
  if (apart < 1) return `${rounded(seconds, apart)}s`;
  const all = Math.round(seconds), parts = [[Math.floor(all / 86400), "d", 0], [Math.floor(all / 3600) % 24, "h", 86400], [Math.floor(all / 60) % 60, "m", 3600], [all % 60, "s", 60]];
  const first = Math.max(parts.findIndex(([value]) => value), 0), told = parts.filter(([value, , most], index) => index >= first && (!most || apart < most || apart % most));
  return all ? told.map(([value, unit], index) => `${index ? String(value).padStart(2, "0") : value}${unit}`).join(" ") : "0s";
}

export function ago(when) {
  if (!when) return "";
  const seconds = Date.now() / 1000 - when;
  return seconds < 5 ? "now" : seconds < 172800 ? `${duration(seconds).split(" ")[0]} ago` : clock(when);
}

export function clock(when) {
  if (!when) return "";
  const date = new Date(when * 1000), two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** A clock with its zone: of seconds since the epoch. */
export function moment(when) {
  const zone = new Intl.DateTimeFormat("en", { timeZoneName: "short" }).formatToParts(new Date((when || 0) * 1000)).find(({ type }) => type === "timeZoneName").value;
  return when ? `${clock(when)} ${zone}` : "";
}
