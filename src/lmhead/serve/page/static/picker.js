// Choosing a token of the vocabulary by its text: a field with suggestions.

import { h, visible } from "./dom.js";

const MOST = 8;

/** Find tokens by text: the very text, with a space before it, beginnings, then anywhere. */
export function found(tokens, text) {
  if (!text) return [];
  const wanted = text.replace(/^·/, " ");
  const ranks = [[], [], []];
  const lower = wanted.toLowerCase();
  for (let id = 0; id < tokens.length; id++) {
    const token = tokens[id];
    if (token === wanted || token === ` ${wanted}`) ranks[0].push(id);
    else if (ranks[1].length < MOST && token.trimStart().toLowerCase().startsWith(lower.trim())) ranks[1].push(id);
    else if (ranks[2].length < MOST && token.toLowerCase().includes(lower)) ranks[2].push(id);
  }
  ranks[0].sort((a, b) => tokens[b].length - tokens[a].length); // in a text, most begin with a space
  return ranks.flat().slice(0, MOST);
}

/** A combobox; `choose(id | null)` is called with what was chosen. */
export function picker({ label, name, store, choose, empty = "any token" }) {
  const list = h("ul", { role: "listbox", id: `list-${name}`, class: "listbox", "aria-label": label, hidden: true });
  const input = h("input", {
    type: "text", id: `pick-${name}`, role: "combobox", autocomplete: "off", spellcheck: "false",
    "aria-expanded": "false", "aria-controls": `list-${name}`, "aria-autocomplete": "list",
    placeholder: empty,
  });
  let options = [];
  let at = -1;
  let current = null;

  function open(ids) {
    options = ids;
    at = -1;
    list.replaceChildren(...ids.map((id, i) => h(
      "li", {
        role: "option", id: `${name}-${i}`, "aria-selected": "false",
        onmousedown: (event) => { event.preventDefault(); take(id); },
      },
      h("code", {}, visible(store.text(id))), h("span", { class: "muted num" }, `#${id}`),
    )));
    list.hidden = !ids.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    input.removeAttribute("aria-activedescendant");
  }
  function take(id) {
    open([]);
    set(id);
    choose(id);
  }
  function set(id) {
    current = id;
    input.value = id === null ? "" : visible(store.text(id));
  }
  function point(i) {
    at = (i + options.length) % options.length;
    [...list.children].forEach((o, j) => o.setAttribute("aria-selected", String(j === at)));
    input.setAttribute("aria-activedescendant", `${name}-${at}`);
  }
  input.addEventListener("input", () => open(found(store.tokens, input.value)));
  input.addEventListener("focus", () => input.select());
  input.addEventListener("blur", () => { open([]); set(current); });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && options.length) point(at + 1);
    else if (event.key === "ArrowUp" && options.length) point(at - 1);
    else if (event.key === "Escape") { open([]); set(current); }
    else if (event.key === "Enter") {
      if (options.length) take(options[Math.max(at, 0)]);
      else if (input.value === "") take(null);
    } else return;
    event.preventDefault();
  });
  const element = h("div", { class: "picker" }, h("label", { for: `pick-${name}` }, label), input, list);
  return { element, set };
}
