// Questions to the server. Replies are kept for the export; an exported page answers from them.
// Every reply carries the id of the server's run: another one means that it was restarted.

export class Offline extends Error {}

let server = null;
let watcher = () => {};
const kept = []; // {path, body, value | binary}: the last replies
const MOST = 24;

const stored = document.getElementById("exported");
const exportedData = stored ? JSON.parse(stored.textContent) : null;

export const offline = exportedData !== null;
export const exportedState = exportedData?.state ?? null;

/** Call f("restarted" | "lost" | "back") when the server's state changes. */
export function watch(f) {
  watcher = f;
}

/** Compare two values of JSON, whatever the order of their keys. */
export function alike(a, b) {
  if (a === b) return true;
  if (!a || !b || typeof a !== "object" || typeof b !== "object") return false;
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((k) => k in b && alike(a[k], b[k]));
}

function keep(entry) {
  const old = kept.findIndex((e) => e.path === entry.path && alike(e.body, entry.body));
  if (old >= 0) kept.splice(old, 1);
  kept.push(entry);
  const same = kept.filter((e) => e.path === entry.path);
  if (same.length > 4) kept.splice(kept.indexOf(same[0]), 1);
  if (kept.length > MOST) kept.shift();
}

function fromFile(path, body) {
  const found = exportedData.replies.find((e) => e.path === path && alike(e.body, body));
  if (!found) {
    throw new Offline("This file holds what was shown when it was made. For more, run lmhead explore.");
  }
  return found;
}

async function ask(path, body, signal, headers = {}) {
  let response;
  try {
    response = await fetch(path, {
      method: body === null ? "GET" : "POST",
      headers: body === null || headers["Content-Type"] ? headers : { "Content-Type": "application/json" },
      body: body === null || headers["Content-Type"] ? body : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    watcher("lost");
    throw new Error("The server does not answer. Is lmhead explore still running?");
  }
  const id = response.headers.get("X-Lmhead-Server");
  if (server === null) server = id;
  watcher(id === server ? "back" : "restarted");
  server = id;
  if (!response.ok) {
    const reply = await response.json().catch(() => ({}));
    throw new Error(reply.error ?? `The server answered ${response.status}.`);
  }
  return response;
}

/** Ask for JSON; body null is a GET. */
export async function json(path, body = null, signal = undefined) {
  if (offline) return fromFile(path, body).value;
  const value = await (await ask(path, body, signal)).json();
  keep({ path, body, value });
  return value;
}

/** Ask for float32 numbers. */
export async function floats(path, body, signal = undefined) {
  if (offline) return decoded(fromFile(path, body).binary);
  const buffer = await (await ask(path, body, signal)).arrayBuffer();
  const values = new Float32Array(buffer);
  keep({ path, body, values });
  return values;
}

/** Turn base64 into float32 numbers. */
export function decoded(base64) {
  const text = atob(base64);
  const raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  return new Float32Array(raw.buffer);
}

function encoded(values) {
  const raw = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  let text = "";
  for (let i = 0; i < raw.length; i += 8192) {
    text += String.fromCharCode(...raw.subarray(i, i + 8192));
  }
  return btoa(text);
}

/** Send a file. */
export async function upload(path, file) {
  if (offline) throw new Offline("A file needs the server: run lmhead explore.");
  const response = await ask(path, file, undefined, { "Content-Type": "application/octet-stream" });
  return response.json();
}

/** Read the lines of a reply as they come; `onLine` gets every one but the result. */
export async function lines(path, body, onLine, signal = undefined) {
  if (offline) return fromFile(path, body).value;
  const response = await ask(path, body, signal);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const whole = rest.split("\n");
    rest = whole.pop();
    for (const line of whole) {
      const found = JSON.parse(line);
      if ("error" in found) throw new Error(found.error);
      if ("result" in found) {
        keep({ path, body, value: found.result });
        return found.result;
      }
      onLine(found);
    }
    if (done) throw new Error("The answer ended early. Try again.");
  }
}

/** Return the page as one HTML file, with the replies that are on it. */
export async function exportPage(state) {
  const replies = kept
    .filter((e) => e.path !== "/api/generate")
    .map(({ path, body, value, values }) =>
      values ? { path, body, binary: encoded(values) } : { path, body, value });
  const response = await ask("/api/export", { state, replies });
  return response.blob();
}

/** Look whether the server is there. */
export async function ping() {
  if (!offline) await ask("/api/alive", null).catch(() => {});
}

/** Tell what the server does before it has its model: {title, done, total}; null once it has it. */
export async function loading() {
  if (offline) return null;
  return (await (await ask("/api/alive", null)).json()).loading ?? null;
}
