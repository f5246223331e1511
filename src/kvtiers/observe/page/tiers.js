// The tiers as a flow: the device, host memory, and whatever lies below.

import { bytes, number, ratio, share, speed } from "./rates.js";
import { fill, make, say } from "./dom.js";

const PRIMARY = "0:primary";
const NAMES = {
  primary: "Host memory",
  fs: "Disk",
  obj: "Bucket",
  kv: "Key-value server",
  p2p: "Peers",
  memory: "Memory",
};

export function nameOf(label) {
  const kind = label.slice(label.indexOf(":") + 1);
  return NAMES[kind] ?? kind;
}

/** Draws tiers below `root`; a tile is made once and its words are changed from then on. */
export class Flow {
  #root;
  #tiles = new Map();
  #shown = "";

  constructor(root) {
    this.#root = root;
  }

  draw(state, past) {
    const tiers = state.tiers.filter((tier) => tier.label !== "device");
    const labels = JSON.stringify(tiers.map((tier) => tier.label));
    if (labels !== this.#shown) this.#build(tiers);
    this.#shown = labels;
    const device = state.tiers.find((tier) => tier.label === "device") ?? { label: "device" };
    this.#tile("device", device, past);
    for (const tier of tiers) this.#tile(tier.label, tier, past);
    for (const tier of tiers) this.#link(tier.label, state, past);
  }

  #build(tiers) {
    this.#tiles.clear();
    const host = tiers.find((tier) => tier.label === PRIMARY);
    const below = tiers.filter((tier) => tier !== host);
    const parts = [this.#newTile("device", "Device")];
    if (host) parts.push(this.#newLink(PRIMARY, "Device and host memory"));
    if (host) parts.push(this.#newTile(PRIMARY, nameOf(PRIMARY)));
    const branches = below.map((tier) => {
      const name = nameOf(tier.label);
      const link = this.#newLink(tier.label, `Host memory and ${name}`);
      return make("div", { className: "branch" }, link, this.#newTile(tier.label, name));
    });
    if (branches.length) parts.push(make("div", { className: "below" }, ...branches));
    fill(this.#root, parts);
  }

  #newTile(label, name) {
    const words = {};
    const rows = (label === "device" ? DEVICE_ROWS : ROWS).map(([id, title]) => {
      words[id] = make("dd", { className: id });
      return make("div", {}, make("dt", {}, title), words[id]);
    });
    const bar = make("div", { className: "filled" });
    const badge = make("span", { className: "badge" });
    const heading = make("h3", {}, name, " ", make("small", {}, label === "device" ? "" : label));
    const full = make("div", { className: "bar", ariaHidden: "true" }, bar);
    const tile = make("article", { className: "tier" }, heading, badge, full, make("dl", {}, ...rows));
    tile.dataset.tier = label;
    this.#tiles.set(label, { words, bar, badge, tile });
    return tile;
  }

  #newLink(label, title) {
    const [out, back] = label === PRIMARY ? ["store", "load"] : ["cascade", "promote"];
    const away = make("span", { className: "away" });
    const towards = make("span", { className: "towards" });
    const link = make("div", { className: "link", role: "group", ariaLabel: title }, away, towards);
    this.#tiles.set(`link ${label}`, { link, hops: [[out, away, "→"], [back, towards, "←"]] });
    return link;
  }

  #tile(label, tier, past) {
    const { words, bar, badge, tile } = this.#tiles.get(label);
    const used = label === PRIMARY ? tier.resident_bytes : (tier.used_bytes ?? tier.resident_bytes);
    const full = ratio(used ?? null, tier.capacity_bytes);
    bar.style.width = `${100 * Math.min(1, full ?? 0)}%`;
    const state = tier.state ?? "";
    say(badge, state);
    tile.classList.toggle("alone", state === "left alone");
    for (const [id, , figure] of label === "device" ? DEVICE_ROWS : ROWS)
      tell(words[id], figure(tier, past, { used, full }));
  }

  #link(label, state, past) {
    const { link, hops } = this.#tiles.get(`link ${label}`);
    let moving = false;
    for (const [hop, element, arrow] of hops) {
      const now = (state.active ?? []).find((a) => a.hop === hop && a.tier === label);
      const rate = past.rate("bytes", hop, label);
      const chunks = past.rate("copied", hop);
      const flow = rate === null && chunks !== null ? `${number(chunks, 1)} chunks/s` : speed(rate);
      moving ||= (rate ?? chunks ?? 0) > 0 || Boolean(now?.jobs);
      say(element, `${arrow} ${hop} ${flow}${now?.jobs ? `, ${now.jobs} in flight` : ""}`);
    }
    link.classList.toggle("moving", moving);
  }
}

/** A row about which nothing is known of this tier is not there. */
function tell(element, text) {
  say(element, text ?? "");
  element.parentElement.hidden = text === null;
}

const known = (...values) => values.some((value) => value !== null && value !== undefined);

const ROWS = [
  ["hit", "Hit rate now", (t, past) => share(hitRate(t.label, past))],
  ["ever", "Hit rate since the start", (t, past) => share(hitRateEver(t.label, past))],
  ["asked", "Asked, chunks/s", (t, past) => number(past.rate("lookups", t.label), 1)],
  ["room", "Holds", (t, past, { used }) => room(used, t.capacity_bytes)],
  ["full", "Full", (t, past, { full }) => (full === null ? null : share(full))],
  ["pinned", "Pinned", (t) => (known(t.pinned_bytes) ? bytes(t.pinned_bytes) : null)],
  ["filling", "Being filled", (t) => (known(t.filling_bytes) ? bytes(t.filling_bytes) : null)],
  ["removed", "Removed, chunks/s", (t, past) => number(past.rate("removed", t.label) ?? 0, 1)],
];
const DEVICE_ROWS = [
  ["asked", "Asked for, chunks/s", (t, past) => number(past.rate("lookups", PRIMARY), 1)],
  ["loaded", "Loaded, tokens/s", (t, past) => number(past.rate("loaded_tokens"), 1)],
];

function room(used, capacity) {
  if (!known(used, capacity)) return null;
  return known(capacity) ? `${bytes(used)} of ${bytes(capacity)}` : bytes(used);
}

export function hitRate(label, past) {
  return ratio(past.grown("hits", label) ?? 0, past.grown("lookups", label));
}

function hitRateEver(label, past) {
  return ratio(past.total("hits", label) ?? 0, past.total("lookups", label));
}

/** One sentence for who listens instead of looking. */
export function summary(state, past) {
  const known = state.tiers.filter((tier) => tier.label !== "device");
  const words = known.map((tier) => {
    const rate = hitRate(tier.label, past);
    return `${nameOf(tier.label)} ${rate === null ? "was not asked" : `hit ${share(rate)}`}`;
  });
  return words.length ? `In the last seconds: ${words.join(", ")}.` : "This engine has no tiers.";
}
