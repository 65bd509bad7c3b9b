// Instances: how full each one is over time, whether it can be trusted, and what it costs.

import { count, el, share, time, bytes, hinted } from "./charts.js";
import { History, event } from "./history.js";
import { Figures, median, meter, note, refill, table } from "./parts.js";

const OLD_MS = 3000; // a heartbeat comes every second
const DEAR = 1.3; // times the median of its role

export function instances(root, frame) {
  const history = new History(frame, true);
  const figures = new Figures();
  const place = el("div");
  root.append(el("h1", { class: "hush" }, "Instances"), place);
  return {
    every: 2000,
    async update(signal) {
      const [rows] = await Promise.all([frame.get("api/instances", signal), history.read(frame.get, signal)]);
      refill(place,
        el("div", { class: "stack" }, figures.show("heat", heat(history, rows))),
        el("section", {}, el("h2", {}, `${count(rows.length)} instances`), list(rows)),
        el("section", {}, el("h2", {}, "From prefill to decode"), matrix(history.pairs, rows)));
    },
  };
}

function heat(history, rows) {
  const roles = new Map(rows.map((row) => [row.id, row.role]));
  const names = new Set(rows.map((row) => row.id));
  for (const column of history.heat) for (const name of column.instances) names.add(name);
  const order = [...names].sort((a, b) => rank(roles.get(a)) - rank(roles.get(b)) || compare(a, b));
  const columns = history.heat.map((column) => new Map(column.instances.map((name, at) => [name, column.percents[at] / 100])));
  const [from, to] = history.range();
  const step = (history.latest.heat_s ?? 5) * 1000;
  const slots = Math.round((to - from) / step);
  const places = history.heat.map((column) => Math.min(slots - 1, Math.floor((column.at_ms - from - 1) / step)));
  const bands = order.map((name) => {
    const shares = new Array(slots).fill(null);
    columns.forEach((column, at) => {
      if (places[at] >= 0) shares[places[at]] = column.get(name) ?? null;
    });
    const known = shares.filter((value) => value !== null);
    const mean = known.length ? known.reduce((all, value) => all + value, 0) / known.length : null;
    return { name, tone: roles.get(name) === "decode" ? "c2" : roles.has(name) ? "c1" : "quiet", shares, note: share(mean, 0) };
  });
  return {
    kind: "heat",
    title: "How full each instance was",
    from, to, timed: true,
    bands: history.heat.length ? bands : [],
    keys: [["prefill, or both", "c1"], ["decode", "c2"], ...(order.some((name) => !roles.has(name)) ? [["no longer here", "quiet"]] : [])],
    marks: history.lane.map(event),
    note: "Prefill: the share of time in which it had a prefill to do. Decode: the larger share taken of its places and of its KV memory. The mean is at the right.",
    empty: rows.length ? "The first column comes within five seconds." : "No instance has joined. Start workers with moonserve up or moonserve worker, or register engines with moonserve register.",
  };
}

const rank = (role) => ({ prefill: 0, both: 1, decode: 2 }[role] ?? 3);
const compare = (a, b) => a.localeCompare(b, "en", { numeric: true });

function list(rows) {
  const costs = {};
  for (const role of ["prefill", "decode", "both"]) {
    const those = rows.filter((row) => row.role === role);
    costs[role] = { prefill: median(those.map((row) => row.prefill_1k_ms)), tbt: median(those.map((row) => row.cost.pass_us ? step(row) : 0)) };
  }
  const heads = [
    ["instance", ""], ["role", "text"], ["trust", "text", "how much of what it claims to hold counts"],
    ["last heard", "", "age of its last heartbeat or report"],
    ["running", "", "as it reports"], ["waiting", "", "as it reports"],
    ["prefills", "", "promised to it"], ["queue", "", "work promised to it and not done"], ["decodes", "", "promised to it"],
    ["KV free", "", "of its own memory"],
    ["1k prefill", "", "predicted time to prefill 1,000 tokens, and against the median of its role"],
    ["TBT", "", "predicted time between tokens if a request of 1,000 tokens joins, and against the median"],
    ["epoch", "", "differs at each start"],
  ];
  const sorted = [...rows].sort((a, b) => rank(a.role) - rank(b.role) || compare(a.id, b.id));
  const cells = sorted.map((row) => [
    hinted(el("span", {}, row.id), `${row.model}\n${row.url}${row.rack ? `\nrack ${row.rack}` : ""}`),
    row.role,
    trust(row),
    el("span", { class: row.heard_ms_ago > OLD_MS ? "off" : null }, time(Math.max(0, row.heard_ms_ago))),
    count(row.running),
    count(row.waiting),
    row.role === "decode" ? "–" : count(row.prefills_promised),
    row.role === "decode" ? "–" : time(row.queue_ms),
    row.role === "prefill" ? "–" : `${count(row.decodes_promised)} / ${count(row.max_seqs)}`,
    free(row),
    row.role === "decode" ? "–" : cost(row.prefill_1k_ms, costs[row.role].prefill),
    row.role === "prefill" ? "–" : cost(step(row), costs[row.role].tbt),
    epoch(row.epoch),
  ]);
  return [
    table("Instances", heads, cells, "No instance has joined."),
    rows.some((row) => row.others) && rows.some((row) => row.others.running || row.others.waiting)
      ? note("Some engines also serve requests that did not come through this gateway: ", rows.filter((row) => row.others.running || row.others.waiting).map((row) => `${row.id} (${row.others.running} running, ${row.others.waiting} waiting)`).join(", "), ".") : null,
  ];
}

const step = (row) => row.tbt_ms;
const epoch = (value) => (value > 1e11 ? new Date(value / (value > 1e14 ? 1000 : 1)).toISOString().slice(5, 19).replace("T", " ") : String(value));

function trust(row) {
  const { claimed_tokens: claimed, found_tokens: found } = row.trust;
  const proof = claimed ? `${share(found / claimed, 0)} of ${count(claimed)} claimed tokens were found` : "nothing was claimed yet";
  if (row.trusted) return hinted(el("span", {}, "full"), proof);
  return hinted(el("span", { class: "off" }, share(row.trust.share, 0)), proof);
}

function free(row) {
  if (!row.kv_blocks) return "not told";
  const part = row.free_blocks / row.kv_blocks;
  return el("span", {}, share(part, 0), meter(1 - part, "c3"));
}

function cost(value, middle) {
  if (!middle || !value) return time(value);
  const times = value / middle;
  const text = `${time(value)} (${times.toFixed(2)}×)`;
  return el("span", { class: times > DEAR ? "off" : null }, text);
}

/** How fast KV went from each prefill instance to each decode instance lately. */
function matrix(pairs, rows) {
  if (!rows.some((row) => row.role === "prefill") || !rows.some((row) => row.role === "decode")) {
    return el("p", { class: "empty" }, rows.length ? "The instances here serve whole requests: no KV goes from one to another." : "No instance has joined.");
  }
  if (!pairs.length) return el("p", { class: "empty" }, "No request went from a prefill to a decode instance lately.");
  const names = (side) => [...new Set(pairs.map((pair) => pair[side]))].sort(compare);
  const [prefills, decodes] = [names("prefill"), names("decode")];
  const known = new Map(pairs.map((pair) => [`${pair.prefill}\n${pair.decode}`, pair]));
  const speed = median(pairs.map((pair) => pair.bytes_per_s ?? 0));
  const cell = (prefill, decode) => {
    const pair = known.get(`${prefill}\n${decode}`);
    if (!pair) return el("td", { class: "soft" }, "·");
    const slow = pair.bytes_per_s && speed && pair.bytes_per_s < speed / 2;
    const bad = pair.failed / pair.requests > 0.01;
    const text = pair.bytes_per_s ? `${bytes(pair.bytes_per_s)}/s` : "not told";
    const node = el("td", {}, el("span", { class: slow ? "off" : null }, text), bad ? el("div", { class: "off" }, `${share(pair.failed / pair.requests, 1)} failed`) : null);
    return hinted(node, `${prefill} to ${decode}\n${text}, ${pair.requests.toFixed(1)} requests of late, ${share(pair.failed / pair.requests)} failed or were placed again`);
  };
  const head = el("tr", {}, el("th", { scope: "col" }, "prefill \\ decode"), decodes.map((name) => el("th", { scope: "col" }, name)));
  const body = prefills.map((prefill) => el("tr", {}, el("th", { scope: "row" }, prefill), decodes.map((decode) => cell(prefill, decode))));
  const count = (role) => rows.filter((row) => row.role === role).length;
  const all = count("prefill") > prefills.length || count("decode") > decodes.length;
  return [
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "From prefill to decode" }, el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, body))),
    note("KV of the prompt divided by the time from the decode call to its first token, which has a pass of decode in it: a lower bound of the speed of the transfer. Requests of some minutes ago count less. Marked: slower than half the median, or over 1% failed.",
      all ? " The busiest of each role are shown." : ""),
  ];
}
