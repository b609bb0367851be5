// The text, token by token, coloured by how surprising each was; alternatives on hover and focus.

import { h, percent, setVar, visible } from "./dom.js";

const SURPRISING = 8; // nats: the strongest colour

/** Fill the strip; `tokens` are {id, text, logprob?, rank?, top?}. `pick(at, id)` goes on there. */
export function drawStrip(strip, tokens, start, pop, pick) {
  strip.replaceChildren(...tokens.map((token, at) => chip(token, at, at < start, pop, pick)));
}

/** Add one token at the end. */
export function growStrip(strip, token, pop, pick) {
  strip.append(chip(token, strip.children.length, false, pop, pick));
}

function chip(token, at, given, pop, pick) {
  const said = token.logprob === undefined ? "" : `, ${percent(Math.exp(token.logprob))}`;
  const made = h(
    "button",
    {
      type: "button",
      class: given ? "chip" : "chip new",
      "aria-label": `${visible(token.text)}${said}`,
      "aria-haspopup": "dialog",
    },
    shown(token.text),
  );
  if (token.logprob !== undefined) {
    setVar(made, "s", Math.min(1, -token.logprob / SURPRISING).toFixed(3));
  }
  made.addEventListener("mouseenter", () => pop.open(made, token, at, pick, false));
  made.addEventListener("mouseleave", () => pop.leave());
  made.addEventListener("click", () => pop.open(made, token, at, pick, true));
  return made;
}

function shown(text) {
  return text === "" ? "∅" : text.replace(/\n/g, "⏎");
}

/** The box with the alternatives of one token. */
export class Alternatives {
  constructor(box) {
    this.box = box;
    this.pinned = false;
    this.timer = 0;
    box.addEventListener("mouseenter", () => clearTimeout(this.timer));
    box.addEventListener("mouseleave", () => this.leave());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !box.hidden) {
        const back = this.chip;
        this.close();
        back?.focus();
      }
    });
    document.addEventListener("pointerdown", (event) => {
      if (!box.contains(event.target) && event.target !== this.chip) this.close();
    });
  }

  open(chip, token, at, pick, pinned) {
    clearTimeout(this.timer);
    if (this.pinned && !pinned) return;
    this.pinned = pinned;
    this.chip = chip;
    const choose = (id) => {
      this.close();
      pick(at, id);
    };
    const rows = (token.top ?? []).map(([id, logprob, text]) =>
      h(
        "button",
        { type: "button", class: id === token.id ? "alt own" : "alt", onclick: () => choose(id) },
        h("code", {}, visible(text)),
        h("span", { class: "num" }, percent(Math.exp(logprob))),
      ),
    );
    const about = token.logprob === undefined
      ? "the first token: nothing came before it"
      : `${percent(Math.exp(token.logprob))}${token.rank ? `, rank ${token.rank.toLocaleString("en")}` : ""}`;
    this.box.replaceChildren(
      h("p", { class: "pop-title" }, h("code", {}, visible(token.text)), " ", about),
      ...(rows.length ? [h("p", { class: "muted small" }, "Go on from here with"), ...rows] : []),
    );
    this.box.hidden = false;
    const place = chip.getBoundingClientRect();
    const width = this.box.offsetWidth;
    const left = Math.max(8, Math.min(place.left, document.documentElement.clientWidth - width - 8));
    this.box.style.left = `${left + window.scrollX}px`;
    this.box.style.top = `${place.bottom + window.scrollY + 6}px`;
    if (pinned) this.box.querySelector("button")?.focus();
  }

  leave() {
    if (this.pinned) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.close(), 180);
  }

  close() {
    this.pinned = false;
    this.box.hidden = true;
  }
}
