// Requests: the latest ones, and the account of one.

import { clock, count, el, figure, share, time } from "./charts.js";
import { badge, note, refill, table } from "./parts.js";

const KINDS = [
  ["all", ""],
  ["late", "&late=true"],
  ["refused", "&outcome=refused"],
  ["failed", "&outcome=failed"],
  ["under way", "&outcome=under_way"],
];
const LIMITS = [100, 500];

export function requests(root, frame) {
  const asked = new URLSearchParams(sessionStorage.getItem("moonserve-requests") ?? "");
  const place = el("div");
  let again = () => {};
  const keep = () => {
    sessionStorage.setItem("moonserve-requests", asked);
    again();
  };
  const field = (name, label) => {
    const set = () => {
      asked.set(name, input.value.trim());
      keep();
    };
    const input = el("input", { id: `of-${name}`, value: asked.get(name) ?? "", onchange: set, autocomplete: "off", spellcheck: "false" });
    return el("span", { class: "field" }, el("label", { for: `of-${name}` }, label), input);
  };
  const buttons = KINDS.map(([name]) => el("button", {
    type: "button",
    "aria-pressed": String((asked.get("kind") ?? "all") === name),
    onclick: (event) => {
      asked.set("kind", name);
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === event.currentTarget));
      keep();
    },
  }, name));
  const limit = el("select", { id: "limit", onchange: () => {
    asked.set("limit", limit.value);
    keep();
  } }, LIMITS.map((size) => el("option", { value: size, selected: String(size) === asked.get("limit") }, size)));
  const sort = el("select", { id: "sort", onchange: () => {
    asked.set("sort", sort.value);
    keep();
  } }, Object.keys(ORDERS).map((name) => el("option", { value: name, selected: name === asked.get("sort") }, name)));
  root.append(
    el("section", {},
      el("form", { class: "bar", onsubmit: (event) => event.preventDefault() },
        el("h1", { class: "hush" }, "Requests"),
        el("div", { class: "group", role: "group", "aria-label": "Which requests" }, buttons),
        field("tenant", "Tenant"), field("instance", "Instance"),
        el("span", { class: "field" }, el("label", { for: "sort" }, "Sort by"), sort),
        el("span", { class: "field" }, el("label", { for: "limit" }, "Show"), limit)),
      place));
  const view = {
    every: 2000,
    async update(signal) {
      const kind = KINDS.find(([name]) => name === (asked.get("kind") ?? "all"))?.[1] ?? "";
      const of = ["tenant", "instance"].filter((name) => asked.get(name)).map((name) => `&${name}=${encodeURIComponent(asked.get(name))}`);
      const rows = await frame.get(`api/decisions?limit=${asked.get("limit") ?? LIMITS[0]}${kind}${of.join("")}`, signal);
      rows.sort(ORDERS[asked.get("sort")] ?? ORDERS["time"]);
      refill(place, list(rows, Boolean(kind || of.length)), note("The Conductor keeps the latest 500 requests that are over, and all that are under way."));
    },
  };
  again = () => view.update().catch(() => {}); // the next poll says what is wrong
  return view;
}

const worst = (value) => (value === null || value === undefined ? -1 : value);
const ORDERS = {
  time: (a, b) => b.arrived_ms - a.arrived_ms,
  TTFT: (a, b) => worst(b.actual_ttft_ms) - worst(a.actual_ttft_ms),
  TBT: (a, b) => worst(b.actual_tbt_ms) - worst(a.actual_tbt_ms),
  "prompt tokens": (a, b) => worst(b.prompt_tokens) - worst(a.prompt_tokens),
};

function list(rows, filtered) {
  const heads = [
    ["request", ""], ["arrived", ""], ["outcome", "text"], ["tenant", "text"], ["prefill", "text"], ["decode", "text"],
    ["prompt", "", "tokens"], ["reused", "", "tokens, as the engine reports; as planned if it does not"], ["output", "", "tokens"],
    ["TTFT", ""], ["predicted", "", "TTFT as predicted"], ["TBT", "", "mean time between its tokens"],
  ];
  const cells = rows.map((row) => [
    el("a", { href: `#/requests/${encodeURIComponent(row.request)}`, class: "id", "data-key": row.request }, shortId(row.request)),
    clock(row.arrived_ms),
    badge(row),
    row.tenant || "–",
    row.prefill ?? "–",
    row.decode ?? "–",
    count(row.prompt_tokens),
    row.actual_cached_tokens === null ? (row.reused_tokens === null ? "–" : `(${count(row.reused_tokens)})`) : count(row.actual_cached_tokens),
    count(row.output_tokens),
    time(row.actual_ttft_ms),
    el("span", { class: "soft" }, time(row.predicted_ttft_ms)),
    time(row.actual_tbt_ms),
  ]);
  const empty = filtered ? "No request that is kept fits these filters." : "No request has come since this process started. Send one to /v1/chat/completions, and it is here.";
  return table("Requests", heads, cells, empty);
}

const shortId = (id) => (id.length > 24 ? `${id.slice(0, 10)}…${id.slice(-10)}` : id);

// One request.

export function request(root, frame, id) {
  const back = el("p", {}, el("a", { href: "#/requests" }, "← all requests"));
  const place = el("div");
  root.append(back, place);
  const view = {
    every: 1000,
    async update(signal) {
      let told;
      try {
        told = await frame.get(`api/decisions/${encodeURIComponent(id)}`, signal);
      } catch (error) {
        if (error.status !== 404) throw error;
        view.every = 0;
        refill(place, el("section", {}, el("h1", {}, "Request ", el("span", { class: "id" }, id)),
          el("p", { class: "empty" }, "This process keeps no account of it. It keeps the latest 500 requests that are over; an older one is in a recording, if one was made.")));
        return;
      }
      if (!["waiting", "running"].includes(told.outcome)) view.every = 0;
      refill(place, account(told));
    },
  };
  return view;
}

function account(told) {
  return [
    el("section", {},
      el("h1", {}, "Request ", el("span", { class: "id" }, told.request)),
      el("p", {}, badge(told), told.arrived_ms ? `, arrived ${clock(told.arrived_ms)}` : ""),
      el("p", {}, told.why),
      told.error && told.error !== told.why ? el("p", {}, told.error) : null,
      told.spread ? el("p", { class: "soft" }, told.spread) : null,
      told.held ? el("p", { class: "soft" }, `Its objectives were tightened: ${told.held}.`) : null),
    el("div", { class: "stack" },
      told.outcome === "refused" ? null : figure(waterfall(told)),
      told.candidates.length ? figure(candidates(told)) : null,
      told.candidates.length ? null : note("There are no candidates to show: no placement was judged for it.")),
    told.group.length ? parts(told) : null,
    el("section", {}, el("h2", {}, "All that is known of it"), facts(told)),
  ];
}

function facts(told) {
  const pairs = [
    ["Model", told.model],
    ["Tenant", told.tenant || "–"],
    ["Priority", told.priority],
    ["Placed by", told.policy],
    ["Prefill on", told.prefill],
    ["Decode on", told.decode],
    ["Attempts", told.attempts],
    ["Prompt", tokens(told.prompt_tokens)],
    ["Held by anyone", tokens(told.pool_tokens)],
    ["Reuse promised", tokens(told.reused_tokens)],
    ["Reuse delivered", told.actual_cached_tokens === null ? (told.attempts ? "the engine does not report it" : null) : tokens(told.actual_cached_tokens)],
    ["Output", tokens(told.output_tokens)],
    ["TTFT", against(told.actual_ttft_ms, told.predicted_ttft_ms, told.ttft_slo_ms)],
    ["TBT, mean", against(told.actual_tbt_ms, told.predicted_tbt_ms, told.tbt_slo_ms)],
  ];
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}

const tokens = (value) => (value === null || value === undefined ? null : `${count(value)} tokens`);

function against(actual, predicted, goal) {
  const parts = missing(actual) ? [] : [time(actual)];
  if (predicted !== null) parts.push(`predicted ${time(predicted)}`);
  if (goal !== null && goal !== undefined) parts.push(`goal ${time(goal)}`);
  return parts.join("; ") || null;
}

/** The stages one after the other, each with what was predicted for it below. */
function waterfall(told) {
  const stages = told.stages ?? {};
  const best = told.candidates[0];
  const rows = [];
  let actual = 0;
  const row = (name, tone, took, expected) => {
    if (missing(took) && missing(expected)) return;
    const known = !missing(took);
    rows.push({ name, note: known ? time(took) : "not told", parts: known ? [{ from: actual, size: took, tone, label: "took" }] : [{ from: actual, size: 0, tone, label: "" }] });
    if (!missing(expected)) {
      rows.push({ name: "", thin: true, note: time(expected), parts: [{ from: actual, size: expected, tone: "quiet", label: `${name}, predicted` }] });
    }
    actual += known ? took : 0;
  };
  const split = !missing(stages.compute_ms);
  row("waited", "c4", stages.waited_ms ?? told.waited_ms, told.waited_ms);
  if (split) {
    row("queue", "c4", stages.queue_ms, best?.queue_ms);
    row("load KV", "c3", stages.load_ms, best?.transfer_ms);
    row("compute", "c1", stages.compute_ms, best?.compute_ms);
    row("publish KV", "c3", stages.publish_ms, null);
    const rest = (stages.prefill_ms ?? 0) - stages.queue_ms - stages.load_ms - stages.compute_ms - (stages.publish_ms ?? 0);
    if (rest > 0.5) row("call, rest", "quiet", rest, null);
  } else {
    row("prefill", "c1", stages.prefill_ms, best ? best.queue_ms + best.transfer_ms + best.compute_ms : null);
  }
  if (missing(stages.decode_first_ms)) {
    row("hand-over", "c3", stages.handover_ms, null);
  } else {
    row("decode queue", "c4", stages.decode_queue_ms, null);
    row("hand over KV", "c3", stages.decode_load_ms, null);
    row("first decode", "c2", stages.decode_first_ms, null);
    const rest = stages.handover_ms - stages.decode_queue_ms - stages.decode_load_ms - stages.decode_first_ms;
    if (rest > 0.5) row("call, rest", "quiet", rest, null);
  }
  const gaps = Math.max(0, (told.output_tokens ?? 0) - 1);
  row("decode", "c2", stages.decode_ms, gaps && told.predicted_tbt_ms !== null ? gaps * told.predicted_tbt_ms : null);
  return {
    kind: "bars",
    title: "Where its time went",
    tag: [missing(stages.total_ms) ? "" : `total ${time(stages.total_ms)}`, missing(told.ttft_slo_ms) ? "" : `TTFT goal ${time(told.ttft_slo_ms)}`].filter(Boolean).join(", "),
    unit: "ms",
    rows,
    keys: [["predicted", "quiet"]],
    goal: missing(told.ttft_slo_ms) ? null : { at: told.ttft_slo_ms, label: `TTFT goal ${time(told.ttft_slo_ms)}` },
    note: split || told.outcome === "waiting" ? null : "External engines do not tell how long a prefill queued, loaded KV and computed: its time is shown as one.",
    empty: "Nothing was measured yet.",
  };
}

const missing = (value) => value === null || value === undefined;

/** The instances that it could have gone to. */
function candidates(told) {
  const slo = told.ttft_slo_ms;
  const waited = told.waited_ms ?? 0;
  const rows = told.candidates.map((it, at) => ({
    name: it.instance,
    tag: at === 0 ? "chosen" : at === 1 ? "runner-up" : null,
    note: `${time(waited + it.ttft_ms)}, ${count(it.reused_tokens)} reused`,
    parts: [
      { size: waited, tone: "quiet", label: "waited at the Conductor" },
      { size: it.transfer_ms, tone: "c3", label: "loading KV" },
      { size: it.queue_ms, tone: "c4", label: "in its queue" },
      { size: it.compute_ms, tone: "c1", label: "computing" },
    ],
  }));
  const hidden = told.considered - rows.length;
  return {
    kind: "bars",
    title: "Predicted time to first token, by candidate",
    tag: told.considered ? `${count(told.considered)} considered` : null,
    unit: "ms",
    rows,
    keys: [...(waited ? [["waited", "quiet"]] : []), ["load KV", "c3"], ["queue", "c4"], ["compute", "c1"]],
    goal: missing(slo) ? null : { at: slo, label: `objective ${time(slo)}` },
    note: [fits(told, waited), hidden > 0 ? `${count(hidden)} more candidates were considered; these are the best.` : ""].filter(Boolean).join(" ") || null,
  };
}

/** For a refused request: how it would have been accepted. */
function fits(told, waited) {
  if (told.outcome !== "refused") return "";
  const slo = told.ttft_slo_ms;
  const best = told.candidates[0];
  if (told.reject_reason === "ttft_slo" && !missing(slo)) {
    const over = waited + best.ttft_ms - slo;
    if (over <= 0) return "By these figures alone it would have fitted: its objective was tightened, so that other requests fit.";
    const later = best.queue_ms >= over
      ? `the same request would have fitted ${time(over)} later, once so much of the queue was done, if no other had come`
      : "it would not have fitted on an idle instance either";
    return `It missed its objective by ${time(over)}: with an objective of ${time(slo + over)} it would have been accepted, and ${later}.`;
  }
  if (told.reject_reason?.startsWith("tbt_slo") && !missing(told.tbt_slo_ms) && !missing(told.predicted_tbt_ms)) {
    return `Its predicted time between tokens was ${time(told.predicted_tbt_ms)}, its objective ${time(told.tbt_slo_ms)}: it would have fitted once decode had fewer requests, or with that objective.`;
  }
  return "";
}

function parts(told) {
  const rows = told.group.map((part) => [part.instance, count(part.start), count(part.end), share((part.end - part.start) / told.prompt_tokens)]);
  return el("section", {}, el("h2", {}, "Prefilled together"), table("Parts of the prompt", [["instance", ""], ["from token", ""], ["to token", ""], ["of the prompt", ""]], rows, ""));
}
