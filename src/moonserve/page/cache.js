// Cache: which prefixes were asked for and who holds them, and what the pool's segments contain.

import { bytes, count, el, figure, share, short, time } from "./charts.js";
import { History, event } from "./history.js";
import { Figures, meter, note, refill, sum, table, tile } from "./parts.js";

const MANY = 40;

export function cache(root, frame) {
  const history = new History(frame);
  const figures = new Figures();
  const place = el("div");
  root.append(el("h1", { class: "hush" }, "Cache"), place);
  return {
    every: 5000,
    async update(signal) {
      const [prefixes, stats] = await Promise.all([
        frame.get("api/prefixes", signal), frame.get("api/stats", signal), history.read(frame.get, signal),
      ]);
      const tree = treeOf(prefixes.nodes);
      const store = stats.store;
      refill(place,
        el("div", { class: "tiles" }, tiles(prefixes, store, stats, history)),
        el("div", { class: "stack" }, figures.show("icicle", icicle(tree, prefixes))),
        el("section", {}, el("h2", {}, "Prefixes that were asked for most"), largest(prefixes.nodes)),
        store.segments ? el("div", { class: "charts" }, figures.show("used", used(history)), figures.show("evicted", evicted(history))) : null,
        el("section", {}, el("h2", {}, "Segments of the pool"), segments(store)),
        store.tenants ? el("section", {}, el("h2", {}, "Bytes by tenant"), byTenant(store)) : null);
    },
  };
}

/** Nodes with their children, by their parents. */
function treeOf(nodes) {
  const made = nodes.map((node) => ({
    ...node, children: [], name: short(node.tokens), held: node.held_tokens > 0, label: said(node),
  }));
  for (const node of made) if (node.parent !== null) made[node.parent].children.push(node);
  const heads = made.filter((node) => node.parent === null);
  for (const node of made) node.children.sort((a, b) => b.requests - a.requests);
  heads.sort((a, b) => b.requests * b.tokens - a.requests * a.tokens);
  return heads;
}

function said(node) {
  const held = node.held_tokens >= node.tokens ? "all" : node.held_tokens ? `the first ${count(node.held_tokens)}` : "none";
  return `${count(node.tokens)} tokens, in ${count(node.requests)} of the latest requests\nheld now: ${held} of them; whole on ${places(node)}\nfirst block ${node.key.slice(0, 12)}…`;
}

function places(node) {
  if (!node.holders) return "no instance";
  const parts = [`${count(node.holders)} ${node.holders === 1 ? "holder" : "holders"}`];
  const tiers = [node.devices ? `${count(node.devices)} on the device` : "", node.on_disk ? `${count(node.on_disk)} on disk` : ""].filter(Boolean);
  return tiers.length ? `${parts} (${tiers.join(", ")})` : parts[0];
}

function icicle(heads, prefixes) {
  const most = Math.max(1, ...heads.map((node) => node.requests));
  return {
    kind: "icicle",
    title: "Prefixes that were asked for lately",
    tag: prefixes.requests ? `of ${count(prefixes.requests)} requests` : null,
    root: { id: -1, tokens: 0, requests: most, held: true, name: "all prompts", label: "all prompts", children: heads },
    most,
    note: "Each box is a run of blocks that the same requests share: as wide as its tokens and those of all that continue it, darker if more requests asked for it. Below it are its continuations. Press a box to enlarge it.",
    empty: "No prompt with a full block of tokens has come yet, or the engines' prompts are not known here (external engines without a tokenizer).",
  };
}

function largest(nodes) {
  const rows = [...nodes].sort((a, b) => b.tokens * b.requests - a.tokens * a.requests).slice(0, 15).map((node) => [
    el("span", { class: "id" }, `${node.key.slice(0, 12)}…`),
    count(node.tokens),
    count(node.requests),
    el("span", {}, share(node.held_tokens / node.tokens, 0), meter(node.held_tokens / node.tokens, "c1")),
    count(node.holders),
    count(node.devices),
    count(node.on_disk),
  ]);
  const heads = [["first block", ""], ["tokens", ""], ["requests", ""], ["held now", ""], ["whole on", "", "holders of all of it"], ["on the device", ""], ["on disk", ""]];
  return table("Prefixes that were asked for most", heads, rows, "None yet.");
}

function tiles(prefixes, store, stats, history) {
  const found = [tile("Blocks known", short(prefixes.index_blocks), "by the prefix index, each key once")];
  if (!store.segments) return found;
  const totals = (tier) => {
    const those = store.segments.filter((it) => it.tier === tier);
    return [sum(those.map((it) => it.used_bytes)), sum(those.map((it) => it.capacity_bytes))];
  };
  for (const [tier, label] of [["dram", "Memory"], ["disk", "Disk"]]) {
    const [full, all] = totals(tier);
    if (all) found.push(tile(label, share(full / all, 0), `${bytes(full)} of ${bytes(all)}`));
  }
  const age = turnover(history, store);
  found.push(tile("Age at eviction", age === null ? "–" : `~${time(age * 1000)}`, age === null ? "nothing was evicted in this time" : "blocks stored, divided by the rate of eviction"));
  found.push(tile("Copies", `${count(store.promoted)} / ${count(store.demoted)}`, "blocks promoted to memory, and moved to disk"));
  found.push(tile("Leases", count(store.leases), `${count(store.pending_puts)} puts under way`));
  return found;
}

/** About how long a block stays, in seconds; null: nothing is evicted. */
function turnover(history, store) {
  const evictions = history.columns.evicted ?? [];
  const gone = (evictions.at(-1) ?? 0) - (evictions[0] ?? 0);
  return gone > 0 ? (store.objects * evictions.length * history.step) / gone : null;
}

const timed = (history) => {
  const [from, to] = history.range();
  return { kind: "lines", timed: true, from, to, marks: history.lane.filter((it) => ["join", "loss", "drain", "leave"].includes(it.what)).slice(-40).map(event) };
};

function used(history) {
  return {
    ...timed(history), title: "Bytes in the pool", unit: "bytes",
    lines: [history.line("used_bytes", "used", "c1"), history.line("capacity_bytes", "capacity", "quiet")],
  };
}

function evicted(history) {
  const line = history.line("evicted", "evicted", "c2");
  const ys = line.ys.map((y, at) => (at ? Math.max(0, y - line.ys[at - 1]) / history.step : 0));
  return { ...timed(history), title: "Blocks evicted", y_label: "per second:", unit: "number", lines: [{ ...line, ys }] };
}

function segments(store) {
  if (!store.segments) {
    const text = store.backend === "mooncake" ? "The KV of this cluster is in Mooncake's pool: only its master knows where each block is." : "External engines keep their KV themselves. What they told of it is in the prefix index, and shown above.";
    return el("p", { class: "empty" }, text);
  }
  const shown = [...store.segments].sort((a, b) => b.used_bytes / b.capacity_bytes - a.used_bytes / a.capacity_bytes).slice(0, 200);
  const rows = shown.map((it) => [
    it.id, it.tier === "dram" ? "memory" : "disk", it.rack || "–", bytes(it.used_bytes), bytes(it.capacity_bytes),
    el("span", {}, share(it.used_bytes / it.capacity_bytes, 0), meter(it.used_bytes / it.capacity_bytes, "c1")),
    bytes(it.evictable_bytes), count(it.objects), it.draining ? el("span", { class: "off" }, "drains") : "serves",
  ]);
  const heads = [["segment", ""], ["tier", "text"], ["rack", "text"], ["used", ""], ["capacity", ""], ["full", ""], ["evictable", "", "not held by a lease or a pin"], ["objects", ""], ["state", "text"]];
  return table("Segments of the pool", heads, rows, "No segment is mounted.");
}

function byTenant(store) {
  const all = Object.entries(store.tenants).sort((a, b) => b[1] - a[1]);
  const quotas = store.quotas ?? {};
  const whole = sum(all.map(([, size]) => size)) || 1;
  const rows = all.slice(0, MANY).map(([name, size]) => [
    name || "(none)", bytes(size), el("span", {}, share(size / whole, 0), meter(size / whole, "c1")),
    quotas[name] ? `${bytes(quotas[name])}, ${share(size / quotas[name], 0)} used` : "no quota",
  ]);
  const more = all.length > MANY ? note(`${count(all.length - MANY)} more tenants have less.`) : null;
  return [table("Bytes by tenant", [["tenant", ""], ["bytes", ""], ["of all", ""], ["quota", "text"]], rows, "No tenant has bytes in the pool."), more];
}
