// Why: what every part of the model added to a token's logit, or to A's against B's.

import { lines } from "./api.js";
import { h, problem, setVar, signed, toggle, visible, working } from "./dom.js";
import { picker } from "./picker.js";
import { highest } from "./select.js";

const MOST = 40;

export function whyPanel(store) {
  const a = picker({ label: "Why A", name: "a", store, choose: (id) => store.set({ a: id }), empty: "the best token" });
  const b = picker({ label: "and not B", name: "b", store, choose: (id) => store.set({ b: id }), empty: "the second best" });
  const heads = toggle("Attention head by head", false, (on) => store.set({ heads: on }), { id: "heads" });
  const sort = h("select", { id: "sort" },
    h("option", { value: "size" }, "largest first"), h("option", { value: "order" }, "from the embedding up"));
  sort.addEventListener("change", () => store.set({ sort: sort.value }));
  const place = h("div", {});
  const sum = h("p", { class: "big", id: "why-sum" });
  const list = h("ol", { class: "pulls", "aria-label": "Contributions" });
  const rest = h("p", { class: "muted small" });
  const element = h(
    "section", { class: "card" },
    h("h2", {}, "Why this token"),
    h("div", { class: "row wrap" }, a.element, b.element,
      h("label", { class: "field", for: "sort" }, "Order ", sort), heads.element),
    place, sum, list, rest,
  );
  let asked = null;
  let shown = null;
  let running = null;

  async function update() {
    heads.input.checked = store.state.heads;
    sort.value = store.state.sort === "order" ? "order" : "size";
    if (!store.read || !store.logits) return;
    const best = highest(store.logits, 2);
    const token = store.state.a ?? best[0];
    const against = store.state.b ?? best.find((id) => id !== token);
    a.set(token);
    b.set(against);
    const question = { ids: store.read.ids, token, against, heads: store.state.heads };
    if (asked === JSON.stringify(question)) { if (shown) draw(); return; }
    asked = JSON.stringify(question);
    running?.abort();
    const mine = (running = new AbortController());
    const progress = working(() => mine.abort());
    place.replaceChildren(progress.element);
    try {
      const result = await lines("/api/why", question, (line) => line.progress && progress.update(line.progress), mine.signal);
      if (mine !== running) return;
      shown = result;
      place.replaceChildren();
      draw();
    } catch (error) {
      if (mine !== running) return;
      if (error.name === "AbortError") asked = null;
      place.replaceChildren(error.name === "AbortError"
        ? h("p", { class: "muted" }, "Cancelled. ", h("button", { type: "button", class: "quiet", onclick: update }, "Try again"))
        : problem(error));
      sum.textContent = "";
      list.replaceChildren();
    }
  }

  function draw() {
    const reasons = [...shown.reasons];
    if (store.state.sort !== "order") reasons.sort((x, y) => Math.abs(y.value) - Math.abs(x.value));
    const parts = reasons.slice(0, MOST);
    const others = reasons.slice(MOST);
    const largest = Math.max(1e-9, ...reasons.map((r) => Math.abs(r.value)));
    list.replaceChildren(...parts.map((r) => {
      const fill = h("span", { class: r.value < 0 ? "pull down" : "pull up" });
      setVar(fill, "w", (Math.abs(r.value) / largest).toFixed(4));
      return h("li", {}, h("span", { class: "name" }, r.name),
        h("span", { class: "axis", "aria-hidden": "true" }, fill), h("span", { class: "num" }, signed(r.value)));
    }));
    const left = others.reduce((total, r) => total + r.value, 0);
    rest.textContent = others.length ? `${others.length} smaller parts add ${signed(left)} together.` : "";
    const total = shown.reasons.reduce((x, r) => x + r.value, 0);
    const off = Math.abs(total - shown.logit);
    const what = shown.against
      ? ["logit of ", h("code", {}, visible(shown.token.text)), " less that of ", h("code", {}, visible(shown.against.text))]
      : ["logit of ", h("code", {}, visible(shown.token.text))];
    sum.replaceChildren(
      "The parts sum to ", h("b", {}, signed(total, 4)), ": the ", ...what, `, ${signed(shown.logit, 4)} `,
      h("span", { class: off < 1e-4 ? "badge" : "badge bad" }, off < 1e-4 ? "✓ equal to 1e-4" : `off by ${off.toExponential(1)}`));
  }
  return { element, update };
}
