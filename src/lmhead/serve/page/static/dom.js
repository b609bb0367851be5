// Small helpers to build and change the page. Text goes in as text, never as markup.

/** Make an element: h("button", {class: "quiet", onclick: f}, "Stop"). */
export function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "g", "line", "circle", "text", "title"].includes(tag);
  const element = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [k, v] of Object.entries(value)) setVar(element, k, v);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set a custom property that the style sheet reads. */
export function setVar(element, name, value) {
  if (element.style.getPropertyValue(`--${name}`) !== value) element.style.setProperty(`--${name}`, value);
}

/** Set a text; one that stands there already costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute; one that is there already costs no style. */
export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Show a token so that spaces and line breaks can be seen. */
export function visible(text) {
  if (text === "") return "∅";
  return text
    .replace(/^ /, "·")
    .replace(/ $/, "·")
    .replace(/^ +| +$/g, (run) => "·".repeat(run.length))
    .replace(/\n/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/\r/g, "␍");
}

export function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.001) return `${value.toExponential(0)} %`;
  if (value < 0.1) return `${value.toFixed(3)} %`;
  if (value > 99.9 && value < 100) return `${(Math.floor(value * 1000) / 1000).toFixed(3)} %`;
  return `${value.toFixed(value < 10 ? 2 : 1)} %`;
}

export const count = (n) => n.toLocaleString("en");
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
export const signed = (x, digits = 3) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits);

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (Math.abs(n) >= 1000 && i < units.length - 1) {
    n /= 1000;
    i++;
  }
  return `${n.toFixed(i && Math.abs(n) < 100 ? 1 : 0)} ${units[i]}`;
}

export function parameters(n) {
  if (n >= 1e9) return `${(n / 1e9).toFixed(2)} B`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(1)} M`;
  return count(n);
}

/** Call f once things have been quiet for so many milliseconds. */
export function quietly(f, wait) {
  let timer = 0;
  const later = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...given), wait);
  };
  later.now = (...given) => {
    clearTimeout(timer);
    f(...given);
  };
  return later;
}

/** Call f at once, and then at most once in so many milliseconds; the last call is never lost. */
export function sparingly(f, wait) {
  let timer = 0;
  let again = false;
  const now = () => {
    again = false;
    f();
    timer = setTimeout(() => { timer = 0; if (again) now(); }, wait);
  };
  return () => { if (timer) again = true; else now(); };
}

/** A labelled slider with a number beside it; both say the same. `scale` "log" spaces it so. */
export function slider({ label, name, min, max, step, value, oninput, scale, most, describe }) {
  const id = `c-${name}`;
  const log = scale === "log";
  const low = log ? Math.log(min > 0 ? min : step) : min;
  const position = (v) => (log ? (v <= 0 ? low - 0.01 * (Math.log(max) - low) : Math.log(v)) : v);
  const snapped = (v) => Number((Math.round(v / step) * step).toFixed(10));
  const range = h("input", {
    type: "range", id, min: log ? position(0) : min, max: position(max), name,
    step: log ? "any" : step, value: position(value),
  });
  const number = h("input", {
    type: "number", class: "number", min, max: most ?? max, step: "any", value,
    "aria-label": `${label}, number`,
  });
  let now = null; // what both show
  const show = (v) => {
    now = number.value = v;
    range.setAttribute("aria-valuetext", describe ? describe(v) : String(v));
  };
  const set = (v) => {
    if (v === now) return;
    range.value = position(v);
    show(v);
  };
  range.addEventListener("input", () => {
    const raw = Number(range.value);
    const v = log ? (raw < low ? min : snapped(Math.exp(raw))) : Number(range.value);
    show(v);
    oninput(v);
  });
  number.addEventListener("change", () => {
    let v = Number(number.value);
    if (!Number.isFinite(v) || number.value === "") v = value;
    v = Math.min(Math.max(v, min), most ?? max);
    now = null; // the number may read otherwise
    set(v);
    oninput(v);
  });
  set(value);
  const element = h("div", { class: "slider" }, h("label", { for: id }, label), range, number);
  return { element, set, range };
}

/** A switch: a checkbox that looks like one. */
export function toggle(label, checked, onchange, attributes = {}) {
  const input = h("input", { type: "checkbox", role: "switch", ...attributes });
  input.checked = checked;
  input.addEventListener("change", () => onchange(input.checked));
  return { element: h("label", { class: "switch" }, input, h("span", {}, label)), input };
}

/** A line that tells how far slow work is, with a button that cancels it where that can be done. */
export function working(cancel) {
  const bar = h("progress", { max: 1, "aria-label": "Progress" });
  const title = h("span", { class: "muted" }, "working");
  const element = h(
    "div", { class: "working", role: "status" }, bar, title,
    cancel && h("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
  );
  const update = ({ title: what, done, total }) => {
    const amount = total > 1e7 ? bytes : count; // what is as many are bytes
    title.textContent = total ? `${what}, ${amount(done)} of ${amount(total)}` : what;
    if (total) bar.value = done / total;
    else bar.removeAttribute("value");
  };
  return { element, update };
}

/** An error, said where the result would stand. */
export function problem(error) {
  return h("p", { class: "problem", role: "alert" }, error.message ?? String(error));
}
