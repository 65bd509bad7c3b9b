// Overview: whether requests are in time, and what limits the cluster.

import { clock, count, el, share, short, time } from "./charts.js";
import { History, LANE_KEYS, event } from "./history.js";
import { Figures, refill, sum, table, tile } from "./parts.js";

const REASONS = ["ttft_slo", "tbt_slo", "tbt_slo_late", "kv_memory", "instances_full", "queue_full", "nobody_alive", "duplicate_request_id", "other"];
const REASON_TONES = ["c4", "c2", "amber", "c1", "c3", "quiet", "bad", "quiet", "quiet"];

const SMOOTH = 10;

export function overview(root, frame) {
  const history = new History(frame);
  const figures = new Figures();
  const place = el("div");
  root.append(el("h1", { class: "hush" }, "Overview"), place);
  return {
    every: frame.step === 1 ? 1000 : 5000,
    async update(signal) {
      const now = await history.read(frame.get, signal);
      const charts = [lane, outcomes, refusals, ttft, tbt, pools, waiting].map((make) => figures.show(make.name, make(history, now)));
      const [events, ...others] = charts;
      const parts = [
        verdict(now),
        el("div", { class: "tiles" }, tiles(now, history)),
        el("div", { class: "stack" }, events),
        el("div", { class: "charts" }, others.filter((_, at) => at !== 1 || refusedLines(history).length)),
        el("div", { class: "stack" }, figures.show("funnel", funnel(history, frame))),
        el("section", {}, el("h2", {}, "What happened"), lately(history)),
      ];
      refill(place, ...parts);
    },
  };
}

function verdict(now) {
  const notes = [...now.alarms.map((text) => `Alarm: ${text}`), ...(now.standby ? [now.standby] : [])];
  return el("div", { class: `verdict ${now.verdict.level}`, role: "status" },
    el("div", {}, el("p", {}, now.verdict.text), notes.length ? el("ul", {}, notes.map((text) => el("li", {}, text))) : null));
}

function tiles(now, history) {
  const { minute, pools } = now;
  const refused = sum(Object.values(minute.refused));
  const judged = minute.in_time + minute.late + minute.failed + refused;
  const lost = [
    minute.late ? `${count(minute.late)} late` : "",
    refused ? `${count(refused)} refused` : "",
    minute.failed ? `${count(minute.failed)} failed` : "",
  ].filter(Boolean);
  const prompt = history.total("told_tokens");
  return [
    tile("In time, last minute", judged ? share(minute.in_time / judged) : "–", judged ? lost.join(", ") || "no request was late or lost" : "no request was over"),
    goal("TTFT p99, last minute", minute.ttft_p99_ms, minute.ttft_p50_ms, now.ttft_slo_ms),
    goal("TBT p99, last minute", minute.tbt_p99_ms, minute.tbt_p50_ms, now.tbt_slo_ms),
    tile("Requests", `${rate(judged / Math.max(1, minute.seconds))} /s`, `${short(minute.output_tokens / Math.max(1, minute.seconds))} output tokens/s`),
    tile("Prompt reused", prompt ? share(history.total("delivered_tokens") / prompt) : "–", prompt ? "of prompt tokens, in the time shown" : "no engine has reported it yet"),
    tile("Under way", count(pools.under_way), `${count(pools.waiting)} wait at the Conductor`),
  ];
}

const rate = (value) => (value >= 100 ? count(value) : value.toFixed(value >= 10 ? 1 : 2));

function goal(label, p99, p50, slo) {
  const median = p50 === null ? "" : `median ${time(p50)}`;
  if (slo === null) return tile(label, time(p99), [median, "no goal set for the cluster"].filter(Boolean).join("; "));
  if (p99 === null) return tile(label, "–", `goal ${time(slo)}`);
  return tile(label, time(p99), `goal ${time(slo)}; ${median}`, p99 <= slo);
}

/** What all charts over time have. */
function timed(history) {
  const [from, to] = history.range();
  const marks = history.lane.filter((it) => it.what !== "alarm_over").slice(-60).map(event);
  return { kind: "lines", timed: true, from, to, marks };
}

const per = (history) => `per second${history.step > 1 ? ", by 15 seconds" : ""}:`;

export function lane(history) {
  const [from, to] = history.range();
  return { kind: "lane", title: "Events", from, to, keys: LANE_KEYS, events: history.lane.map(event) };
}

function outcomes(history) {
  const reasons = REASONS.filter((reason) => history.has(`refused_${reason}`)).map((reason) => `refused_${reason}`);
  const xs = history.columns.at_ms;
  const refused = { name: "refused", tone: "c4", xs, ys: xs.map((_, at) => sum(reasons.map((name) => history.columns[name][at])) / history.step) };
  return {
    ...timed(history),
    title: "Requests by what became of them",
    y_label: per(history),
    stacked: true,
    unit: "number",
    lines: [
      history.line("in_time", "in time", "c3", history.step),
      history.line("late", "late", "amber", history.step),
      refused,
      history.line("failed", "failed", "bad", history.step),
    ].map(rounded),
  };
}

const rounded = (line) => ({ ...line, ys: line.ys.map((y) => (y === null ? null : Number(y.toPrecision(4)))) });

const refusedLines = (history) =>
  REASONS.map((reason, at) => [reason, REASON_TONES[at]]).filter(([reason]) => history.has(`refused_${reason}`) && history.total(`refused_${reason}`));

function refusals(history) {
  return {
    ...timed(history),
    title: "Refused, by reason",
    y_label: per(history),
    stacked: true,
    unit: "number",
    lines: refusedLines(history).map(([reason, tone]) => rounded(history.line(`refused_${reason}`, reason, tone, history.step))),
  };
}

function quantiles(history, name, title, slo) {
  return {
    ...timed(history),
    title,
    unit: "ms",
    level: slo === null ? null : { at: slo, label: `goal ${time(slo)}` },
    tag: slo === null ? null : `goal ${time(slo)}`,
    lines: [
      history.line(`${name}_p50_ms`, "p50", "c3"),
      history.line(`${name}_p90_ms`, "p90", "c1"),
      history.line(`${name}_p99_ms`, "p99", "c2"),
    ],
    empty: "no request had a first token in this time",
  };
}

const ttft = (history, now) => quantiles(history, "ttft", "Time to first token", now.ttft_slo_ms);
const tbt = (history, now) => quantiles(history, "tbt", "Time between tokens, mean of a request", now.tbt_slo_ms);

function pools(history, now) {
  const { binding } = now.verdict;
  const mark = (pool) => (binding === pool ? " (binds)" : "");
  return {
    ...timed(history),
    title: "How full prefill and decode are",
    tag: binding === "none" ? "neither binds" : `${binding} binds`,
    shares: true,
    y_label: history.step === 1 ? `mean of ${SMOOTH} s:` : null,
    lines: [
      history.line("prefill_busy", `prefill busy${mark("prefill")}`, "c1"),
      history.line("decode_slots", `decode places${mark("decode")}`, "c2"),
      history.line("decode_kv", "decode KV", "amber"),
    ].map((line) => (history.step === 1 ? smoothed(line) : line)),
  };
}

/** Each value is the mean of the last SMOOTH: one second alone says little of few instances. */
function smoothed(line) {
  let all = 0;
  const ys = line.ys.map((y, at) => {
    all += y - (at >= SMOOTH ? line.ys[at - SMOOTH] : 0);
    return Math.max(0, all / Math.min(SMOOTH, at + 1));
  });
  return { ...line, ys };
}

function waiting(history) {
  return {
    ...timed(history),
    title: "Requests under way",
    unit: "count",
    lines: [history.line("under_way", "under way", "c1"), history.line("waiting", "waiting at the Conductor", "c4")],
  };
}

/** From the tokens of all prompts to those that an engine took from its cache. */
function funnel(history, frame) {
  const prompt = history.total("prompt_tokens");
  const steps = [
    ["Prompt tokens", prompt, "quiet", ""],
    ["held by an instance", history.total("held_tokens"), "c3", "the prefix that some instance held"],
    ["held where it ran", history.total("chosen_tokens"), "c3", "the prefix that the chosen instance held itself"],
    ["promised", history.total("promised_tokens"), "c1", "reused by plan, loaded from others included"],
    ["delivered", history.total("delivered_tokens"), "c1", "reused as the engines report"],
  ];
  const silent = prompt - history.total("told_tokens");
  const said = silent > 0.001 * prompt ? ` Engines did not report the reuse of ${share(silent / prompt)} of these tokens.` : "";
  return {
    kind: "bars",
    title: "From prompt tokens to cache hits",
    tag: `last ${frame.minutes >= 60 ? `${frame.minutes / 60} hours` : `${frame.minutes} minutes`}`,
    rows: prompt ? steps.map(([name, size, tone, label]) => ({ name, parts: [{ size, tone, label }], note: `${short(size)}  ${name === "Prompt tokens" ? "" : share(size / prompt)}` })) : [],
    unit: "number",
    note: prompt ? `Held: by any instance when the request was placed. Promised may be more: it has what was just being computed. Delivered is less if blocks were lost or evicted meanwhile.${said}` : null,
    empty: "No prompt was placed in this time.",
  };
}

function lately(history) {
  const rows = history.lane.slice(-100).reverse().map((it) => [clock(it.at_ms), event(it).label]);
  const list = table("Events, the latest first", [["time", ""], ["what", "text wide"]], rows, "Nothing has happened yet since this process started: no instance came or went, and no alarm was raised.");
  list.classList.add("lane");
  return list;
}
