// Next: the best tokens, what is left for the others, and generation as it streams in.

import { lines } from "./api.js";
import { Bars, tokenRow } from "./bars.js";
import { count, h, percent, plural, problem } from "./dom.js";
import { highest } from "./select.js";
import { entropy, probability, weights } from "./sampling.js";

const SHOWN = 14;

export function nextPanel(store, view) {
  const bars = new Bars(SHOWN, {
    label: "The best tokens; a click appends one",
    columns: ["p", "logit"],
    act: (id) => store.set({ more: [...store.state.more, id] }),
  });
  const rest = h("p", { class: "muted" });
  const facts = h("dl", { class: "facts" });
  const filtered = h("p", { class: "muted small" });
  const amount = h("input", { type: "number", id: "n", min: 1, max: 4096, class: "number" });
  const seed = h("input", { type: "number", id: "seed", min: 0, class: "number wide", placeholder: "any" });
  const go = h("button", { type: "button", class: "main", id: "generate" }, "Generate");
  const stop = h("button", { type: "button", id: "stop", disabled: true }, "Stop");
  const undo = h("button", { type: "button", class: "quiet" }, "Undo");
  const clear = h("button", { type: "button", class: "quiet" }, "Clear");
  const ended = h("p", { class: "muted", role: "status" });
  let running = null;

  amount.addEventListener("change", () => store.set({ n: Math.max(1, Number(amount.value) || 40) }));
  seed.addEventListener("change", () =>
    store.set({ seed: seed.value === "" ? null : Math.max(0, Math.trunc(Number(seed.value))) }));
  undo.addEventListener("click", () => store.set({ more: store.state.more.slice(0, -1) }));
  clear.addEventListener("click", () => store.set({ more: [] }));
  stop.addEventListener("click", () => running?.abort());
  go.addEventListener("click", generate);

  async function generate() {
    if (!store.read || running) return;
    running = new AbortController();
    go.disabled = true;
    stop.disabled = false;
    ended.textContent = "generating";
    const params = { temperature: 1, ...store.asked() };
    const order = store.about.orders[store.state.order] ? store.state.order : store.order();
    const more = [];
    try {
      const result = await lines(
        "/api/generate",
        { ids: store.read.ids, params, order, max_tokens: store.state.n, steer: null },
        ({ token }) => {
          more.push(token.id);
          view.grow(token);
        },
        running.signal,
      );
      ended.textContent = result.finish_reason === "length"
        ? `${plural(more.length, "token")}: the length that was asked for`
        : `ended after ${plural(more.length, "token")}`;
    } catch (error) {
      if (error.name === "AbortError") ended.textContent = `stopped after ${plural(more.length, "token")}`;
      else ended.replaceChildren(problem(error));
    }
    running = null;
    go.disabled = false;
    stop.disabled = true;
    const stops = new Set(store.about.stop_ids);
    store.set({ more: [...store.state.more, ...more.filter((id) => !stops.has(id))] });
  }

  const element = h(
    "div", { class: "columns" },
    h(
      "section", { class: "card" },
      h("h2", {}, "Next token"),
      bars.element, rest, filtered,
    ),
    h(
      "div", { class: "stack" },
      h("section", { class: "card" }, h("h2", {}, "The whole distribution"), facts),
      h(
        "section", { class: "card" },
        h("h2", {}, "Generate"),
        h("p", { class: "muted small" }, "With the sampler of the Funnel; a click on a token of the text goes on from there."),
        h(
          "div", { class: "row wrap" },
          h("label", { class: "field", for: "n" }, "Tokens ", amount),
          h("label", { class: "field", for: "seed" }, "Seed ", seed),
        ),
        h("div", { class: "row wrap" }, go, stop, undo, clear),
        ended,
      ),
    ),
  );

  function update() {
    amount.value = store.state.n;
    seed.value = store.state.seed ?? "";
    undo.disabled = clear.disabled = !store.state.more.length;
    if (!store.logits) return;
    const steps = store.steps();
    const { c } = steps[0];
    const p = (i) => probability(c, i);
    const best = highest(c.z, SHOWN);
    const last = steps[steps.length - 1];
    const acts = steps.length > 1;
    const after = new Map();
    if (acts && last.left) {
      const wanted = new Set(best.map((i) => c.ids[i]));
      for (let i = 0; i < last.left; i++) {
        if (wanted.has(last.c.ids[i])) after.set(last.c.ids[i], probability(last.c, i));
      }
    }
    const most = Math.max(p(best[0]), ...best.map((i) => after.get(c.ids[i]) ?? 0));
    bars.draw(
      best.map((i) => {
        const id = c.ids[i];
        const numbers = [percent(p(i)), c.z[i].toFixed(2)];
        return tokenRow(store, id, p(i), most, numbers, acts ? after.get(id) ?? 0 : null);
      }),
      (row) => `token ${row.id}; click to append`,
    );
    const shown = best.reduce((sum, i) => sum + p(i), 0);
    rest.textContent = `The other ${count(c.z.length - best.length)} tokens hold ${percent(Math.max(0, 1 - shown))}.`;
    filtered.textContent = acts
      ? `The thin bars are what the funnel leaves: ${plural(last.left, "token")}.`
      : "";
    const { best: top, total } = weights(c);
    const H = entropy(c);
    facts.replaceChildren(
      ...fact("Entropy", `${H.toFixed(3)} nats`, `as uncertain as ${plural(Math.round(Math.exp(H)), "equal choice")}`),
      ...fact("Best logit", top.toFixed(3), `log of the sum ${(top + Math.log(total)).toFixed(3)}`),
      ...fact("Tail", percent(Math.max(0, 1 - shown)), `beyond the ${best.length} best`),
    );
  }
  return { element, update };
}

function fact(name, value, note) {
  return [h("dt", {}, name), h("dd", {}, h("b", {}, value), h("span", { class: "muted small" }, note))];
}
