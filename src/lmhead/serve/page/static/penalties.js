// What was said before, as the filters of lmhead/sampling/penalties.py count it.
// A sequence is {prompt, output, breakers}: ids, ids, and for ids that begin one of DRY's sequence
// breakers what must follow ([] for nothing).

const LARGEST_PENALTY = 1e30;

/** Return the last n ids of prompt and output; -1 for all of them. */
export function history(seq, lastN = -1) {
  const all = [...seq.prompt, ...seq.output];
  return lastN < 0 ? all : all.slice(Math.max(0, all.length - lastN));
}

/** Return the ids that a repetition penalty counts, each once. */
export function seen(seq, lastN) {
  return [...new Set(history(seq, lastN === null ? -1 : lastN))];
}

/** Count the ids that presence and frequency penalties count: the output, or the last n. */
export function tally(seq, lastN) {
  const counts = new Map();
  for (const id of lastN === null ? seq.output : history(seq, lastN)) {
    counts.set(id, (counts.get(id) ?? 0) + 1);
  }
  return counts;
}

/** Return the tokens that would complete a run of `size` tokens that has occurred before. */
export function completions(ids, size) {
  const found = new Set();
  const tail = size > 1 ? ids.slice(ids.length - size + 1) : [];
  for (let start = 0; start + size <= ids.length; start++) {
    if (tail.every((id, j) => ids[start + j] === id)) found.add(ids[start + size - 1]);
  }
  return found;
}

/** Return what DRY subtracts, by token. */
export function dry(seq, p) {
  let longest = Infinity;
  if (p.dry_base > 1 && p.dry_multiplier > 0) {
    const steps = Math.log(LARGEST_PENALTY / p.dry_multiplier) / Math.log(p.dry_base);
    longest = p.dry_allowed_length + Math.max(Math.ceil(steps), 0);
  }
  const ids = history(seq, p.dry_penalty_last_n);
  const found = new Map();
  for (const [id, length] of repeats(ids, p.dry_allowed_length, seq.breakers ?? {}, longest)) {
    const power = p.dry_base ** (length - p.dry_allowed_length);
    found.set(id, Math.min(p.dry_multiplier * power, LARGEST_PENALTY));
  }
  return found;
}

/** Return the tokens that would extend a repeat, and how long that repeat is already. */
export function repeats(ids, allowed, breakers, longest = Infinity) {
  const limit = Math.min(sinceBreaker(ids, breakers), longest);
  const lengths = new Map();
  if (limit < allowed) return lengths;
  let ends = ids.slice(0, -1).map((_, i) => i);
  for (let length = 0; ends.length && length < limit; ) {
    ends = ends.filter((e) => e >= length && ids[e - length] === ids[ids.length - 1 - length]);
    length += 1;
    if (length >= allowed) for (const e of ends) lengths.set(ids[e + 1], length);
  }
  for (const id of [...lengths.keys()]) {
    if ((breakers[id] ?? []).some((tail) => !tail.length)) lengths.delete(id);
  }
  return lengths;
}

function sinceBreaker(ids, breakers) {
  const n = ids.length;
  for (let start = n - 1; start >= 0; start--) {
    let most = -1;
    for (const tail of breakers[ids[start]] ?? []) {
      const fits = start + tail.length < n && tail.every((id, j) => ids[start + 1 + j] === id);
      if (fits) most = Math.max(most, tail.length);
    }
    if (most >= 0) return n - 1 - start - most;
  }
  return n;
}
