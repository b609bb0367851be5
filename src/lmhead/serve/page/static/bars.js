// Bars of tokens: built once, then only their numbers change, so that a slider is followed at once.

import { h, percent, setAttribute, setText, setVar, visible } from "./dom.js";

/** A list of `n` bars. `act(id)` is called on a click. `draw` takes rows of {id, text, p, ...}. */
export class Bars {
  constructor(n, { act = null, label, columns = [] }) {
    this.rows = [];
    this.columns = columns;
    this.element = h("ol", { class: act ? "bars acts" : "bars", "aria-label": label });
    for (let i = 0; i < n; i++) {
      const word = h("code", { class: "word" });
      const fill = h("span", { class: "fill" });
      const after = h("span", { class: "after" });
      const numbers = columns.map((name) => h("span", { class: `num ${name}` }));
      const inner = [word, h("span", { class: "track", "aria-hidden": "true" }, fill, after), ...numbers];
      const line = act
        ? h("button", { type: "button", class: "bar" }, ...inner)
        : h("div", { class: "bar" }, ...inner);
      const item = h("li", {}, line);
      const row = { item, line, word, fill, after, numbers, id: null };
      if (act) line.addEventListener("click", () => row.id !== null && act(row.id));
      this.rows.push(row);
      this.element.append(item);
    }
  }

  /** Each row: {id, text, share (of the track), after (share or null), numbers: [text]}. */
  draw(found, title = () => "") {
    this.rows.forEach((row, i) => {
      const given = found[i];
      row.item.hidden = !given;
      if (!given) return;
      row.id = given.id;
      setText(row.word, visible(given.text));
      setVar(row.fill, "w", given.share.toFixed(4));
      row.after.hidden = given.after === null || given.after === undefined;
      if (!row.after.hidden) setVar(row.after, "w", given.after.toFixed(4));
      row.line.classList.toggle("cut", given.after === 0);
      given.numbers.forEach((text, j) => {
        setText(row.numbers[j], text);
      });
      setAttribute(row.line, "title", title(given));
    });
  }
}

/** A row of Bars for a token and its probability. */
export function tokenRow(store, id, p, largest, numbers, after = null) {
  return {
    id,
    text: store.text(id),
    share: largest > 0 ? p / largest : 0,
    after: after === null ? null : largest > 0 ? after / largest : 0,
    numbers: numbers ?? [percent(p)],
  };
}
