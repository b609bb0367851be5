// A squarified treemap: areas as given, rectangles as near to squares as they come.
// Source: Bruls, Huizing, van Wijk, "Squarified treemaps" (2000).

/** Lay out items of {value} in a box; returns {item, x, y, w, h} each. */
export function squarify(items, x, y, w, h) {
  const total = items.reduce((sum, item) => sum + item.value, 0);
  const scale = total > 0 ? (w * h) / total : 0;
  const left = items
    .map((item) => ({ item, area: item.value * scale }))
    .filter(({ area }) => area > 0)
    .sort((a, b) => b.area - a.area);
  const done = [];
  while (left.length) {
    const side = Math.min(w, h);
    const row = [left.shift()];
    let sum = row[0].area;
    while (left.length && worst([...row, left[0]], sum + left[0].area, side) <= worst(row, sum, side)) {
      sum += left[0].area;
      row.push(left.shift());
    }
    const thick = sum / side;
    let at = 0;
    for (const { item, area } of row) {
      const long = area / thick;
      done.push(w >= h ? { item, x, y: y + at, w: thick, h: long } : { item, x: x + at, y, w: long, h: thick });
      at += long;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
  }
  return done;
}

function worst(row, sum, side) {
  const areas = row.map(({ area }) => area);
  const s = sum * sum;
  return Math.max((side * side * Math.max(...areas)) / s, s / (side * side * Math.min(...areas)));
}
