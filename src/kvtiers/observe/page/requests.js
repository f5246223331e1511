// The latest requests, and the life of one: when it came, who was asked, what was found where.

import { clock, number, span } from "./rates.js";
import { fill, make, say } from "./dom.js";
import { nameOf } from "./tiers.js";

const sourceName = (label) => (label === "missed" ? "Computed" : `Loaded from ${nameOf(label)}`);

function parts(tokens) {
  const found = Object.entries(tokens?.by_source ?? {}).filter(([, count]) => count > 0);
  return tokens?.missed ? [...found, ["missed", tokens.missed]] : found;
}

/** The list: one button a request, made once and kept, so that the focus stays on it. */
export class Recent {
  #list;
  #choose;
  #items = new Map();

  constructor(list, choose) {
    this.#list = list;
    this.#choose = choose;
  }

  draw(requests, chosen) {
    const items = new Map();
    for (const request of requests) {
      const id = request.request_id;
      const item = this.#items.get(id) ?? this.#make(id);
      const what = item.querySelector(".what");
      say(item.querySelector(".when"), clock(request.arrived_at));
      say(what, this.#words(request));
      item.firstChild.setAttribute("aria-pressed", String(id === chosen));
      items.set(id, item);
    }
    this.#items = items;
    this.#place([...items.values()]);
    if (!items.size) fill(this.#list, [make("li", { className: "none" }, "No request yet")]);
  }

  /** The one that has the focus is never taken out of the page: that would lose it. */
  #place(items) {
    for (const child of [...this.#list.children])
      if (!items.includes(child)) child.remove();
    items.forEach((item, i) => {
      const there = this.#list.children[i];
      if (there === item) return;
      if (item.contains(document.activeElement)) {
        while (this.#list.children[i] !== item) this.#list.append(this.#list.children[i]);
      } else this.#list.insertBefore(item, there ?? null);
    });
  }

  #make(id) {
    const button = make("button", { type: "button", className: "request" });
    button.append(
      make("span", { className: "when" }),
      make("span", { className: "id" }, id),
      make("span", { className: "what" }),
    );
    button.dataset.request = id;
    button.addEventListener("click", () => this.#choose(id));
    return make("li", {}, button);
  }

  #words(request) {
    const { tokens, waited_s: waited } = request;
    const words = [`${number(tokens?.asked)} tokens asked, ${number(tokens?.missed)} missed`];
    if (waited) words.push(`waited ${span(waited)}`);
    return words.join(", ");
  }
}

/** Everything known of one request. */
export function life(record) {
  const body = [make("p", { className: "why" }, record.why ?? "")];
  body.push(tokenBar(record.tokens), make("h4", {}, "What happened"), steps(record));
  if (record.runs?.length) body.push(make("h4", {}, "Which chunks, and what tiers said"), table(record));
  return body;
}

function tokenBar(tokens) {
  const shown = parts(tokens);
  const bar = make("div", { className: "bar tall", ariaHidden: "true" });
  const legend = make("ul", { className: "legend" });
  shown.forEach(([label, count], i) => {
    const kind = label === "missed" ? "missed" : `source-${i % 4}`;
    const piece = make("div", { className: kind });
    piece.style.width = `${(100 * count) / (tokens.asked || 1)}%`;
    bar.append(piece);
    const swatch = make("span", { className: `swatch ${kind}`, ariaHidden: "true" });
    legend.append(make("li", {}, swatch, `${sourceName(label)}: ${number(count)} tokens`));
  });
  return make("div", { className: "tokens" }, bar, legend);
}

function steps(record) {
  const list = make("ol", { className: "steps" });
  const add = (when, what) =>
    list.append(make("li", {}, make("span", { className: "when" }, when), what));
  add(clock(record.arrived_at), `arrived; ${number(record.tokens?.asked)} tokens were asked for`);
  for (const [tier, { found, missed, seconds }] of told(record.runs ?? [])) {
    const words = [];
    if (found) words.push(`${number(found)} chunks found`);
    for (const [reason, count] of missed) words.push(`${number(count)} ${reason}`);
    add(seconds ? `within ${span(seconds)}` : "at once", `${nameOf(tier)} (${tier}): ${words.join(", ")}`);
  }
  if (record.waited_s) add(`after ${span(record.waited_s)}`, "no longer waited for a tier");
  if (record.settled_at) add(clock(record.settled_at), outcome(record.tokens));
  else add("", "its lookups are not over yet");
  return list;
}

function outcome(tokens) {
  const loaded = parts(tokens).filter(([label]) => label !== "missed");
  if (!loaded.length) return "settled: nothing is loaded, all of it is computed";
  const words = loaded.map(([label, count]) => `${number(count)} from ${nameOf(label)}`);
  return `settled: tokens loaded: ${words.join(", ")}; ${number(tokens?.missed ?? 0)} are computed`;
}

/** What each tier said of all runs together, in the order in which tiers are asked. */
function told(runs) {
  const tiers = new Map();
  for (const run of runs)
    for (const { tier, verdict, reason, seconds } of run.verdicts ?? []) {
      const its = tiers.get(tier) ?? { found: 0, missed: new Map(), seconds: 0 };
      if (reason) its.missed.set(reason, (its.missed.get(reason) ?? 0) + run.count);
      else if (isHit(verdict)) its.found += run.count;
      else its.missed.set(verdict, (its.missed.get(verdict) ?? 0) + run.count);
      its.seconds = Math.max(its.seconds, seconds ?? 0);
      tiers.set(tier, its);
    }
  return [...tiers].sort(([a], [b]) => parseInt(a) - parseInt(b));
}

const isHit = (verdict) => /^(hit|found)/i.test(verdict ?? "");

function table(record) {
  const head = ["Group", "Chunks", "Tokens", "Verdicts"].map((name) =>
    make("th", { scope: "col" }, name),
  );
  const rows = record.runs.map((run) => {
    const verdicts = (run.verdicts ?? []).map((v) =>
      make(
        "li",
        { className: isHit(v.verdict) ? "hit" : "miss" },
        `${v.tier} ${v.verdict}${v.reason ? ` (${v.reason})` : ""}`,
        v.seconds ? ` ${span(v.seconds)}` : "",
      ),
    );
    const last = run.first + run.count - 1;
    return make(
      "tr",
      {},
      make("td", {}, String(run.group)),
      make("td", {}, run.count === 1 ? String(run.first) : `${run.first} to ${last}`),
      make("td", {}, number(run.tokens)),
      make("td", {}, make("ul", { className: "verdicts" }, ...verdicts)),
    );
  });
  const made = make(
    "table",
    {},
    make("caption", {}, "Runs of chunks that had the same fate"),
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...rows),
  );
  if (record.untold_chunks)
    made.tFoot = make("tfoot", {}, make("tr", {}, make("td", { colSpan: 4 }, `and ${number(record.untold_chunks)} more chunks`)));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Runs of chunks" }, made);
}
