// Size: the parameters as a treemap with the head in it, and what fewer rows would save.

import { json, lines, offline } from "./api.js";
import { bytes, count, h, parameters, percent, problem, working } from "./dom.js";
import { squarify } from "./treemap.js";

const W = 1000;
const H = 380;

export function sizePanel(store) {
  const map = h("div", { class: "map", role: "img" });
  const legend = h("ul", { class: "legend" });
  const rows = h("input", { type: "range", id: "rows", min: 0, max: 1, step: 1 });
  const kept = h("output", { for: "rows", class: "big num" });
  const facts = h("dl", { class: "facts" });
  const chart = h("figure", { class: "chart" });
  const place = h("div", {});
  const note = h("p", { class: "muted small" });
  const text = h("textarea", { id: "corpus", rows: 3, placeholder: "Plain sentences that come with lmhead. Paste text of your own to measure on that." });
  const measure = h("button", { type: "button", id: "measure" }, "Measure");
  let sizes = null;
  let found = null;
  let running = null;
  measure.disabled = offline;
  measure.addEventListener("click", () => hear(text.value.trim() || null));
  rows.addEventListener("input", () => {
    store.set({ rows: found.rows[Number(rows.value)] });
    draw();
  });

  const element = h(
    "div", { class: "stack" },
    h("section", { class: "card" }, h("h2", {}, "Parameters"), map, legend),
    h("section", { class: "card" },
      h("h2", {}, "Fewer rows"),
      h("p", { class: "muted small" }, "A preview of lmhead trim: the rows that the model uses most on some text, in whole blocks of 64, each token with all that it is made of."),
      h("div", { class: "columns even" },
        h("div", { class: "stack" },
          h("label", { for: "rows", class: "title" }, "Rows kept"), rows, kept, place, facts),
        h("div", { class: "stack" }, chart,
          h("label", { for: "corpus", class: "title" }, "Measured on"), text,
          h("div", { class: "row" }, measure), note))),
  );

  async function update() {
    if (!sizes) {
      try {
        sizes = await json("/api/size");
      } catch (error) {
        map.replaceChildren(problem(error));
        return;
      }
      drawMap();
    }
    if (!found && !running) await hear(null);
    else if (found) draw();
  }

  async function hear(given) {
    running?.abort();
    const mine = (running = new AbortController());
    const progress = working(() => mine.abort());
    place.replaceChildren(progress.element);
    try {
      const result = await lines("/api/coverage", { text: given }, (line) => line.progress && progress.update(line.progress), mine.signal);
      if (mine !== running) return;
      found = result;
      place.replaceChildren();
      rows.max = found.rows.length - 1;
      draw();
    } catch (error) {
      if (mine !== running) return;
      place.replaceChildren(error.name === "AbortError" ? h("p", { class: "muted" }, "Cancelled.") : problem(error));
    }
    running = null;
  }

  function drawMap() {
    const kinds = new Map();
    for (const part of sizes.parts) {
      const kind = part.name;
      const one = kinds.get(kind) ?? { name: kind, value: 0, parts: [] };
      one.value += part.parameters;
      one.parts.push({ value: part.parameters, part });
      kinds.set(kind, one);
    }
    const total = [...kinds.values()].reduce((sum, kind) => sum + kind.value, 0);
    const boxes = [];
    for (const outer of squarify([...kinds.values()], 0, 0, W, H)) {
      const kind = outer.item;
      for (const inner of squarify(kind.parts, outer.x, outer.y, outer.w, outer.h)) {
        const { part } = inner.item;
        if (inner.w < 4 || inner.h < 4) continue; // the legend tells of it
        const alone = kind.parts.length === 1;
        const name = alone ? kind.name : String(part.block);
        const box = h("div", {
          class: `box k-${kind.name.split(" ")[0]}`,
          title: `${part.block === null ? "" : `block ${part.block} `}${part.name}: ${parameters(part.parameters)} parameters, ${percent(part.parameters / total)}`,
        }, h("span", {}, inner.w > 26 && inner.h > 18 ? name : ""),
          alone && inner.w > 120 && inner.h > 60 ? h("small", {}, `${parameters(part.parameters)}, ${percent(part.parameters / total)}`) : null);
        box.style.left = `${(100 * inner.x) / W}%`;
        box.style.top = `${(100 * inner.y) / H}%`;
        box.style.width = `${(100 * inner.w) / W}%`;
        box.style.height = `${(100 * inner.h) / H}%`;
        boxes.push(box);
      }
    }
    map.replaceChildren(...boxes);
    const shown = [...kinds.values()].sort((x, y) => y.value - x.value);
    map.setAttribute("aria-label", `Treemap of ${parameters(total)} parameters: ${shown.map((k) => `${k.name} ${percent(k.value / total)}`).join(", ")}`);
    legend.replaceChildren(...shown.map((kind) => h("li", {}, h("i", { class: `k-${kind.name.split(" ")[0]}` }),
      `${kind.name} `, h("span", { class: "num muted" }, `${parameters(kind.value)}, ${percent(kind.value / total)}`))));
  }

  function draw() {
    if (!found || !sizes) return;
    const wanted = store.state.rows ?? found.rows[found.share.findIndex((s) => s >= 0.99)];
    let at = found.rows.findIndex((n) => n >= wanted);
    if (at < 0) at = found.rows.length - 1;
    rows.value = at;
    const n = found.rows[at];
    rows.setAttribute("aria-valuetext", `${count(n)} rows`);
    const gone = sizes.rows - n;
    const all = sizes.parts.reduce((sum, p) => sum + p.parameters, 0);
    const heavy = sizes.parts.reduce((sum, p) => sum + p.bytes, 0);
    kept.textContent = `${count(n)} of ${count(sizes.rows)}`;
    facts.replaceChildren(
      ...fact("Parameters", `${parameters(all - gone * sizes.row.parameters)}`, `of ${parameters(all)}, ${percent((gone * sizes.row.parameters) / all)} less`),
      ...fact("Bytes", bytes(heavy - gone * sizes.row.bytes), `of ${bytes(heavy)} in ${sizes.dtype}`),
      ...fact("Coverage", percent(found.share[at]), `of all probability at ${count(found.positions)} positions`),
      ...fact("Greedy choices", `${count(found.chosen[at])} of ${count(found.choices)}`, "tokens that the model chose there"),
    );
    note.textContent = found.note ?? "";
    drawCurve(at);
  }

  function drawCurve(at) {
    const width = 480;
    const height = 180;
    const left = 44;
    const x = (n) => left + ((n - found.rows[0]) / Math.max(1, sizes.rows - found.rows[0])) * (width - left - 12);
    const y = (s) => 10 + (1 - s) * (height - 40);
    const every = Math.max(1, Math.floor(found.rows.length / 200));
    const points = found.rows.map((n, i) => [n, found.share[i]]).filter((_, i, l) => i % every === 0 || i === l.length - 1);
    const path = points.map(([n, s], i) => `${i ? "L" : "M"}${x(n).toFixed(1)} ${y(s).toFixed(1)}`).join("");
    chart.replaceChildren(
      h("figcaption", {}, "Coverage by rows kept"),
      h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Coverage against the number of rows kept" },
        ...[0, 0.5, 1].flatMap((s) => [
          h("line", { x1: left, x2: width - 12, y1: y(s), y2: y(s), class: "axis" }),
          h("text", { x: left - 6, y: y(s) + 4, class: "tick end" }, `${100 * s} %`)]),
        h("path", { d: path, class: "line" }),
        h("line", { x1: x(found.rows[at]), x2: x(found.rows[at]), y1: y(1), y2: y(0), class: "now" }),
        h("circle", { cx: x(found.rows[at]), cy: y(found.share[at]), r: 4.5, class: "dot" }),
        h("text", { x: left, y: height - 6, class: "tick" }, count(found.rows[0])),
        h("text", { x: width - 12, y: height - 6, class: "tick end" }, `${count(sizes.rows)} rows`)));
  }
  return { element, update };
}

function fact(name, value, note) {
  return [h("dt", {}, name), h("dd", {}, h("b", {}, value), h("span", { class: "muted small" }, note))];
}
