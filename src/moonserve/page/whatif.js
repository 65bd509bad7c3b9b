// What if: the load of the last minutes on other clusters, as the twin simulated it, beside what
// happened.

import { clock, count, el, share, time } from "./charts.js";
import { Figures, note, refill, table, tile } from "./parts.js";

const KEYS = [["in time", "c3"], ["late or failed", "amber"], ["refused", "c4"]];

export function whatif(root, frame) {
  const figures = new Figures();
  const place = el("div");
  root.append(el("h1", { class: "hush" }, "What if"), place);
  return {
    every: 5000,
    async update(signal) {
      const told = await frame.get("api/advice", signal);
      refill(place, told.advice ? advised(told, figures) : howToStart());
    },
  };
}

function howToStart() {
  return [
    sentence("", "No twin has reported since this process started, so there is nothing to compare."),
    el("section", {},
      el("h2", {}, "Start a twin"),
      el("p", {}, "A twin simulates the last minutes again and again: with more and fewer instances, other splits and other policies. It says what would have had more requests in time."),
      el("p", {}, "With a cluster on this machine: ", el("code", {}, "moonserve up --advise --ttft-slo 2s --tbt-slo 100ms")),
      el("p", {}, "Beside a cluster that runs: ", el("code", {}, `moonserve twin --url ${location.origin}`)),
      note("It needs objectives, and reports after its first round, which takes a minute.")),
  ];
}

function sentence(level, text, ...notes) {
  const more = notes.filter(Boolean);
  return el("div", { class: `verdict ${level}`, role: "status" },
    el("div", {}, el("p", {}, text), more.length ? el("ul", {}, more.map((it) => el("li", {}, it))) : null));
}

function advised(told, figures) {
  const { advice } = told;
  const level = told.is_stale || !advice.wanted ? "" : advice.binds === "none" ? "good" : "late";
  const stale = told.is_stale ? `Stale: the twin has not reported for ${time(1000 * told.age_s)}. Is it still running?` : null;
  const parts = [sentence(level, advice.text, stale)];
  if (!advice.happened) return parts;
  const rows = compared(advice);
  parts.push(el("div", { class: "tiles" }, tiles(told, rows)));
  parts.push(el("div", { class: "stack" }, figures.show("shares", shares(advice, rows))));
  parts.push(el("section", {}, el("h2", {}, "The same load on other clusters"), figuresOf(advice, rows)));
  return parts;
}

const name = ({ prefill, decode, mixed }) => (mixed ? `${mixed}` : `${prefill} + ${decode}`);
const same = (a, b) => a && b && name(a) === name(b) && a.policy === b.policy;

/** What happened, then the twin of the same cluster, then what is wanted, then the others by size. */
function compared(advice) {
  const size = ({ shape }) => shape.prefill + shape.decode + shape.mixed;
  const rank = (it) => (same(it.shape, advice.now) ? 0 : same(it.shape, advice.wanted) ? 1 : it.shape.policy === advice.now.policy ? 2 : 3);
  const trials = [...advice.trials].sort((a, b) => rank(a) - rank(b) || size(a) - size(b) || a.shape.prefill - b.shape.prefill);
  const tag = (shape) => [same(shape, advice.now) ? "twin" : "", same(shape, advice.wanted) ? "wanted" : ""].filter(Boolean).join(", ");
  const named = (shape) => (shape.policy === advice.now.policy ? name(shape) : `${name(shape)} ${shape.policy}`);
  return [
    { shape: advice.now, label: name(advice.now), tag: "happened", outcome: advice.happened },
    ...trials.map(({ shape, outcome }) => ({ shape, label: named(shape), tag: tag(shape), outcome })),
  ];
}

function tiles(told, rows) {
  const { advice } = told;
  const twin = rows[1]?.outcome;
  const { wanted, happened } = advice;
  const roles = advice.now.mixed ? "instances" : "prefill + decode instances";
  return [
    tile("In time", share(happened.in_time), `of ${count(happened.requests)} requests; ${share(advice.target, 0)} should be`, happened.in_time >= advice.target),
    tile("The twin had", twin ? share(twin.in_time) : "–", twin ? "of the same requests, on the same cluster" : "nothing was simulated"),
    tile("Instances now", name(advice.now), `${roles}, ${advice.now.policy}`),
    tile("Instances wanted", wanted ? name(wanted) : "–", wanted ? "the fewest with which enough were in time" : "there is no advice"),
    tile("Last round", `${time(1000 * told.age_s)}`, `ago; it took ${time(1000 * advice.took_s)}`),
  ];
}

function shares(advice, rows) {
  return {
    kind: "bars",
    title: "What became of the requests",
    tag: advice.until_ms ? `arrived ${clock(advice.from_ms)} to ${clock(advice.until_ms)}` : null,
    keys: KEYS,
    unit: "share",
    most: 1,
    rows: rows.map(({ label, tag, outcome }) => ({
      name: label,
      tag,
      note: share(outcome.in_time),
      parts: [
        { size: outcome.in_time, tone: "c3", label: "in time" },
        { size: Math.max(0, 1 - outcome.in_time - outcome.refused), tone: "amber", label: "late or failed" },
        { size: outcome.refused, tone: "c4", label: "refused" },
      ],
    })),
    note: "All but the first row are simulated. Prefill + decode instances; another policy is named.",
  };
}

function figuresOf(advice, rows) {
  const heads = [
    ["cluster", ""], ["policy", "text"], ["in time", ""], ["refused", ""],
    ["TTFT p50", "", "of requests that were served"], ["TTFT p90", ""], ["TBT p50", "", "mean between the tokens of a request"], ["TBT p90", ""],
  ];
  const cells = rows.map(({ shape, tag, outcome }) => [
    tag ? `${name(shape)} (${tag})` : name(shape), shape.policy, share(outcome.in_time), share(outcome.refused),
    time(outcome.ttft_p50_ms), time(outcome.ttft_p90_ms), time(outcome.tbt_p50_ms), time(outcome.tbt_p90_ms),
  ]);
  const goals = [["TTFT", advice.ttft_slo_ms], ["TBT", advice.tbt_slo_ms]].filter(([, goal]) => goal !== null).map(([what, goal]) => `${what} ${time(goal)}`);
  return [
    table("Clusters", heads, cells, "Nothing was simulated."),
    note(`Objectives: ${goals.join(" and ") || "those of the requests"}.`),
  ];
}
