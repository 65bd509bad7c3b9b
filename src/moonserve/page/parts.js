// Parts that several views show: tables, badges, tiles and figures that stay in place.

import { el, figure, update } from "./charts.js";

/** A headline figure; met: whether its goal was met, null: it has none. */
export function tile(label, value, below, met = null) {
  const verdict = met === null ? null : el("span", { class: met ? "good" : "bad" }, met ? "✓ met: " : "✗ missed: ");
  return el("div", { class: "tile" }, el("h2", {}, label), el("b", {}, value), el("p", {}, verdict, below));
}

/** A table. heads: [text, class, title]; rows: arrays of cells, a string or a node each. */
export function table(label, heads, rows, empty) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const head = heads.map(([text, kind, title]) => el("th", { class: kind, title, scope: "col" }, text));
  const cell = (value, at) => {
    const [, kind] = heads[at];
    return at ? el("td", { class: kind }, value) : el("th", { class: kind, scope: "row" }, value);
  };
  const body = rows.map((cells) => el("tr", {}, cells.map(cell)));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

const KINDS = { refused: "refused", failed: "failed", running: "", waiting: "", cancelled: "" };

/** How a request ended, in a word with a colour. */
export function badge(row) {
  const late = row.in_time === false;
  const answered = row.outcome.startsWith("engine answered ");
  const kind = answered ? "refused" : KINDS[row.outcome] ?? (late ? "late" : "good");
  const served = row.in_time === true ? "in time" : late ? "late" : "served";
  const text = answered || row.outcome in KINDS ? row.outcome : served;
  const reason = row.reason ?? row.reject_reason;
  return el("span", { class: `badge ${kind}` }, text, reason ? ` (${reason})` : "");
}

/** A share as a small bar behind its number. */
export function meter(value, tone) {
  const bar = el("i", { class: tone });
  bar.style.width = `${Math.min(100, Math.max(0, 100 * (value ?? 0)))}%`;
  return el("span", { class: "meter", "aria-hidden": "true" }, bar);
}

/** Figures by name that are made once and drawn again with new data, so that they stay in place. */
export class Figures {
  #made = new Map();

  /** The figure of this name, with this data. */
  show(name, spec) {
    const made = this.#made.get(name);
    if (made) {
      update(made, spec);
      return made;
    }
    const it = figure(spec);
    this.#made.set(name, it);
    return it;
  }
}

/** Replace what a node contains, and leave the focus where it is. */
export function refill(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement.getAttribute("data-key") : null;
  const tops = [...node.querySelectorAll(".scroll")].map((it) => [it.scrollLeft, it.scrollTop]);
  node.replaceChildren(...children.flat().filter(Boolean));
  [...node.querySelectorAll(".scroll")].forEach((it, at) => {
    if (tops[at]) [it.scrollLeft, it.scrollTop] = tops[at];
  });
  if (focused !== null) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** A note that says what is not known, and why. */
export const note = (...text) => el("p", { class: "note" }, ...text);

export const median = (values) => {
  const sorted = values.filter((value) => value > 0).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
};

export const sum = (values) => values.reduce((all, value) => all + (value ?? 0), 0);
