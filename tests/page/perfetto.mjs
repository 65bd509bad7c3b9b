// Opens a trace in Perfetto's viewer and reports what the viewer shows, as JSON on stdout. Called by
// tests/page/test_perfetto.py; the first argument is a JSON object:
//   browser: path of Chromium; url: of the viewer, which loads its one trace; shot: file for a picture.
// Other hosts, and other ports of this one, get no request: the viewer must do without.

import { chromium } from "playwright-core";

const asked = JSON.parse(process.argv[2]);
const host = new URL(asked.url).host;
const BARS = `
  select slice.ts, slice.dur, slice.depth, slice.name, process.name as place, thread.name as track
  from slice join thread_track on slice.track_id = thread_track.id
  join thread using (utid) join process using (upid) order by slice.ts, slice.depth`;
const EXPAND = "dev.perfetto.ExpandAllGroups"; // known once the trace is open
const FAULTS = "select name from stats where severity in ('error', 'data_loss') and value > 0";

const browser = await chromium.launch({ executablePath: asked.browser, args: ["--no-sandbox"] });
const page = await (await browser.newContext({ viewport: { width: 1400, height: 900 } })).newPage();
page.setDefaultTimeout(60_000);
await page.route((url) => url.host !== host, (route) => route.abort());
const crashes = [];
page.on("pageerror", (error) => crashes.push(String(error)));

/** The rows of a query to the viewer's trace processor. */
async function rows(sql) {
  return page.evaluate(async (text) => {
    const answer = await window.app.trace.engine.query(text);
    const found = [];
    for (const row = answer.iter({}); row.valid(); row.next()) {
      found.push(answer.columns().map((name) => (typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name))));
    }
    return found;
  }, sql);
}

await page.goto(asked.url);
await page.waitForFunction(
  (id) => window.app?.trace?.engine && window.app.commands.commands.some((it) => it.id === id), EXPAND);
await page.evaluate((id) => window.app.commands.runCommand(id), EXPAND);
await page.waitForTimeout(1500); // it draws
const reply = { bars: await rows(BARS), faults: await rows(FAULTS), crashes };
reply.text = await page.evaluate(() => document.body.innerText);
await page.screenshot({ path: asked.shot });
process.stdout.write(JSON.stringify(reply));
await browser.close();
