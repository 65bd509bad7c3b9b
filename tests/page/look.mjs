// Opens pages in the installed Chromium and reports what a reader and a checker see, as JSON on
// stdout. Called by tests/page; the first argument is a JSON object:
//   browser: path of Chromium; url: of the page; key: for the page, or "";
//   visits: [{name, hash, mode, width, height, wait, shot}]: `wait` is a CSS selector that must
//   appear; shot: file for a picture, or "";
//   act: the name of an act below, or "".

import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const asked = JSON.parse(process.argv[2]);
const TIMEOUT = 30_000;

const browser = await chromium.launch({ executablePath: asked.browser, args: ["--no-sandbox"] });

async function open(mode, width, height, seen) {
  // axe-core is put into the page, which its policy forbids to all scripts but the page's own.
  const context = await browser.newContext({ colorScheme: mode, viewport: { width, height }, bypassCSP: seen.bypass ?? false });
  const page = await context.newPage();
  page.setDefaultTimeout(TIMEOUT);
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) seen.errors.push(message.text());
  });
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => seen.requests.push(request.url()));
  return page;
}

async function keyed(page) {
  if (asked.key) await page.addInitScript((key) => sessionStorage.setItem("moonserve-key", key), asked.key);
}

/** What axe-core finds, in short. */
async function violations(page) {
  await page.addScriptTag({ path: AXE });
  const found = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  return found.violations.map((it) => `${it.id}: ${it.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`);
}

async function visit(it) {
  const seen = { name: it.name, errors: [], requests: [] };
  // Once as a browser does, by the page's policy; once more for axe-core.
  const page = await open(it.mode, it.width, it.height, seen);
  await keyed(page);
  await page.goto(asked.url + (it.hash ?? ""));
  await page.waitForSelector(it.wait);
  await page.waitForTimeout(1500); // two polls: what a second answer changes shows too
  seen.text = await page.evaluate(() => document.body.innerText);
  seen.wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  seen.pictures = await page.evaluate(() => [...document.querySelectorAll("svg[role=img]")].map((node) => node.getAttribute("aria-label")));
  seen.cookies = await page.evaluate(() => [document.cookie, localStorage.length]);
  if (it.shot) await page.screenshot({ path: it.shot, fullPage: true });
  await page.context().close();
  const checked = { errors: [], requests: [], bypass: true };
  const again = await open(it.mode, it.width, it.height, checked);
  await keyed(again);
  await again.goto(asked.url + (it.hash ?? ""));
  await again.waitForSelector(it.wait);
  seen.axe = await violations(again);
  await again.context().close();
  return seen;
}

const ACTS = {
  /** A reader without a key gives a wrong one, then the right one, then forgets it. */
  async key(page) {
    const steps = {};
    await page.goto(asked.url);
    await page.waitForSelector("#ask-key:not([hidden])");
    steps.focused = await page.evaluate(() => document.activeElement.id);
    await page.keyboard.type("wrong");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.getElementById("key-wrong").textContent);
    steps.wrong = await page.textContent("#key-wrong");
    await page.keyboard.type(asked.key);
    await page.keyboard.press("Enter");
    await page.waitForSelector(".verdict");
    steps.kept = await page.evaluate(() => [Object.values(sessionStorage), localStorage.length, document.cookie]);
    await page.reload();
    await page.waitForSelector(".verdict");
    await page.click("#forget");
    await page.waitForSelector("#ask-key:not([hidden])");
    steps.left = await page.evaluate(() => sessionStorage.getItem("moonserve-key"));
    return steps;
  },

  /** A reader with a keyboard only opens the first request of the list. */
  async keyboard(page) {
    await keyed(page);
    await page.goto(`${asked.url}#/requests`);
    await page.waitForSelector("td, th a");
    const names = [];
    for (let k = 0; k < 40; k++) {
      await page.keyboard.press("Tab");
      const on = await page.evaluate(() => {
        const it = document.activeElement;
        return [it.dataset.key ?? it.id ?? it.tagName, it.matches(":focus-visible")];
      });
      names.push(on);
      if (on[0] === "r1") break;
    }
    await page.waitForTimeout(2500); // a poll draws the list anew, and leaves the focus
    const still = await page.evaluate(() => document.activeElement.dataset.key ?? "");
    await page.keyboard.press("Enter");
    await page.waitForSelector("h1 .id");
    return { names, still, opened: await page.textContent("h1 .id") };
  },

  /** What the pure parts of charts.js compute. */
  async charts(page) {
    await page.goto(asked.url);
    return page.evaluate(async () => {
      const charts = await import("/ui/charts.js");
      const log = charts.scale(1, 100, 0, 200, true);
      const made = charts.figure({
        kind: "lines", title: "t", x_label: "s", y_label: "", shares: true,
        lines: [{ name: "a", tone: "c1", xs: [1, 2, 3, 4], ys: [0, 0.5, null, 1] }], goal: { at: 30, label: "goal 30 s" },
      });
      document.body.append(made);
      await new Promise((done) => setTimeout(done, 200));
      const label = { kind: "bars", title: "<b>x</b>", rows: [{ name: "<i>n</i>", parts: [{ size: 1, tone: "c1", label: "" }] }] };
      const bars = charts.figure(label);
      document.body.append(bars);
      await new Promise((done) => setTimeout(done, 200));
      return {
        ticks: charts.ticks(charts.scale(20, 40, 0, 500), 5),
        logTicks: charts.ticks(log, 9),
        middle: log(10),
        one: charts.ticks(charts.scale(3, 3, 0, 500), 5).length,
        runs: charts.runs([1, 1, 0, null, 1]),
        path: made.querySelector("path.line").getAttribute("d"),
        said: made.textContent,
        label: made.querySelector("svg").getAttribute("aria-label"),
        markup: bars.querySelectorAll("b, i:not(.box)").length,
        words: [charts.share(0.9999), charts.share(1), charts.time(0.5), charts.time(1234), charts.time(600_000), charts.time(null), charts.count(1234567), charts.bytes(3 * 2 ** 20), charts.short(12_345)],
      };
    });
  },
};

const seen = { errors: [], requests: [] };
let reply;
if (asked.act) {
  const page = await open("light", 1200, 900, seen);
  reply = { ...seen, act: await ACTS[asked.act](page) };
} else {
  reply = [];
  for (const it of asked.visits) reply.push(await visit(it));
}
process.stdout.write(JSON.stringify(reply));
await browser.close();
