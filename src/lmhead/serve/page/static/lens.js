// Lens: what the head would say after every block, at every position.

import { lines } from "./api.js";
import { count, h, percent, problem, setVar, visible, working } from "./dom.js";
import { picker } from "./picker.js";

const METRICS = {
  probability: { title: "Probability of the top word", value: (c) => c.top[0].probability, text: (c) => percent(c.top[0].probability) },
  rank: { title: "Rank of the final word", value: (c) => 1 - Math.min(1, Math.log10(c.rank) / 4), text: (c) => `rank ${c.rank.toLocaleString("en")}` },
  entropy: { title: "Entropy", value: (c) => Math.max(0, 1 - c.entropy / 10), text: (c) => `${c.entropy.toFixed(2)} nats` },
  kl: { title: "KL to the final answer", value: (c) => Math.max(0, 1 - c.kl / 10), text: (c) => `KL ${c.kl.toFixed(3)} nats` },
  followed: { title: "Probability of the pinned word", value: (c) => c.token_probability ?? 0, text: (c) => percent(c.token_probability ?? 0) },
};

export function lensPanel(store) {
  const metric = h("select", { id: "metric" });
  for (const [name, { title }] of Object.entries(METRICS)) metric.append(h("option", { value: name }, title));
  metric.addEventListener("change", () => store.set({ metric: metric.value }));
  const follow = picker({
    label: "Pinned word", name: "follow", store, empty: "click a cell",
    choose: (id) => store.set({ follow: id }),
  });
  const badge = h("p", { class: "badge", hidden: true });
  const place = h("div", {});
  const scroll = h("div", { class: "scroll", role: "region", "aria-label": "Lens, block by position", tabindex: "0" });
  const detail = h("section", { class: "card", "aria-live": "polite" });
  let asked = null;
  let shown = null;
  let running = null;
  let before = 0; // positions of the text that come before those shown
  let cells = [];

  const element = h(
    "div", { class: "stack" },
    h(
      "section", { class: "card" },
      h("div", { class: "row between wrap" }, h("h2", {}, "What every block would say"), badge),
      h("div", { class: "row wrap" },
        h("label", { class: "field", for: "metric" }, "Colour ", metric), follow.element),
      place, scroll,
    ),
    detail,
  );

  async function update() {
    const { metric: name, follow: token } = store.state;
    metric.value = METRICS[name] ? name : "probability";
    metric.querySelector('[value="followed"]').disabled = token === null;
    follow.set(token);
    if (!store.read) return;
    const question = JSON.stringify([store.read.ids, token]);
    if (question === asked) { if (shown) draw(); return; }
    asked = question;
    running?.abort();
    const mine = (running = new AbortController());
    const progress = working(() => mine.abort());
    place.replaceChildren(progress.element);
    try {
      const { ids } = store.read;
      const result = await lines("/api/lens", { ids, token },
        (line) => line.progress && progress.update(line.progress), mine.signal);
      if (mine !== running) return;
      shown = result;
      before = ids.length - shown.tokens.length;
      place.replaceChildren(...(before
        ? [h("p", { class: "muted small" }, `The last ${count(shown.tokens.length)} of ${count(ids.length)} positions.`)] : []));
      build();
      draw();
    } catch (error) {
      if (mine !== running) return;
      asked = error.name === "AbortError" ? null : asked;
      place.replaceChildren(error.name === "AbortError"
        ? h("p", { class: "muted" }, "Cancelled. ", h("button", { type: "button", class: "quiet", onclick: update }, "Try again"))
        : problem(error));
    }
  }

  function build() {
    const rows = [...shown.rows].reverse();
    cells = [];
    const head = h("tr", {}, h("th", { scope: "col", class: "corner" }, "block"),
      ...shown.tokens.map((text) => h("th", { scope: "col" }, h("code", {}, visible(text)))));
    const body = rows.map((row, y) => {
      const line = row.cells.map((cell, x) => {
        const button = h("button", { type: "button", class: "cell", tabindex: "-1" }, visible(cell.top[0].text));
        button.addEventListener("mouseenter", () => tell(y, x));
        button.addEventListener("focus", () => tell(y, x));
        button.addEventListener("click", () => store.set({ follow: cell.top[0].id, at: before + x }));
        button.addEventListener("keydown", (event) => step(event, y, x));
        return { button, cell };
      });
      cells.push(line);
      return h("tr", {}, h("th", { scope: "row" }, row.block === null ? "in" : String(row.block)),
        ...line.map(({ button }) => h("td", {}, button)));
    });
    scroll.replaceChildren(h("table", { class: "lens" },
      h("caption", { class: "sr" }, "The top word after every block, from the last block down"),
      h("thead", {}, head), h("tbody", {}, ...body)));
    if (cells.length) cells[0][cells[0].length - 1].button.tabIndex = 0;
    scroll.scrollLeft = scroll.scrollWidth;
    check();
  }

  function step(event, y, x) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = cells[y + by[0]]?.[x + by[1]];
    if (!next) return;
    for (const row of cells) for (const { button } of row) button.tabIndex = -1;
    next.button.tabIndex = 0;
    next.button.focus();
  }

  /** The last row against the logits that the page got by another way. */
  function check() {
    const last = shown.rows[shown.rows.length - 1].cells;
    const cell = last[last.length - 1];
    let best = 0;
    let sum = 0;
    const z = store.logits;
    for (let i = 1; i < z.length; i++) if (z[i] > z[best]) best = i;
    for (let i = 0; i < z.length; i++) sum += Math.exp(z[i] - z[best]);
    const off = Math.max(...cell.top.map((t) => Math.abs(t.probability - Math.exp(z[t.id] - z[best]) / sum)));
    const same = cell.top[0].id === best && off < 1e-4;
    badge.hidden = false;
    badge.classList.toggle("bad", !same);
    badge.textContent = !same
      ? "The last block differs from the model’s logits"
      : shown.exact
        ? "✓ The last block equals the model’s logits, bit by bit"
        : "✓ The last block equals the model’s logits, up to rounding";
  }

  function draw() {
    const { value, text } = METRICS[metric.value];
    cells.forEach((row, y) => row.forEach(({ button, cell }) => {
      setVar(button, "p", value(cell).toFixed(3));
      const block = shown.rows[shown.rows.length - 1 - y].name;
      button.setAttribute("aria-label", `${visible(cell.top[0].text)}, ${block}, ${text(cell)}`);
      button.classList.toggle("pinned", store.state.follow !== null && cell.top[0].id === store.state.follow);
    }));
    tell(0, null);
  }

  function tell(y, x) {
    if (!shown) return;
    const last = shown.tokens.length - 1;
    const at = x ?? Math.max(0, Math.min((store.state.at ?? before + last) - before, last));
    const row = shown.rows[shown.rows.length - 1 - y];
    const cell = row.cells[at];
    const words = cell.top.map((t) => h("li", {}, h("code", {}, visible(t.text)), h("span", { class: "num" }, percent(t.probability))));
    detail.replaceChildren(
      h("h2", {}, "After ", h("code", {}, visible(shown.tokens[at])), `, ${row.name}`),
      h("div", { class: "columns even" },
        h("ol", { class: "words" }, ...words),
        h("dl", { class: "facts" },
          h("dt", {}, "Entropy"), h("dd", {}, `${cell.entropy.toFixed(3)} nats`),
          h("dt", {}, "Rank of the final word"), h("dd", {}, cell.rank.toLocaleString("en")),
          h("dt", {}, "KL to the final answer"), h("dd", {}, `${cell.kl.toFixed(4)} nats`))),
      ...(shown.token ? [followed(at)] : []),
    );
  }

  /** The pinned word, from the embedding up to the last block. */
  function followed(at) {
    const path = shown.rows.map((row) => row.cells[at]);
    const width = 640;
    const height = 120;
    const x = (i) => 34 + (i * (width - 44)) / Math.max(1, path.length - 1);
    const y = (p) => 10 + (1 - p) * (height - 34);
    const line = path.map((c, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(c.token_probability).toFixed(1)}`).join("");
    const last = path[path.length - 1];
    return h("figure", { class: "chart" },
      h("figcaption", {}, "Pinned: ", h("code", {}, visible(shown.token.text)),
        ` ends at ${percent(last.token_probability)}, rank ${last.token_rank.toLocaleString("en")}`),
      h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
        "aria-label": `Probability of ${visible(shown.token.text)} after every block` },
        h("line", { x1: 34, x2: width - 10, y1: y(0), y2: y(0), class: "axis" }),
        h("text", { x: 28, y: y(1) + 4, class: "tick end" }, "1"),
        h("text", { x: 28, y: y(0) + 4, class: "tick end" }, "0"),
        h("path", { d: line, class: "line" }),
        ...path.map((c, i) => h("circle", { cx: x(i), cy: y(c.token_probability), r: 2.5, class: "dot" },
          h("title", {}, `${shown.rows[i].name}: ${percent(c.token_probability)}, rank ${c.token_rank}`))),
        h("text", { x: x(0), y: height - 4, class: "tick" }, "in"),
        h("text", { x: x(path.length - 1), y: height - 4, class: "tick end" }, shown.rows[path.length - 1].name)));
  }
  return { element, update };
}
