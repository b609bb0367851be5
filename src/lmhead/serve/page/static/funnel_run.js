// The funnel: every filter in its order, and what each of them cut. What a slider left unchanged
// is taken from the last run.

import { FILTERS, active, candidates, entropy, weights } from "./sampling.js";

export class Funnel {
  constructor(about) {
    this.about = about;
    this.kept = [];
  }

  /**
   * Run the filters on the logits of `seq`.
   * Returns steps of {name, left, cut, moved, entropy, c}; the first is named `logits`. A filter
   * that leaves nothing ends the run.
   */
  run(logits, seq, params, order) {
    const names = active(params, order, this.about);
    const old = this.kept;
    let first = old[0];
    if (!first || first.logits !== logits) {
      first = Object.assign(step("logits", null, candidates(logits)), { logits, key: "" });
    }
    this.kept = [first];
    let same = first === old[0];
    const context = JSON.stringify([seq.prompt, seq.output, seq.uniform, seq.mu]);
    for (const name of names) {
      const before = this.kept[this.kept.length - 1];
      if (!before.left) break;
      const fields = this.about.filters[name];
      const settings = [...fields.switches, ...fields.details].map((field) => params[field]);
      const key = JSON.stringify([name, settings]) + context;
      const again = old[this.kept.length];
      same = same && again?.key === key;
      const next = same ? again : step(name, before.c, FILTERS[name](before.c, params, seq));
      next.key = key;
      this.kept.push(next);
    }
    return this.kept;
  }
}

/** Tell what a filter did: `cut` is the mass of what it removed, `moved` the total variation. */
function step(name, before, c) {
  const left = c.z.length;
  const [cut, moved] = !left ? [1, 1] : before && before !== c ? change(before, c) : [0, 0];
  return { name, left, cut, moved, c, get entropy() { return left ? entropy(c) : 0; } };
}

function change(before, c) {
  const was = weights(before);
  const now = weights(c);
  if (c.removed) { // what is left keeps its odds: it moves by what was cut
    const cut = Math.max(0, 1 - (now.total * Math.exp(now.best - was.best)) / was.total);
    return [cut, cut];
  }
  const a = 1 / was.total;
  const b = 1 / now.total;
  let moved = 0;
  if (c.edited) { // the others keep their odds
    let others = was.total;
    for (const i of c.edited) {
      others -= was.w[i];
      moved += Math.abs(now.w[i] * b - was.w[i] * a);
    }
    return [0, (moved + others * Math.abs(b - a)) / 2];
  }
  for (let i = 0; i < was.w.length; i++) moved += Math.abs(now.w[i] * b - was.w[i] * a);
  return [0, moved / 2];
}
