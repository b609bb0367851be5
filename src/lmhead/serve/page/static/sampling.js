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

/** Give w = exp(z - best) `[N]` float32, best, and the sum of w. */
export function weights(c) {
  if (c.weights) return c.weights; // candidates are never changed in place
  const { z } = c;
  const best = max(z);
  const w = new Float32Array(z.length);
  let total = 0;
  for (let i = 0; i < z.length; i++) {
    w[i] = Math.exp(f(z[i] - best));
    total += w[i];
  }
  c.weights = { w, best, total };
  return c.weights;
}

/** Return the entropy of the candidates, in nats; few stages ask for it. */
export function entropy(c) {
  if (c.entropy === undefined) {
    const { w, best, total } = weights(c);
    let energy = 0;
    for (let i = 0; i < w.length; i++) energy += f(w[i] * f(c.z[i] - best));
    c.entropy = Math.log(total) - energy / total;
  }
  return c.entropy;
}

/** Return the probability of the candidate at a place. */
export function probability(c, i) {
  const { w, total } = weights(c);
  return w[i] / total;
}

/** Return the probabilities of the candidates, `[N]` float64. */
export function probabilities(c) {
  return Float64Array.from(c.z, (_, i) => probability(c, i));
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

// The loops below run over a whole vocabulary for every move of a slider: no call per element, and
// what stays is gathered in memory that is there already.

const room = { z: new Float32Array(0), ids: new Int32Array(0), w: new Float32Array(0) };

function cleared(n) {
  if (room.z.length < n) {
    room.z = new Float32Array(n);
    room.ids = new Int32Array(n);
    room.w = new Float32Array(n);
  }
  return room;
}

/**
 * Keep the candidates whose score, their logit by default, is above a level; of those that equal it
 * the ones up to the place `lastTie`. `removed` says that nothing else changed.
 */
function atLeast(c, level, score = c.z, lastTie = Infinity) {
  const { z, ids } = c;
  const was = weights(c);
  const to = cleared(z.length);
  let left = 0;
  let total = 0;
  let best = false;
  for (let i = 0; i < z.length; i++) {
    const s = score[i];
    if (!(s > level || (s === level && i <= lastTie))) continue;
    to.z[left] = z[i];
    to.ids[left] = ids[i];
    to.w[left++] = was.w[i];
    total += was.w[i];
    if (z[i] === was.best) best = true;
  }
  if (left === z.length) return c;
  const kept = { z: to.z.slice(0, left), ids: to.ids.slice(0, left), removed: true };
  // else the weights are relative to another best logit
  if (best) kept.weights = { w: to.w.slice(0, left), best: was.best, total };
  return kept;
}

/** Keep the candidates for which stays(place) holds. */
function keep(c, stays) {
  return atLeast(c, 1, Float32Array.from(c.z, (_, i) => (stays(i) ? 1 : 0)));
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
  if (!changed.length) return c;
  const made = { z, ids: c.ids };
  const was = weights(c);
  if (changed.some((at) => c.z[at] === was.best || z[at] > was.best)) return made;
  const w = was.w.slice();
  let { total } = was;
  for (const at of changed) {
    total -= w[at];
    w[at] = Math.exp(f(z[at] - was.best));
    total += w[at];
  }
  made.weights = { w, best: was.best, total };
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
  return atLeast(c, level, score, keepTies ? Infinity : ties[ties.length - 1]);
}

function temperature(c, p) {
  if (p.dynatemp_range === 0) {
    if (p.temperature < GREEDY_BELOW) return only(c);
    return divided(c, f(p.temperature));
  }
  const low = Math.max(0, p.temperature - p.dynatemp_range);
  const high = p.temperature + p.dynatemp_range;
  const largest = Math.log(c.z.length);
  const raw = largest > 0 ? entropy(c) / largest : 0;
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
  const { w, total } = weights(c);
  const lse = f(logsumexp(c));
  const exact = entropy(c);
  const H = f(exact);
  const score = new Float32Array(c.z.length);
  for (let i = 0; i < score.length; i++) score[i] = -Math.abs(f(f(c.z[i] - lse) + H));
  const rare = -Math.log((1 - p.typical_p) / c.z.length);
  const floor = f(-Math.max(exact, rare - exact) - 0.01);
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
  const lowered = Math.min(0.5 * cutoff - entropy(c), cutoff);
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

/** Cut a few tokens: what stands between them is copied as a whole. */
function without(c, ids) {
  const places = [...ids].map((id) => place(c.ids, id)).filter((at) => at >= 0).sort((a, b) => a - b);
  if (!places.length) return c;
  const was = weights(c);
  const left = c.z.length - places.length;
  const copied = (from, to) => {
    let start = 0;
    let n = 0;
    for (const at of [...places, from.length]) {
      to.set(from.subarray(start, at), n);
      n += at - start;
      start = at + 1;
    }
    return to;
  };
  const kept = {
    z: copied(c.z, new Float32Array(left)), ids: copied(c.ids, new Int32Array(left)), removed: true,
  };
  if (places.every((at) => c.z[at] < was.best)) {
    const total = places.reduce((sum, at) => sum - was.w[at], was.total);
    kept.weights = { w: copied(was.w, new Float32Array(left)), best: was.best, total };
  }
  return kept;
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
