// The frame of the page: its views, the time that they show, polling, and the key. A view is a
// function: it gets a node to fill and the frame, and returns {every, update}; `update` is called at
// once, then every so many milliseconds, never twice at a time, and not while the page is hidden.

import { el } from "./charts.js";
import { cache } from "./cache.js";
import { instances } from "./instances.js";
import { overview } from "./overview.js";
import { request, requests } from "./requests.js";
import { KeyNeeded, get, key, setKey } from "./server.js";
import { tenants } from "./tenants.js";
import { whatif } from "./whatif.js";

/** The views by their paths, with the names that the navigation shows. */
const VIEWS = [
  ["", "Overview", overview],
  ["requests", "Requests", requests],
  ["instances", "Instances", instances],
  ["cache", "Cache", cache],
  ["tenants", "Tenants", tenants],
  ["what-if", "What if", whatif],
];
const RANGES = [
  ["15 minutes", 1, 15],
  ["4 hours", 15, 240],
];
const SLOWEST_MS = 15_000;

const at = (id) => document.getElementById(id);
const frame = {
  /** Seconds of one sample, and minutes shown. */
  step: 1,
  minutes: 15,
  get,
};
let running = null; // the view that is shown: {stop}
let paused = false;

function show() {
  running?.stop();
  const [path, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const known = VIEWS.find(([name]) => name === path) ?? VIEWS[0];
  const detail = path === "requests" && rest.length ? decoded(rest.join("/")) : null;
  for (const link of at("views").children) {
    if (link.dataset.view === known[0]) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${detail ?? known[1]} · moonserve`;
  const root = el("div");
  at("main").replaceChildren(root);
  running = detail === null ? run(known[2](root, frame)) : run(request(root, frame, detail));
}

/** The text that an address means; an address that is no such text means itself. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Call a view's update until it is stopped. */
function run(view) {
  const stopped = new AbortController();
  let timer = null;
  let misses = 0;
  let asked = false;
  const again = (ms) => {
    clearTimeout(timer);
    timer = setTimeout(turn, ms);
  };
  const turn = async () => {
    if (stopped.signal.aborted || document.hidden) return;
    try {
      await view.update(stopped.signal);
      misses = 0;
      trouble("");
      state(paused ? "paused" : "live");
    } catch (error) {
      if (stopped.signal.aborted) return;
      if (error instanceof KeyNeeded) return askKey(error.message);
      if (!(error instanceof Error) || error instanceof TypeError || error instanceof ReferenceError) console.error(error);
      misses += 1;
      trouble(`${error.message}. What is below is as of the last answer; the page tries again.`);
      state("no answer");
    }
    if (!stopped.signal.aborted && view.every && !paused) again(Math.min(SLOWEST_MS, view.every * 2 ** Math.min(misses, 4)));
  };
  const wake = () => again(0);
  const seen = () => {
    if (!paused) wake();
  };
  document.addEventListener("visibilitychange", seen);
  turn();
  return {
    stop() {
      stopped.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    },
    wake,
  };
}

function state(text) {
  at("state").textContent = text;
}

function trouble(text) {
  if (at("trouble").textContent !== text) at("trouble").textContent = text;
  at("trouble").hidden = !text;
}

function askKey(why) {
  running?.stop();
  running = null;
  setKey("");
  at("forget").hidden = true;
  at("main").hidden = true;
  at("ask-key").hidden = false;
  at("key-wrong").textContent = why;
  state("");
  trouble("");
  at("key").focus();
}

function begin() {
  at("views").append(...VIEWS.map(([path, name]) => el("a", { href: `#/${path}`, "data-view": path }, name)));
  at("range").append(...RANGES.map(([name], k) => el("option", { value: k }, name)));
  at("range").addEventListener("change", () => {
    [, frame.step, frame.minutes] = RANGES[at("range").value];
    show();
  });
  at("pause").addEventListener("click", () => {
    paused = !paused;
    at("pause").setAttribute("aria-pressed", String(paused));
    state(paused ? "paused" : "live");
    if (!paused) running?.wake();
  });
  at("forget").addEventListener("click", () => askKey(""));
  at("ask-key").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(at("key").value.trim());
    at("key").value = "";
    at("ask-key").hidden = true;
    at("main").hidden = false;
    at("forget").hidden = false;
    show();
  });
  at("forget").hidden = !key();
  window.addEventListener("hashchange", () => {
    show();
    at("main").focus({ preventScroll: true });
    window.scrollTo(0, 0);
  });
  show();
}

begin();
