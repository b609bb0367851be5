// The sampling filters, for one sequence: the same rules, order and roundings as lmhead.sampling.
// Logits and levels are float32 (Math.fround), sums float64. Candidates are {z, ids}: logits
// Float32Array and ids Int32Array, ascending; a token that was cut is not among them.

import { lastKept } from "./select.js";
import { completions, dry, history, seen, tally } from "./penalties.js";

const GREEDY_BELOW = 1e-5;
const f = Math.fround;

/** Begin with all logits; rows from `size` on have no token. */
export function candidates(logits, size = logits.length) {
  let left = 0;
  for (let i = 0; i < size; i++) if (logits[i] > -Infinity) left++;
  const z = new Float32Array(left);
  const ids = new Int32Array(left);
  for (let i = 0, n = 0; i < size; i++) {
    if (logits[i] > -Infinity) {
      z[n] = logits[i];
      ids[n++] = i;
    }
  }
  return { z, ids };
}

/** Give w = exp(z - best) `[N]` (float32 once, float64 once), their sums, and the entropy. */
export function weights(c) {
  if (c.weights) return c.weights; // candidates are never changed in place
  const { z } = c;
  const best = max(z);
  const w = new Float32Array(z.length);
  const exact = new Float64Array(z.length);
  let total = 0;
  let sum = 0;
  let energy = 0;
  for (let i = 0; i < z.length; i++) {
    const off = f(z[i] - best);
    const e = Math.exp(off);
    exact[i] = e;
    w[i] = e;
    sum += e;
    total += w[i];
    energy += f(w[i] * off);
  }
  const entropy = Math.log(total) - energy / total;
  c.weights = { w, exact, best, total, sum, energy, entropy };
  return c.weights;
}

/** Return the probabilities of the candidates, `[N]` float64. */
export function probabilities(c) {
  const { exact, sum } = weights(c);
  const p = new Float64Array(exact.length);
  for (let i = 0; i < p.length; i++) p[i] = exact[i] / sum;
  return p;
}

function max(z) {
  let best = -Infinity;
  for (let i = 0; i < z.length; i++) if (z[i] > best) best = z[i];
  return best;
}

function logsumexp(c) {
  const { best, total } = weights(c);
  return best + Math.log(total);
}

// The loops below run over a whole vocabulary for every move of a slider: no call per element.

/** Keep the candidates whose mask is 1, `left` of them; `removed` says that nothing else changed. */
function masked(c, mask, left) {
  const { z, ids } = c;
  if (left === z.length) return c;
  const was = weights(c);
  const kept = { z: new Float32Array(left), ids: new Int32Array(left), removed: true };
  const w = new Float32Array(left);
  const exact = new Float64Array(left);
  let best = false;
  let total = 0;
  let sum = 0;
  let energy = 0;
  for (let i = 0, n = 0; i < z.length; i++) {
    if (!mask[i]) continue;
    kept.z[n] = z[i];
    kept.ids[n] = ids[i];
    w[n] = was.w[i];
    exact[n++] = was.exact[i];
    if (z[i] === was.best) best = true;
    total += was.w[i];
    sum += was.exact[i];
    energy += f(was.w[i] * f(z[i] - was.best));
  }
  if (best) { // else the weights are relative to another best logit
    const entropy = Math.log(total) - energy / total;
    kept.weights = { w, exact, best: was.best, total, sum, energy, entropy };
  }
  return kept;
}

/** Keep the candidates whose score, their logit by default, reaches a level. */
function atLeast(c, level, score = c.z) {
  const mask = new Uint8Array(score.length);
  let left = 0;
  for (let i = 0; i < score.length; i++) {
    if (score[i] >= level) {
      mask[i] = 1;
      left++;
    }
  }
  return masked(c, mask, left);
}

/** Keep the candidates for which stays(place) holds. */
function keep(c, stays) {
  const mask = new Uint8Array(c.z.length);
  let left = 0;
  for (let i = 0; i < mask.length; i++) left += mask[i] = stays(i) ? 1 : 0;
  return masked(c, mask, left);
}

/** Divide all logits. */
function divided(c, by) {
  const z = new Float32Array(c.z.length);
  for (let i = 0; i < z.length; i++) z[i] = c.z[i] / by;
  return { z, ids: c.ids };
}

/**
 * Change the logits of a few tokens: change is a function of (logit, id). Where the best logit
 * stays, only the weights of these tokens are computed anew.
 */
function edit(c, ids, change) {
  const z = c.z.slice();
  const changed = [];
  for (const id of ids) {
    const at = place(c.ids, id);
    if (at < 0) continue;
    z[at] = change(z[at], id);
    changed.push(at);
  }
  const made = { z, ids: c.ids };
  const was = weights(c);
  if (changed.some((at) => c.z[at] === was.best || z[at] > was.best)) return made;
  const now = { ...was, w: was.w.slice(), exact: was.exact.slice() };
  for (const at of changed) {
    now.sum -= now.exact[at];
    now.total -= now.w[at];
    now.energy -= f(now.w[at] * f(c.z[at] - was.best));
    const off = f(z[at] - was.best);
    now.w[at] = now.exact[at] = Math.exp(off);
    now.sum += now.exact[at];
    now.total += now.w[at];
    now.energy += f(now.w[at] * off);
  }
  now.entropy = Math.log(now.total) - now.energy / now.total;
  made.weights = now;
  made.edited = changed;
  return made;
}

function place(ids, id) {
  let low = 0;
  let high = ids.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (ids[middle] === id) return middle;
    if (ids[middle] < id) low = middle + 1;
    else high = middle - 1;
  }
  return -1;
}

function prefixes(c, score, w, target, floor, keepTies) {
  const { level, ties } = lastKept(score, w, target, floor);
  if (keepTies) return atLeast(c, level, score);
  const mask = new Uint8Array(score.length);
  let left = ties.length;
  for (let i = 0; i < score.length; i++) {
    if (score[i] > level) {
      mask[i] = 1;
      left++;
    }
  }
  for (const i of ties) mask[i] = 1;
  return masked(c, mask, left);
}

function temperature(c, p) {
  if (p.dynatemp_range === 0) {
    if (p.temperature < GREEDY_BELOW) return only(c);
    return divided(c, f(p.temperature));
  }
  const low = Math.max(0, p.temperature - p.dynatemp_range);
  const high = p.temperature + p.dynatemp_range;
  const largest = Math.log(c.z.length);
  const raw = largest > 0 ? weights(c).entropy / largest : 0;
  const share = Math.min(Math.max(raw, 0), 1);
  const T = low + (high - low) * share ** p.dynatemp_exponent;
  return T < GREEDY_BELOW ? only(c) : divided(c, T);
}

function only(c) {
  const first = c.z.indexOf(weights(c).best);
  return { z: c.z.slice(first, first + 1), ids: c.ids.slice(first, first + 1), removed: true };
}

function topP(c, p) {
  if (p.top_p >= 1) return c;
  const { w, best, total } = weights(c);
  const floor = f(best + Math.log((total * (1 - p.top_p)) / c.z.length) - 0.01);
  return prefixes(c, c.z, w, total * p.top_p, floor, p.keep_ties);
}

function typicalP(c, p) {
  if (p.typical_p >= 1) return c;
  const { w, total, entropy } = weights(c);
  const lse = f(logsumexp(c));
  const H = f(entropy);
  const score = new Float32Array(c.z.length);
  for (let i = 0; i < score.length; i++) score[i] = -Math.abs(f(f(c.z[i] - lse) + H));
  const rare = -Math.log((1 - p.typical_p) / c.z.length);
  const floor = f(-Math.max(entropy, rare - entropy) - 0.01);
  return prefixes(c, score, w, total * p.typical_p, floor, p.keep_ties);
}

function topNSigma(c, p) {
  let sum = 0;
  for (let i = 0; i < c.z.length; i++) sum += c.z[i];
  const mean = f(sum / c.z.length);
  let squares = 0;
  for (let i = 0; i < c.z.length; i++) {
    const off = f(c.z[i] - mean);
    squares += f(off * off);
  }
  const sigma = Math.sqrt(squares / c.z.length);
  return atLeast(c, f(weights(c).best - f(p.top_n_sigma * sigma)));
}

function eta(c, p) {
  const cutoff = Math.log(p.eta_cutoff);
  const lowered = Math.min(0.5 * cutoff - weights(c).entropy, cutoff);
  return atLeast(c, Math.min(weights(c).best, f(logsumexp(c) + lowered)));
}

function xtc(c, p, seq) {
  if (!((seq.uniform ?? 0) < p.xtc_probability)) return c;
  const log = p.xtc_threshold > 0 ? Math.log(p.xtc_threshold) : -Infinity;
  const level = f(logsumexp(c) + log);
  let last = -1;
  for (let i = 0; i < c.z.length; i++) {
    if (c.z[i] >= level && (last < 0 || c.z[i] <= c.z[last])) last = i;
  }
  return keep(c, (i) => !(c.z[i] >= level) || i === last);
}

function mirostat(c, p, seq) {
  const mu = seq.mu ?? 2 * p.mirostat_tau;
  return atLeast(c, Math.min(weights(c).best, f(logsumexp(c) - mu * Math.LN2)));
}

function without(c, ids) {
  const mask = new Uint8Array(c.z.length).fill(1);
  let left = c.z.length;
  for (const id of ids) {
    const at = place(c.ids, id);
    if (at >= 0 && mask[at]) {
      mask[at] = 0;
      left--;
    }
  }
  return masked(c, mask, left);
}

export const FILTERS = {
  allowed_ids: (c, p) => {
    const allowed = new Set(p.allowed_ids);
    return keep(c, (i) => allowed.has(c.ids[i]));
  },
  banned_ids: (c, p) => without(c, new Set(p.banned_ids)),
  min_tokens: (c, p, seq) =>
    seq.output.length < p.min_tokens ? without(c, new Set(p.stop_ids)) : c,
  logit_bias: (c, p) =>
    edit(c, Object.keys(p.logit_bias).map(Number), (z, id) => z + f(p.logit_bias[id])),
  repetition_penalty: (c, p, seq) => {
    const by = f(p.repetition_penalty);
    return edit(c, seen(seq, p.penalty_last_n), (z) => (z < 0 ? z * by : z / by));
  },
  frequency_penalty: (c, p, seq) => {
    const counts = tally(seq, p.penalty_last_n);
    const by = f(p.frequency_penalty);
    return edit(c, counts.keys(), (z, id) => z - f(by * counts.get(id)));
  },
  presence_penalty: (c, p, seq) =>
    edit(c, tally(seq, p.penalty_last_n).keys(), (z) => z - f(p.presence_penalty)),
  no_repeat_ngram: (c, p, seq) => without(c, completions(history(seq), p.no_repeat_ngram_size)),
  dry: (c, p, seq) => {
    const amounts = dry(seq, p);
    return edit(c, amounts.keys(), (z, id) => z - f(amounts.get(id)));
  },
  temperature,
  top_n_sigma: (c, p) => (p.top_n_sigma > 0 ? topNSigma(c, p) : c),
  top_k: (c, p) =>
    p.top_k === 0 || p.top_k >= c.z.length
      ? c
      : prefixes(c, c.z, null, p.top_k, -Infinity, p.keep_ties),
  top_p: topP,
  min_p: (c, p) => (p.min_p > 0 ? atLeast(c, f(weights(c).best + f(Math.log(p.min_p)))) : c),
  typical_p: typicalP,
  epsilon: (c, p) =>
    p.epsilon_cutoff > 0
      ? atLeast(c, Math.min(weights(c).best, f(logsumexp(c) + Math.log(p.epsilon_cutoff))))
      : c,
  eta: (c, p) => (p.eta_cutoff > 0 ? eta(c, p) : c),
  xtc,
  mirostat,
};

/** Name the filters that are switched on, in this order. `about` is what /api/model tells. */
export function active(params, order, about) {
  const on = (name) =>
    about.filters[name].switches.some((s) => !same(params[s], about.defaults[s]));
  return order.filter((name) => name in FILTERS && on(name));
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
