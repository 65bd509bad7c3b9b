// Tenants: who used the cluster, and for what.

import { count, el, share, short, time } from "./charts.js";
import { meter, note, refill, sum, table } from "./parts.js";

export function tenants(root, frame) {
  const place = el("div");
  root.append(el("h1", { class: "hush" }, "Tenants"), place);
  return {
    every: 5000,
    async update(signal) {
      const told = await frame.get("api/tenants", signal);
      refill(place, el("section", {}, el("h2", {}, "Tenants since this process started"), list(told.tenants)));
    },
  };
}

function list(rows) {
  const work = sum(rows.map((row) => row.prefill_s + row.decode_s)) || 1;
  const heads = [
    ["tenant", ""], ["requests", ""], ["in time", "", "of those that were served, refused or failed"], ["refused", ""], ["failed", ""],
    ["tokens in", ""], ["cached", "", "of the tokens in, as engines report"], ["tokens out", ""],
    ["prefill", "", "predicted time on prefill instances"], ["decode", "", "time in decode, all its requests together"],
    ["wasted", "", "prefill of requests that were dropped, failed or prefilled again"], ["of the work", ""],
  ];
  const cells = rows.map((row) => {
    const part = (row.prefill_s + row.decode_s) / work;
    return [
      row.tenant, count(row.requests), row.judged ? share(row.in_time / row.judged) : "–", count(row.refused), count(row.failed),
      short(row.prompt_tokens), row.prompt_tokens ? share(row.cached_tokens / row.prompt_tokens) : "–", short(row.output_tokens),
      time(row.prefill_s * 1000), time(row.decode_s * 1000), el("span", { class: row.wasted_s > 0.05 * row.prefill_s ? "off" : null }, time(row.wasted_s * 1000)),
      el("span", {}, share(part, 0), meter(part, "c1")),
    ];
  });
  return [
    table("Tenants", heads, cells, "No request has ended since this process started. A tenant comes from the API key of a request, or from its header x-moonserve-tenant."),
    rows.length ? note("At most 1,000 tenants are counted by themselves; the rest is in “other”.") : null,
  ];
}
