// Asks the engine that serves this page once a second, and draws what it says.

import { Window, clock, number } from "./rates.js";
import { fill, make, say } from "./dom.js";
import { Flow, nameOf, summary } from "./tiers.js";
import { Recent, life } from "./requests.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const SPOKEN_EVERY_MS = 10000;
const MOST = 8;

const at = (id) => document.getElementById(id);
const past = new Window();
const flow = new Flow(at("flow"));
const recent = new Recent(at("recent"), (id) => show(id, true));
let paused = false;
let answeredAt = null;
let spokenAt = -Infinity;
let chosen = null;
let stamp = null;
let last = null;

async function get(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  if (!answer.ok) throw Object.assign(new Error(`${path} answers ${answer.status}`), { answer });
  return answer.json();
}

async function look() {
  try {
    const [state, requests] = await Promise.all([get("state"), get("requests?limit=50")]);
    if (paused) return;
    past.add(state);
    last = [state, requests.requests ?? []];
    answeredAt = state.engine.now;
    draw(...last);
    if (state.engine.inert) status("silent", "Offloading is switched off after a fault");
    else status("live", "Live");
  } catch (problem) {
    if (paused) return;
    past.pause();
    if (last) draw(...last);
    const since = answeredAt === null ? "yet" : `since ${clock(answeredAt)}`;
    status("silent", `No answer ${since}`);
    console.debug(problem);
  }
}

function draw(state, requests) {
  const { model, namespace, replica, started_at: begun } = state.engine;
  const words = [model, `namespace ${String(namespace ?? "").slice(0, 12)}`, `replica ${replica}`];
  say(at("engine"), `${words.join(", ")}, started ${clock(begun)}`);
  flow.draw(state, past);
  counts("sources", past.samples("loaded_tokens"), ([tier]) => nameOf(tier), "tokens");
  counts("misses", missed(), ([tier, reason]) => `${nameOf(tier)}: ${reason}`, "chunks");
  counts("trouble", trouble(), (labels) => `${labels[0]} ${labels[1]}: ${labels[2]}`, "chunks");
  recent.draw(requests, chosen);
  const settled = requests.find((request) => request.request_id === chosen)?.settled_at;
  if (chosen !== null && settled !== undefined && settled !== stamp) show(chosen, false);
  if (past.known && performance.now() - spokenAt >= SPOKEN_EVERY_MS) {
    spokenAt = performance.now();
    say(at("summary"), summary(state, past));
  }
}

const missed = () => past.samples("lookup_misses");

function trouble() {
  return [...past.samples("declined"), ...past.samples("chunks_failed")];
}

function counts(id, samples, title, unit) {
  const rows = samples.slice(0, MOST).map(({ labels, value, rate }) => {
    const now = rate ? `, ${number(rate, 1)}/s now` : "";
    return `${title(labels)}: ${number(value)} ${unit}${now}`;
  });
  const list = at(id);
  const shown = rows.length ? rows : ["none"];
  while (list.children.length > shown.length) list.lastChild.remove();
  while (list.children.length < shown.length) list.append(make("li"));
  shown.forEach((text, i) => say(list.children[i], text));
}

/** The life of a request; `move` the focus there if a person asked for it. */
async function show(id, move) {
  chosen = id;
  let body;
  try {
    const record = await get(`requests/${encodeURIComponent(id)}`);
    stamp = record.settled_at;
    body = life(record);
  } catch (problem) {
    const gone = problem.answer?.status === 404;
    body = [make("p", {}, gone ? "Nothing is known of it, or no longer." : "The engine does not answer.")];
  }
  if (chosen !== id) return;
  say(at("life-title"), `Request ${id}`);
  fill(at("life-body"), body);
  at("life").hidden = false;
  for (const button of document.querySelectorAll("[data-request]"))
    button.setAttribute("aria-pressed", String(button.dataset.request === id));
  if (move) at("life-title").focus();
}

function back() {
  const button = [...document.querySelectorAll("[data-request]")].find(
    (each) => each.dataset.request === chosen,
  );
  chosen = stamp = null;
  at("life").hidden = true;
  button?.setAttribute("aria-pressed", "false");
  (button ?? at("wanted")).focus();
}

function status(kind, words) {
  document.body.dataset.engine = kind;
  say(at("status"), words);
}

at("back").addEventListener("click", back);
at("life").addEventListener("keydown", (event) => {
  if (event.key === "Escape") back();
});
at("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = at("wanted").value.trim();
  if (id) show(id, true);
});
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  if (paused) status("paused", `Paused at ${answeredAt === null ? "the start" : clock(answeredAt)}`);
});

async function forever() {
  for (;;) {
    if (!paused && !document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

forever();
