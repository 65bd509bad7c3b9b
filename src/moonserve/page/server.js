// What the page asks this server for. Every request is a GET of this server's admin API, with the
// key that the operator gave; the key is kept in sessionStorage and nowhere else.

const KEY = "moonserve-key";

/** The server wants a key, or another one. */
export class KeyNeeded extends Error {}

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** The JSON of a path. Throws KeyNeeded, or an Error whose message an operator understands. */
export async function get(path, signal) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  const stop = AbortSignal.any([AbortSignal.timeout(10_000), ...(signal ? [signal] : [])]);
  let reply;
  try {
    reply = await fetch(path, { headers, signal: stop, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error(error.name === "TimeoutError" ? "the gateway did not answer within 10 s" : "the gateway does not answer");
  }
  const body = await reply.json().catch(() => null);
  if (reply.ok) return body;
  const why = body?.error?.message ?? `status ${reply.status}`;
  if (reply.status === 401 || reply.status === 403) throw new KeyNeeded(key() ? why : "");
  throw Object.assign(new Error(why), { status: reply.status });
}
