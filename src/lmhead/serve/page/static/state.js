// What the page shows, as one flat object that is also its address.

const LISTS = new Set(["more", "banned_ids"]);
const TEXTS = new Set(["tab", "prompt", "order", "metric", "steer", "sort"]);
const SWITCHES = new Set(["chat", "heads", "keep_ties"]);

export const DEFAULTS = {
  tab: "next",
  prompt: "The capital of France is",
  more: [],
  chat: false,
  order: "hf",
  n: 40,
  seed: null,
  metric: "probability",
  follow: null,
  at: null,
  a: null,
  b: null,
  heads: false,
  sort: "size",
  steer: "",
  alpha: 0,
  cap: null,
  rows: null,
};

/** Read an address; `params` are the sampler's fields with their defaults. */
export function parse(address, params) {
  const state = { ...DEFAULTS };
  for (const [name, text] of new URLSearchParams(address)) {
    if (!(name in DEFAULTS) && !(name in params)) continue;
    const value = read(name, text);
    if (value !== undefined) state[name] = value;
  }
  return state;
}

function read(name, text) {
  if (TEXTS.has(name)) return text;
  if (SWITCHES.has(name)) return text === "1" || text === "true";
  if (LISTS.has(name)) {
    const ids = text.split(",").filter(Boolean).map(Number);
    return ids.every((id) => Number.isInteger(id) && id >= 0) ? ids : undefined;
  }
  if (name === "logit_bias") {
    const pairs = text.split(",").map((pair) => pair.split(":").map(Number));
    return pairs.flat().every(Number.isFinite) ? Object.fromEntries(pairs) : undefined;
  }
  const number = Number(text);
  return text !== "" && Number.isFinite(number) ? number : undefined;
}

/** Write the address of a state; what is as by default is left out. */
export function write(state, params) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    const usual = name in DEFAULTS ? DEFAULTS[name] : params[name];
    if (JSON.stringify(value) === JSON.stringify(usual) || value === undefined) continue;
    if (value === null) continue;
    if (name === "logit_bias") {
      found.set(name, Object.entries(value).map(([id, b]) => `${id}:${b}`).join(","));
    } else if (typeof value === "boolean") found.set(name, value ? "1" : "0");
    else found.set(name, Array.isArray(value) ? value.join(",") : String(value));
  }
  return found.toString();
}
