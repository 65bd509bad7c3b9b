// The samples that the server keeps, as far as this page has read them: each poll asks for what is
// new only. One object per view and length of sample.

import { sum } from "./parts.js";

const LEAST_MS = 120_000;

export class History {
  #step;
  #minutes;
  #heat;
  /** Column name -> values; `at_ms` has the times. */
  columns = {};
  lane = [];
  heat = [];
  pairs = [];
  latest = null;

  constructor(frame, heat = false) {
    this.#step = frame.step;
    this.#minutes = frame.minutes;
    this.#heat = heat;
  }

  /** Read what is new. */
  async read(get, signal) {
    const latest = [this.columns.at_ms?.at(-1) ?? 0, this.#heat ? this.heat.at(-1)?.at_ms ?? 0 : Infinity];
    const asked = Math.min(...latest); // what comes again is dropped
    const reply = await get(`api/history?step=${this.#step}&since=${asked}${this.#heat ? "&heat=true" : ""}`, signal);
    this.latest = reply;
    this.#add(reply);
    return reply;
  }

  #add(reply) {
    const from = reply.now_ms - (this.#minutes + 1) * 60_000;
    const times = this.columns.at_ms ?? [];
    const known = times.at(-1) ?? 0;
    const fresh = reply.columns.at_ms.map((at) => at > known);
    const first = times.findIndex((at) => at >= from);
    const drop = first < 0 ? times.length : first;
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(reply.columns)])) {
      const before = this.columns[name] ?? times.map(() => 0); // a reason that nothing was refused for yet
      const more = reply.columns[name] ?? reply.columns.at_ms.map(() => 0);
      this.columns[name] = [...before.slice(drop), ...more.filter((_, at) => fresh[at])];
    }
    const last = this.lane.at(-1)?.at_ms ?? 0;
    const seen = new Set(this.lane.filter((event) => event.at_ms === last).map((event) => event.what + event.subject));
    const news = reply.lane.filter((event) => event.at_ms > last || (event.at_ms === last && !seen.has(event.what + event.subject)));
    this.lane = [...this.lane, ...news].slice(-500);
    const column = this.heat.at(-1)?.at_ms ?? 0;
    this.heat = [...this.heat, ...(reply.heat ?? []).filter((it) => it.at_ms > column)].filter((it) => it.at_ms >= from);
    this.pairs = Object.entries(reply.pairs ?? {}).flatMap(([prefill, decodes]) =>
      Object.entries(decodes).map(([decode, [requests, failed, bytes_per_s]]) => ({ prefill, decode, requests, failed, bytes_per_s })));
  }

  /** The time that charts show, [from, to] in ms: from the first sample on if that is later. */
  range() {
    const now = this.latest.now_ms;
    const first = Math.min(this.columns.at_ms?.[0] ?? now, now - LEAST_MS);
    return [Math.max(now - this.#minutes * 60_000, first), now];
  }

  /** Seconds of one sample. */
  get step() {
    return this.#step;
  }

  has(name) {
    return name in this.columns;
  }

  /** One column as a line. */
  line(name, title, tone, per = 1) {
    const ys = this.columns[name] ?? [];
    return { name: title, tone, xs: this.columns.at_ms ?? [], ys: per === 1 ? ys : ys.map((y) => (y === null ? null : y / per)) };
  }

  /** The sum of a column over the time shown. */
  total(name) {
    const [from] = this.range();
    return sum((this.columns[name] ?? []).filter((_, at) => this.columns.at_ms[at] >= from));
  }
}

const TONES = { join: "c3", epoch: "c4", leave: "quiet", loss: "bad", alarm: "bad", alarm_over: "c3", leader: "c4", drain: "amber" };
const WORDS = {
  join: (it) => `${it.subject} joined`,
  epoch: (it) => `${it.subject} joined after a new start`,
  leave: (it) => `${it.subject} left in order`,
  loss: (it) => `${it.subject} was lost: ${it.detail}`,
  alarm: (it) => `alarm: ${it.subject}`,
  alarm_over: (it) => `alarm over: ${it.subject}`,
  leader: (it) => `${it.subject} leads: ${it.detail}`,
  drain: (it) => `segment ${it.subject} drains`,
};
export const LANE_KEYS = [["joined", "c3"], ["lost or alarm", "bad"], ["new start or leader", "c4"], ["drains", "amber"], ["left", "quiet"]];

/** An event for a lane, and as a mark in a chart. */
export function event(it) {
  const text = it.what === "leader" && !it.detail.startsWith("term") ? `${it.subject} leads no more: ${it.detail}` : WORDS[it.what](it);
  return { x: it.at_ms, tone: TONES[it.what], label: text };
}
