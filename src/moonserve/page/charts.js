// The one drawing code of the page for operators and of the simulator's report. Each chart is drawn
// from plain data ("spec") into a figure, at the width that the figure has. Nothing here fetches,
// keeps time, or knows a cluster; nothing is written as HTML, so no text from outside is markup.

const NS = "http://www.w3.org/2000/svg";
const SHADES = 12;

// Elements.

/** An HTML element. Attributes that are null or false are left out; `on…` are listeners. */
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(NS, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Numbers for people. A value that is missing is a dash.

const DASH = "–";
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** A tick's text. */
export function number(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  return trim(value);
}

const trim = (value) => String(Number(value.toPrecision(6)));

/** A whole number, with commas. */
export const count = (value) => (missing(value) ? DASH : Math.round(value).toLocaleString("en-US"));

/** Large counts, shortened. */
export function short(value) {
  if (missing(value)) return DASH;
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= 10 * size || (unit !== "k" && Math.abs(value) >= size)) return `${three(value / size)}${unit}`;
  }
  return count(value);
}

const three = (value) => (Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3))));

/** A time that is given in milliseconds. */
export function time(ms) {
  if (missing(ms)) return DASH;
  if (Math.abs(ms) < 1000) return `${three(ms)} ms`;
  if (Math.abs(ms) < 120_000) return `${three(ms / 1000)} s`;
  return Math.abs(ms) < 7_200_000 ? `${three(ms / 60_000)} min` : `${three(ms / 3_600_000)} h`;
}

/** A share as a percentage, rounded down: only all of it is 100%. */
export function share(value, digits = 1) {
  if (missing(value)) return DASH;
  const scale = 100 * 10 ** digits;
  return `${(Math.floor(value * scale + 1e-6) / 10 ** digits).toFixed(digits)}%`;
}

export function bytes(value) {
  if (missing(value)) return DASH;
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) >= size) return `${three(value / size)} ${unit}`;
  }
  return `${count(value)} B`;
}

/** The time of day of a Unix time in milliseconds. */
export function clock(ms, seconds = true) {
  const at = new Date(ms);
  const parts = [at.getHours(), at.getMinutes(), ...(seconds ? [at.getSeconds()] : [])];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

// Figures.

const drawn = new Map(); // figure -> draws it again
let waiting = null;
const sizes = typeof ResizeObserver === "undefined" ? null : new ResizeObserver((entries) => {
  for (const entry of entries) drawn.get(entry.target)?.();
});

/** A figure that shows `spec`; `show` it again with `update(figure, spec)`. */
export function figure(spec) {
  const it = el("figure", { class: "chart" });
  update(it, spec);
  return it;
}

/** Show another spec in a figure. It is drawn at once if it has a width, else when it gets one. */
export function update(it, spec) {
  let width = 0;
  const plot = el("div", { class: "plot" });
  const tag = spec.tag ? el("span", { class: "tag" }, spec.tag) : null;
  const caption = el("figcaption", {}, el("span", {}, spec.title), tag);
  const legend = el("div", { class: "legend" });
  it.replaceChildren(caption, legend, plot, ...(spec.note ? [el("p", { class: "note" }, spec.note)] : []));
  const draw = (again) => {
    const now = Math.floor(plot.clientWidth);
    if (!now || (now === width && !again)) return;
    width = now;
    legend.replaceChildren();
    legend.hidden = false;
    plot.replaceChildren();
    it.cursor = null;
    KINDS[spec.kind](spec, plot, legend, width, it);
    legend.hidden = !legend.childNodes.length;
    it.cursor?.(cursor);
  };
  drawn.set(it, draw);
  sizes?.observe(it);
  if (it.isConnected) draw(true);
  if (drawn.size > 64) for (const old of drawn.keys()) if (old !== it && !old.isConnected) forget(old);
}

function forget(it) {
  drawn.delete(it);
  sizes?.unobserve(it);
}

// Canvases have no CSS variables: draw again when the reader changes to dark or light mode.
globalThis.matchMedia?.("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [it, draw] of drawn) if (it.isConnected) draw(true);
});

// A vertical line through all charts over time, where the pointer is.

let cursor = null;

function point(at) {
  cursor = at;
  if (waiting) return;
  waiting = requestAnimationFrame(() => {
    waiting = null;
    for (const it of drawn.keys()) if (it.isConnected) it.cursor?.(cursor);
  });
}

// A short text beside the pointer.

let tip = null;

function hint(event, text) {
  if (!tip) document.body.append((tip = el("div", { class: "tip", "aria-hidden": "true" })));
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const { innerWidth, innerHeight } = window;
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const x = event.clientX + 14 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 14;
  const y = event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

/** Show a text while the pointer is on a node. */
export function hinted(node, text) {
  node.addEventListener("pointermove", (event) => hint(event, typeof text === "function" ? text(event) : text));
  node.addEventListener("pointerleave", (event) => hint(event, ""));
  return node;
}

// Axes.

/** Data to pixels along one axis. */
export function scale(low, high, start, end, log = false) {
  const top = Math.max(high, low + Math.max(1e-9, Math.abs(low) * 1e-9)); // one value needs a range too
  const [a, b] = log ? [Math.log(low), Math.log(top)] : [low, top];
  const to = (value) => start + ((end - start) * ((log ? Math.log(Math.max(value, low)) : value) - a)) / (b - a);
  return Object.assign(to, { low, high: top, log, start, end });
}

/** Round numbers within the range of a scale, at most about so many. */
export function ticks(of, most) {
  if (of.log) {
    const decades = range(Math.floor(Math.log10(of.low)), Math.ceil(Math.log10(of.high)));
    const steps = of.high / of.low <= 3000 ? [1, 2, 5] : [1];
    return decades.flatMap((decade) => steps.map((step) => step * 10 ** decade))
      .filter((tick) => tick >= of.low * (1 - 1e-9) && tick <= of.high * (1 + 1e-9));
  }
  const rough = (of.high - of.low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((it) => it >= rough * (1 - 1e-9));
  const found = range(Math.ceil(of.low / step - 1e-9), Math.floor(of.high / step + 1e-9)).map((k) => Number((k * step).toPrecision(12)));
  return [...new Map(found.map((tick) => [number(tick), tick])).values()];
}

const range = (first, last) => Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => first + at);

const MINUTE = 60_000;
const STEPS = [0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 240].map((minutes) => minutes * MINUTE);

/** Between two round times of day, on a scale with room for about so many. */
const pace = (of, most) => STEPS.find((it) => (of.high - of.low) / it <= most) ?? STEPS.at(-1);

/** Round times of day within the range of a scale. */
function moments(of, step) {
  const shift = new Date(of.low).getTimezoneOffset() * MINUTE;
  return range(Math.ceil((of.low - shift) / step), Math.floor((of.high - shift) / step)).map((k) => k * step + shift);
}

/** Round numbers of bytes: of the largest unit that the range has. */
function byteTicks(of, most) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(1, of.high)) / 10));
  return ticks(scale(of.low / unit, of.high / unit, of.start, of.end), most).map((tick) => tick * unit);
}

function yAxis(of, left, right, texts) {
  return (texts === bytes ? byteTicks : ticks)(of, 4).flatMap((tick) => [
    svg("path", { d: `M${left} ${of(tick).toFixed(1)}H${right}`, class: "grid" }),
    svg("text", { x: left - 6, y: of(tick) + 4, class: "end" }, texts(tick)),
  ]);
}

function xAxis(of, y, label, timed) {
  const most = Math.max(3, Math.round((of.end - of.start) / 75));
  const step = pace(of, most);
  const at = timed ? moments(of, step) : ticks(of, most);
  const texts = timed ? (tick) => clock(tick, step < MINUTE) : number;
  const parts = [svg("path", { d: `M${of.start} ${y}H${of.end}`, class: "axis" })];
  let free = -1e9;
  for (const tick of at) {
    const x = of(tick);
    const text = texts(tick);
    const half = 3.2 * text.length;
    parts.push(svg("path", { d: `M${x.toFixed(1)} ${y}v4`, class: "axis" }));
    if (x - half < free) continue; // a text has room only after the one before
    free = x + half + 6;
    const place = x + half > of.end + 10 ? "end" : "mid";
    parts.push(svg("text", { x: place === "end" ? of.end + 10 : x, y: y + 16, class: place }, text));
  }
  if (label) parts.push(svg("text", { x: of.end, y: y + 31, class: "end" }, label));
  return parts;
}

function canvasOf(width, height) {
  const dots = window.devicePixelRatio || 1;
  const it = el("canvas", { width: Math.round(width * dots), height: Math.round(height * dots) });
  it.style.width = `${width}px`;
  it.style.height = `${height}px`;
  const pen = it.getContext("2d");
  pen.scale(dots, dots);
  return [it, pen];
}

const colour = (tone) => getComputedStyle(document.documentElement).getPropertyValue(`--${tone}`).trim();

const nothing = (plot, text) => plot.append(el("p", { class: "empty" }, text ?? "nothing to show"));

// Lines over an axis.
//
// spec: lines [{name, tone, xs, ys}], x_label, y_label; shares: y is 0 to 100%; stacked: areas, the
// first at the bottom; log_x; timed: x is Unix time in ms, and [from, to] the range; unit: how a
// value of y is said; goal {at, label}: a vertical line; level {at, label}: a horizontal one;
// marks [{x, tone, label}]: events, as thin vertical lines.

const SAID = { ms: time, share, count, bytes, number };

function drawLines(spec, plot, legend, width, it) {
  const xs = spec.lines.flatMap((line) => line.xs.filter((x) => x > 0 || !spec.log_x));
  const ys = spec.lines.flatMap((line) => line.ys.filter((y) => !missing(y)));
  const say = SAID[spec.unit ?? (spec.shares ? "share" : "number")];
  const values = keys(spec, legend, say);
  if (!xs.length || !ys.length) return nothing(plot, spec.empty);
  const height = spec.height ?? Math.min(240, Math.max(170, width * 0.42));
  const [left, right, top, bottom] = [52, width - 10, 8, height - (spec.x_label ? 36 : 20)];
  const least = spec.from ?? Math.min(...extent(xs));
  const most = spec.to ?? Math.max(...extent(xs), spec.goal ? spec.goal.at * 1.1 : -Infinity);
  const x = scale(spec.goal && spec.from === undefined ? Math.min(least, spec.goal.at) : least, most, left, right, spec.log_x);
  const layers = spec.stacked ? stacked(spec.lines) : spec.lines.map((line) => ({ ...line, under: null }));
  const peak = Math.max(0, ...extent(layers.flatMap((line) => line.ys.filter((y) => !missing(y)))));
  const shown = spec.level && spec.level.at < peak * 4 ? spec.level : null; // a goal far above would flatten all
  const y = scale(0, spec.shares ? 1 : Math.max(peak, shown?.at ?? 0) * 1.06 || 1, bottom, top);
  const labels = spec.shares ? (tick) => share(tick, 0) : { ms: time, bytes }[spec.unit] ?? number;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(spec, say) });
  picture.append(...yAxis(y, left, right, labels), ...xAxis(x, bottom, spec.x_label, spec.timed));
  for (const mark of spec.marks ?? []) {
    if (mark.x < x.low || mark.x > x.high) continue;
    picture.append(svg("path", { d: `M${x(mark.x).toFixed(1)} ${top}V${bottom}`, class: `mark ${mark.tone}` }));
  }
  for (const line of layers) {
    if (spec.stacked) picture.append(svg("path", { d: area(line, x, y), class: `fill area ${line.tone}` }));
    else picture.append(svg("path", { d: path(line, x, y), class: `line ${line.tone}`, "data-line": line.name }));
  }
  if (spec.goal) picture.append(...upright(spec.goal, x(spec.goal.at), top, bottom, (left + right) / 2));
  if (shown) {
    const at = y(shown.at);
    picture.append(svg("path", { d: `M${left} ${at.toFixed(1)}H${right}`, class: "goal" }));
    picture.append(svg("text", { x: right, y: at < top + 14 ? at + 13 : at - 5, class: "end goal" }, shown.label));
  }
  plot.append(picture);
  if (!spec.timed) return;
  const hair = svg("path", { class: "cursor" });
  picture.append(hair);
  picture.addEventListener("pointermove", (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    point(x.low + ((at - left) / (right - left)) * (x.high - x.low));
  });
  picture.addEventListener("pointerleave", () => point(null));
  it.cursor = (at) => {
    const inside = at !== null && at >= x.low && at <= x.high;
    hair.setAttribute("d", inside ? `M${x(at).toFixed(1)} ${top}V${bottom}` : "");
    values(inside ? at : null);
  };
  it.cursor(null);
}

/** Fill a legend; returns a function that shows the values at an x, or the latest for null. */
function keys(spec, legend, say) {
  if (spec.y_label) legend.append(el("span", {}, spec.y_label));
  const shown = spec.lines.map((line) => {
    const value = el("b");
    legend.append(el("span", {}, el("i", { class: `${line.tone}${spec.stacked ? " box" : ""}` }), line.name, spec.timed ? " " : null, value));
    return value;
  });
  const when = el("span");
  if (spec.timed) legend.append(when);
  return (at) => {
    spec.lines.forEach((line, k) => {
      const near = at === null ? line.xs.length - 1 : nearest(line.xs, at);
      shown[k].textContent = near < 0 ? DASH : say(line.ys[near]);
    });
    when.textContent = at === null ? "" : clock(at);
  };
}

function nearest(xs, at) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
}

function extent(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return values.length ? [least, most] : [];
}

function stacked(lines) {
  let under = lines[0]?.ys.map(() => 0) ?? [];
  return lines.map((line) => {
    const ys = line.ys.map((y, at) => under[at] + (y ?? 0));
    const layer = { ...line, ys, under };
    under = ys;
    return layer;
  });
}

/** A polyline with gaps where y is missing. */
function path(line, x, y) {
  let text = "";
  let pen = false;
  line.xs.forEach((at, k) => {
    const value = line.ys[k];
    if (missing(value) || (x.log && at <= 0)) {
      pen = false;
      return;
    }
    text += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return text;
}

function area(line, x, y) {
  if (!line.xs.length) return "";
  const over = line.xs.map((at, k) => `${x(at).toFixed(1)} ${y(line.ys[k]).toFixed(1)}`);
  const below = line.xs.map((at, k) => `${x(at).toFixed(1)} ${y(line.under[k]).toFixed(1)}`).reverse();
  return `M${over.join("L")}L${below.join("L")}Z`;
}

function upright(goal, x, top, bottom, middle, y = bottom - 8) {
  const place = x > middle ? "end" : "begin";
  return [
    svg("path", { d: `M${x.toFixed(1)} ${top}V${bottom}`, class: "goal" }),
    svg("text", { x: x + (place === "end" ? -5 : 5), y, class: `${place} goal` }, goal.label),
  ];
}

/** A chart in words: its title, and the latest value of each line. */
function summary(spec, say) {
  const parts = spec.lines.map((line) => `${line.name} ${say(line.ys.at(-1))}`);
  const goal = spec.level ?? spec.goal;
  return `${spec.title}. ${spec.timed ? "Latest: " : "At the right end: "}${parts.join(", ")}${goal ? `; ${goal.label}` : ""}`;
}

// Events over time, as a lane of their own.
//
// spec: from, to, events [{x, tone, label}].

function drawLane(spec, plot, legend, width) {
  for (const [name, tone] of spec.keys) legend.append(el("span", {}, el("i", { class: `box ${tone}` }), name));
  const [left, right, height] = [52, width - 10, 46];
  const x = scale(spec.from, spec.to, left, right);
  const said = spec.events.length ? `${spec.events.length} events; the list below has them` : "no events";
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${spec.title}: ${said}` });
  picture.append(...xAxis(x, 26, "", true));
  const near = new Map(); // events at one place are one mark
  for (const event of spec.events) {
    if (event.x < x.low || event.x > x.high) continue;
    const place = Math.round(x(event.x) / 8);
    near.set(place, [...(near.get(place) ?? []), event]);
  }
  for (const group of near.values()) {
    const worst = group.find((event) => event.tone === "bad") ?? group[0];
    const shown = group.slice(0, 8).map((event) => `${clock(event.x)}  ${event.label}`);
    if (group.length > 8) shown.push(`and ${group.length - 8} more`);
    const at = x(worst.x);
    const shape = `M${(at - 5).toFixed(1)} 5h10v10l-5 6l-5 -6z`;
    picture.append(hinted(svg("path", { d: shape, class: `fill ${worst.tone}` }), shown.join("\n")));
    const last = at > right - 24;
    if (group.length > 1) picture.append(svg("text", { x: at + (last ? -7 : 7), y: 15, class: last ? "end" : null }, String(group.length)));
  }
  if (!near.size) picture.append(svg("text", { x: (left + right) / 2, y: 16, class: "mid" }, spec.empty ?? "no events in this time"));
  plot.append(picture);
}

// One row per instance; a larger share is darker.
//
// spec: bands [{name, tone, shares, note}], from, to, x_label, timed; say: how a share is said.

function drawHeat(spec, plot, legend, width, it) {
  const bands = spec.bands;
  if (!bands.length || !bands[0].shares.length) return nothing(plot, spec.empty);
  for (const [name, tone] of spec.keys ?? []) legend.append(el("span", {}, el("i", { class: `box ${tone}` }), name));
  const row = Math.min(18, Math.max(4, 560 / bands.length));
  const every = Math.ceil(12 / row); // so that names do not overlap
  const longest = Math.max(...bands.map((band) => band.name.length));
  const wide = width > 500;
  const [left, right] = [Math.min(wide ? 150 : 84, 14 + longest * 6.6), width - (wide ? 48 : 38)];
  const height = row * bands.length;
  const x = scale(spec.from, spec.to, left, right);
  const tall = height + (spec.x_label ? 42 : 24);
  const said = `${spec.title}: ${bands.length} rows. ${bands.slice(0, 8).map((band) => `${band.name} ${band.note}`).join(", ")}`;
  const picture = svg("svg", { width, height: tall, viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": said });
  picture.style.position = "relative";
  const letters = Math.floor((left - 8) / 6.4);
  bands.forEach((band, at) => {
    if (at % every) return;
    const y = at * row + row / 2 + 4;
    const name = band.name.length > letters ? `…${band.name.slice(1 - letters)}` : band.name;
    picture.append(svg("text", { x: left - 6, y, class: "end" }, name), svg("text", { x: right + 6, y }, band.note));
  });
  picture.append(...xAxis(x, height + 2, spec.x_label, spec.timed));
  const [cells, pen] = canvasOf(right - left, height);
  cells.style.position = "absolute";
  cells.style.left = `${left}px`;
  const tones = new Map();
  bands.forEach((band, at) => {
    if (!tones.has(band.tone)) tones.set(band.tone, colour(band.tone));
    pen.fillStyle = tones.get(band.tone);
    const step = (right - left) / band.shares.length;
    for (const [begin, end, shade] of runs(band.shares)) {
      pen.globalAlpha = 0.05 + (0.95 * shade) / SHADES;
      pen.fillRect(begin * step, at * row, (end - begin) * step, row > 6 ? row - 1 : row);
    }
  });
  const place = (event) => {
    const box = cells.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, Math.floor((event.clientY - box.top) / row)];
  };
  hinted(cells, (event) => {
    const [along, at] = place(event);
    const band = bands[at];
    const value = band?.shares[Math.min(band.shares.length - 1, Math.floor(along * band.shares.length))];
    if (!band) return "";
    const when = x.low + along * (x.high - x.low);
    const text = missing(value) ? "not there" : share(value, 0);
    return `${band.name}, ${spec.timed ? clock(when) : `${three(when)} ${spec.x_label}`}: ${text}`;
  });
  plot.append(cells, picture);
  if (!spec.timed) return;
  cells.addEventListener("pointermove", (event) => point(x.low + place(event)[0] * (x.high - x.low)));
  cells.addEventListener("pointerleave", () => point(null));
  const hair = svg("path", { class: "cursor" });
  picture.append(hair);
  it.cursor = (at) => hair.setAttribute("d", at !== null && at >= x.low && at <= x.high ? `M${x(at).toFixed(1)} 0V${height}` : "");
}

/** Neighbours of the same shade, as [begin, end, shade]; a missing value has no cell. */
export function runs(shares) {
  const shades = shares.map((it) => (missing(it) ? null : Math.round(Math.min(1, Math.max(0, it)) * SHADES)));
  const found = [];
  let begin = 0;
  for (let at = 1; at <= shades.length; at++) {
    if (at < shades.length && shades[at] === shades[begin]) continue;
    if (shades[begin] !== null) found.push([begin, at, shades[begin]]);
    begin = at;
  }
  return found;
}

// Stacked bars, one row each.
//
// spec: rows [{name, tag, parts: [{from, size, tone, label}], thin, note}], keys [[name, tone]],
// unit, goal {at, label}. `from` missing: the part begins where the one before ends.

function drawBars(spec, plot, legend, width) {
  if (!spec.rows.length) return nothing(plot, spec.empty);
  const say = SAID[spec.unit ?? "number"];
  for (const [name, tone] of spec.keys ?? []) legend.append(el("span", {}, el("i", { class: `box ${tone}` }), name));
  const narrow = width < 480;
  const longest = Math.max(...spec.rows.map((row) => row.name.length + (row.tag ? row.tag.length + 2 : 0)));
  const left = Math.min(narrow ? 128 : 190, 16 + longest * 6.4);
  const notes = Math.max(0, ...spec.rows.map((row) => (row.note ?? "").length));
  const right = width - Math.min(narrow ? 74 : 170, 14 + notes * 6.2);
  const placed = spec.rows.map((row) => {
    let at = 0;
    return row.parts.map((part) => {
      const from = part.from ?? at;
      at = from + part.size;
      return { ...part, from };
    });
  });
  const longestPart = Math.max(1e-9, ...placed.flat().map((part) => part.from + part.size));
  const goal = spec.goal && spec.goal.at < 4 * longestPart ? spec.goal : null; // a goal far away would flatten all
  const end = Math.max(longestPart, goal ? goal.at * 1.04 : 0);
  const x = scale(0, spec.most ?? end, left, right);
  const top = goal ? 16 : 2;
  let y = top;
  const parts = [];
  spec.rows.forEach((row, k) => {
    const high = row.thin ? 7 : 16;
    const middle = y + high / 2 + 4;
    const name = row.tag ? `${row.name} (${row.tag})` : row.name;
    const letters = Math.floor((left - 8) / 6.2);
    parts.push(svg("text", { x: left - 8, y: middle, class: `end${row.tag || row.strong ? " ink" : ""}` }, name.length > letters ? `${name.slice(0, letters - 1)}…` : name));
    for (const part of placed[k]) {
      if (!(part.size > 0)) continue;
      const at = x(part.from);
      const wide = Math.max(1, x(part.from + part.size) - at);
      const box = { x: at.toFixed(1), y, width: wide.toFixed(1), height: high, class: `fill ${part.tone}`, "fill-opacity": part.faint ? 0.45 : null };
      parts.push(hinted(svg("rect", box), `${name}: ${part.label} ${say(part.size)}`));
    }
    const last = placed[k].at(-1);
    const beside = last ? Math.min(right, x(last.from + last.size)) : left;
    parts.push(svg("text", { x: beside + 6, y: middle, class: row.thin ? "" : "ink" }, row.note ?? ""));
    y += high + (row.thin || spec.rows[k + 1]?.thin ? 2 : 7);
    if (row.thin) y += 6;
  });
  const height = y + 22;
  const said = spec.rows.map((row) => `${row.name}${row.tag ? `, ${row.tag}` : ""}: ${row.note ?? ""}`).join("; ");
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${spec.title}. ${said}${spec.goal ? `; ${spec.goal.label}` : ""}` });
  const axis = ticks(x, Math.max(2, Math.round((right - left) / 90)));
  picture.append(...axis.map((tick) => svg("path", { d: `M${x(tick).toFixed(1)} ${top}V${y}`, class: "grid" })));
  picture.append(...axis.map((tick) => svg("text", { x: x(tick), y: y + 15, class: "mid" }, say(tick))));
  picture.append(...parts);
  if (goal) picture.append(...upright(goal, x(goal.at), 2, y, (left + right) / 2, 12));
  plot.append(picture);
}

// A tree of prefixes: a node is as wide as the tokens in it and below it, and darker if more
// requests asked for it.
//
// spec: root {tokens, requests, label, held, children}, most: of requests.

function drawIcicle(spec, plot, legend, width, it) {
  if (!spec.root.children.length) return nothing(plot, spec.empty);
  const keys = [["asked for often", "c1"], ["asked for once", "c1 pale"], ["held by nobody now", "hollow"]];
  for (const [name, tone] of keys) legend.append(el("span", {}, el("i", { class: `box ${tone}` }), name));
  const shownRoot = it.zoomed && contains(spec.root, it.zoomed) ? find(spec.root, it.zoomed) : spec.root;
  const rows = Math.min(14, depth(shownRoot));
  const row = 24;
  const height = rows * row + 2;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${spec.title}: the table below has the largest` });
  const most = Math.max(2, spec.most);
  const place = (node, x, wide, level) => {
    if (level >= rows || wide < 1.5) return;
    const box = svg("rect", {
      x: x.toFixed(1), y: level * row + 1, width: Math.max(1, wide - 1).toFixed(1), height: row - 2, rx: 2,
      class: node.held ? "fill c1" : "hollow",
      "fill-opacity": node.held ? (0.14 + (0.86 * Math.log(node.requests)) / Math.log(most)).toFixed(2) : null,
    });
    hinted(box, node.label);
    box.addEventListener("click", () => {
      it.zoomed = node === shownRoot ? null : node.id;
      update(it, spec);
    });
    picture.append(box);
    const text = node.name;
    if (wide > 7 * text.length + 8) {
      const strong = node.held && Math.log(node.requests) / Math.log(most) > 0.7;
      picture.append(svg("text", { x: x + 5, y: level * row + 16, class: strong ? "over" : "ink" }, text));
    }
    const all = total(node);
    let at = x;
    for (const child of node.children) {
      const part = (wide * total(child)) / all;
      place(child, at, part, level + 1);
      at += part;
    }
  };
  place(shownRoot, 0, width, 0);
  plot.append(picture);
  if (shownRoot !== spec.root) {
    const back = () => {
      it.zoomed = null;
      update(it, spec);
    };
    plot.append(el("button", { type: "button", onclick: back }, "show all prefixes"));
  }
}

const total = (node) => (node.all ??= node.tokens + node.children.reduce((sum, child) => sum + total(child), 0)) || 1;
const depth = (node) => 1 + Math.max(0, ...node.children.map(depth));
const contains = (node, id) => find(node, id) !== null;
const find = (node, id) => (node.id === id ? node : node.children.reduce((found, child) => found ?? find(child, id), null));

const KINDS = { lines: drawLines, lane: drawLane, heat: drawHeat, bars: drawBars, icicle: drawIcicle };
