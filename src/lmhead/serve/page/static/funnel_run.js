// The funnel: every filter in its order, and what each of them cut. What a slider left unchanged
// is taken from the last run.

import { FILTERS, active, candidates, weights } from "./sampling.js";

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
      first = { ...step("logits", null, candidates(logits)), logits, key: "" };
    }
    this.kept = [first];
    let same = first === old[0];
    for (const name of names) {
      const before = this.kept[this.kept.length - 1];
      if (!before.left) break;
      const fields = this.about.filters[name];
      const settings = [...fields.switches, ...fields.details].map((field) => params[field]);
      const told = seq.version ?? [seq.prompt, seq.output, seq.uniform, seq.mu];
      const key = JSON.stringify([name, settings, told]);
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
  if (!c.z.length) return { name, left: 0, cut: 1, moved: 1, entropy: 0, c };
  const after = weights(c);
  const [cut, moved] = before && before !== c ? change(before, c) : [0, 0];
  return { name, left: c.z.length, cut, moved, entropy: after.entropy, c };
}

function change(before, c) {
  const was = weights(before);
  const now = weights(c);
  if (c.removed) { // what is left keeps its odds: it moves by what was cut
    const cut = Math.max(0, 1 - (now.sum * Math.exp(now.best - was.best)) / was.sum);
    return [cut, cut];
  }
  if (c.edited) { // the others keep their odds
    let moved = 0;
    let others = was.sum;
    for (const i of c.edited) {
      others -= was.exact[i];
      moved += Math.abs(now.exact[i] / now.sum - was.exact[i] / was.sum);
    }
    return [0, (moved + others * Math.abs(1 / now.sum - 1 / was.sum)) / 2];
  }
  let moved = 0;
  const a = 1 / was.sum;
  const b = 1 / now.sum;
  for (let i = 0; i < was.exact.length; i++) moved += Math.abs(now.exact[i] * b - was.exact[i] * a);
  return [0, moved / 2];
}
