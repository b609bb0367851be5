// The few best of very many numbers, without sorting all of them.
// The same walk as lmhead/sampling/filters.py takes: equal bins of the score, then the one bin in
// which the running weight crosses the target, until what is left is small enough to sort.

const BINS = 2048;
const SORT_AT_MOST = 2048;

/**
 * Find the last column that the shortest run, highest score first, needs to weigh `target`.
 * score: Float32Array in ascending id order; w: Float32Array of weights, or null for 1 each.
 * Columns that score below `floor` are known not to be needed.
 * Returns {level, ties}: every score above level stays, and the columns of `ties` that equal it.
 */
export function lastKept(score, w, target, floor = -Infinity) {
  let columns = new Uint32Array(score.length);
  let n = 0;
  for (let i = 0; i < score.length; i++) if (score[i] >= floor) columns[n++] = i;
  columns = columns.subarray(0, n);
  const bins = new Uint16Array(n > SORT_AT_MOST ? n : 0);
  const sums = new Float64Array(BINS);
  while (columns.length > SORT_AT_MOST) {
    let low = Infinity;
    let high = -Infinity;
    for (let j = 0; j < columns.length; j++) {
      const s = score[columns[j]];
      if (s < low) low = s;
      if (s > high) high = s;
    }
    const spread = Math.fround(high - low);
    if (!(spread >= 1e-30)) break; // all but equal: no bins between them
    const scale = Math.fround((BINS - 1) / spread);
    sums.fill(0);
    let last = 0;
    for (let j = 0; j < columns.length; j++) {
      const i = columns[j];
      const bin = Math.trunc(Math.fround(Math.fround(high - score[i]) * scale));
      bins[j] = bin;
      if (bin > last) last = bin;
      sums[bin] += w === null ? 1 : w[i];
    }
    let edge = 0;
    let before = 0;
    let sum = sums[0];
    while (edge < BINS - 1 && sum < target) {
      before = sum;
      sum += sums[++edge];
    }
    if (sum < target) { // by rounding the weights do not quite reach the target
      edge = last;
      before = 0;
      for (let b = 0; b < edge; b++) before += sums[b];
    }
    target -= before;
    let m = 0;
    for (let j = 0; j < columns.length; j++) if (bins[j] === edge) columns[m++] = columns[j];
    columns = columns.subarray(0, m);
  }
  const order = Array.from(columns);
  order.sort((a, b) => score[b] - score[a] || a - b); // the lowest ids come first among equals
  let kept = 0;
  let sum = 0;
  while (kept < order.length) {
    sum += w === null ? 1 : w[order[kept]];
    kept++;
    if (sum >= target) break;
  }
  const level = score[order[kept - 1]];
  const ties = [];
  for (let j = kept - 1; j >= 0 && score[order[j]] === level; j--) ties.push(order[j]);
  return { level, ties: ties.reverse() };
}

/** Return the columns of the n highest scores, best first, the lowest ids first among equals. */
export function highest(score, n) {
  const best = [];
  let least = -Infinity; // of the best, once there are n
  for (let i = 0; i < score.length && n > 0; i++) {
    const s = score[i];
    if (best.length === n && !(s > least)) continue;
    let at = best.length;
    while (at > 0 && score[best[at - 1]] < s) at--;
    best.splice(at, 0, i);
    if (best.length > n) best.pop();
    if (best.length === n) least = score[best[n - 1]];
  }
  return best;
}
