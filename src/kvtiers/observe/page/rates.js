// Figures out of /state: rates over a short window, sums of counters, words. No document here.

const WINDOW_S = 10;

const key = (counter) => [counter.name, ...counter.labels].join("\n");

/** The states of the last ten seconds of one engine; another engine, or one begun anew, empties it. */
export class Window {
  #states = [];
  #gap = false;

  add(state) {
    const counters = new Map((state.counters ?? []).map((c) => [key(c), c.value]));
    const { now, started_at: begun } = state.engine;
    const last = this.#states.at(-1);
    if (this.#gap || (last && (last.begun !== begun || last.now > now))) this.#states = [];
    this.#gap = false;
    this.#states.push({ now, begun, counters });
    while (this.#states.length > 2 && now - this.#states[1].now >= WINDOW_S) this.#states.shift();
  }

  /** The engine is silent: sums stay what they were, rates are not known. */
  pause() {
    this.#states = this.#states.slice(-1);
    this.#gap = true;
  }

  /** Whether there are rates. */
  get known() {
    return this.#states.length > 1;
  }

  /** Since the engine's start: the sum of a counter's samples whose first labels are these. */
  total(name, ...labels) {
    const last = this.#states.at(-1);
    return last ? sum(last.counters, [name, ...labels]) : null;
  }

  /** How much that grew within the window; null while nobody knows. */
  grown(name, ...labels) {
    const [first, last] = [this.#states[0], this.#states.at(-1)];
    if (!first || first === last) return null;
    const wanted = [name, ...labels];
    const now = sum(last.counters, wanted);
    return now === null ? null : Math.max(0, now - (sum(first.counters, wanted) ?? 0));
  }

  /** That per second. */
  rate(name, ...labels) {
    const grown = this.grown(name, ...labels);
    const seconds = this.#states.length ? this.#states.at(-1).now - this.#states[0].now : 0;
    return grown === null || !(seconds > 0) ? null : grown / seconds;
  }

  /** All samples of a counter, the largest first. */
  samples(name) {
    const found = [];
    for (const [k, value] of this.#states.at(-1)?.counters ?? []) {
      const [its, ...labels] = k.split("\n");
      if (its === name && value) found.push({ labels, value, rate: this.rate(name, ...labels) });
    }
    return found.sort((a, b) => b.value - a.value);
  }
}

function sum(counters, wanted) {
  let found = null;
  for (const [k, value] of counters) {
    const parts = k.split("\n");
    if (wanted.every((part, i) => parts[i] === part)) found = (found ?? 0) + value;
  }
  return found;
}

export function ratio(part, whole) {
  return part === null || !whole ? null : part / whole;
}

const NONE = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  if (count === null || count === undefined) return NONE;
  let unit = 0;
  while (count >= 1023.95 && unit < UNITS.length - 1) [count, unit] = [count / 1024, unit + 1];
  return `${unit ? count.toFixed(1) : Math.round(count)} ${UNITS[unit]}`;
}

export function speed(perSecond) {
  if (perSecond === null) return NONE;
  return perSecond >= 1e9 ? `${(perSecond / 1e9).toFixed(2)} GB/s` : `${(perSecond / 1e6).toFixed(1)} MB/s`;
}

export function share(part) {
  return part === null ? NONE : `${Math.round(100 * part)} %`;
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return NONE;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(1000 * seconds).toFixed(1)} ms` : `${Math.round(1e6 * seconds)} µs`;
}

export function clock(epochSeconds) {
  return new Date(1000 * epochSeconds).toLocaleTimeString("en-GB");
}
