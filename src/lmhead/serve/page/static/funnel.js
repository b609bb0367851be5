// Funnel: every sampling stage in its order, with what it leaves and cuts. It all runs here.

import { Bars, tokenRow } from "./bars.js";
import { CONTROLS } from "./controls.js";
import { count, h, percent, setAttribute, setText, setVar, slider, toggle, visible } from "./dom.js";
import { highest } from "./select.js";
import { active, probability } from "./sampling.js";

const SHOWN = 12;

export function funnelPanel(store) {
  const { about } = store;
  const list = h("ol", { class: "stages", "aria-label": "Stages, in the order in which they run" });
  const announced = h("p", { class: "sr", role: "status" });
  const bars = new Bars(SHOWN, {
    label: "What is left to draw from; a click bans a token", columns: ["p"],
    act: (id) => store.set({ banned_ids: [...new Set([...(store.state.banned_ids ?? []), id])] }),
  });
  const sum = h("p", { class: "big" });
  const note = h("p", { class: "muted small" }, "A click on a token bans it.");
  const bans = h("p", { class: "tags" });
  const orders = h("div", { class: "segments", role: "group", "aria-label": "Order" });
  for (const name of [...Object.keys(about.orders), "own"]) {
    orders.append(h("button", {
      type: "button", "data-order": name,
      onclick: () => name !== "own" && store.set({ order: name }),
    }, name));
  }
  const ties = toggle("Keep ties", false, (on) => store.set({ keep_ties: on }), { id: "keep_ties" });
  const reset = h("button", { type: "button", class: "quiet", onclick: clear }, "Switch all off");
  const stages = new Map();
  for (const name of about.orders.hf) stages.set(name, stage(name));

  function clear() {
    const off = {};
    for (const name of Object.keys(about.defaults)) {
      if (name in store.state) off[name] = about.defaults[name];
    }
    store.set(off);
  }

  function stage(name) {
    const known = CONTROLS[name];
    const sliders = new Map();
    const controls = h("div", { class: "controls" });
    if (known.switch) {
      const one = toggle("on", false, (on) => store.set({ [known.switch]: on ? 2 : 0 }), {
        id: `c-${known.switch}`, "aria-label": `${known.title} on`,
      });
      sliders.set(known.switch, { set: (v) => { one.input.checked = v !== 0; } });
      controls.append(one.element);
    }
    for (const [field, [label, min, max, step, scale]] of Object.entries(known.fields ?? {})) {
      const one = slider({
        label, name: field, min, max, step, scale, value: about.defaults[field],
        most: about.ranges[field][1] ?? Number.MAX_SAFE_INTEGER,
        oninput: (value) => store.set({ [field]: value }),
      });
      one.range.setAttribute("aria-label", `${known.title}, ${label}`);
      if (controls.children.length) one.element.classList.add("detail");
      sliders.set(field, one);
      controls.append(one.element);
    }
    const left = h("b", {});
    const cut = h("span", { class: "muted" });
    const meter = h("span", { class: "meter", "aria-hidden": "true" }, h("span", { class: "gone" }));
    const handle = h("button", {
      type: "button", class: "handle", "aria-label": `Move ${known.title}: arrow up or down`,
      title: "Drag, or press arrow up or down",
    }, "⠿");
    const item = h(
      "li", { class: "stage", "data-stage": name },
      handle,
      h("div", { class: "name" }, h("h3", {}, known.title), h("p", { class: "muted small" }, known.about)),
      controls,
      h("div", { class: "did" }, left, cut, meter),
    );
    handle.addEventListener("keydown", (event) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      move(name, by);
      handle.focus();
    });
    drag(item, handle, name);
    return { item, sliders, left, cut, meter };
  }

  function move(name, by) {
    const order = [...store.order()];
    const from = order.indexOf(name);
    const to = Math.min(Math.max(from + by, 0), order.length - 1);
    if (to === from) return;
    order.splice(from, 1);
    order.splice(to, 0, name);
    place(order);
    announced.textContent = `${CONTROLS[name].title} is now ${to + 1} of ${order.length}`;
  }

  function place(order) {
    const same = Object.entries(about.orders).find(([, o]) => o.join() === order.join());
    store.set({ order: same ? same[0] : order.join(",") });
  }

  function drag(item, handle, name) {
    handle.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      handle.focus();
      item.classList.add("dragged");
      const over = (e) => {
        const others = [...list.children].filter((other) => other !== item && !other.hidden);
        const before = others.find((other) => {
          const box = other.getBoundingClientRect();
          return e.clientY < box.top + box.height / 2;
        });
        list.insertBefore(item, before ?? null);
      };
      const end = () => {
        window.removeEventListener("pointermove", over);
        window.removeEventListener("pointerup", end);
        window.removeEventListener("pointercancel", end);
        item.classList.remove("dragged");
        place([...list.children].map((other) => other.dataset.stage));
      };
      // not captured by the handle: it moves in the document meanwhile, which ends a capture
      window.addEventListener("pointermove", over);
      window.addEventListener("pointerup", end);
      window.addEventListener("pointercancel", end);
    });
  }

  const element = h(
    "div", { class: "columns funnel" },
    h(
      "section", { class: "card" },
      h("div", { class: "row between wrap" }, h("h2", {}, "Stages"), orders),
      list,
      h("div", { class: "row between wrap" }, ties.element, reset),
      announced,
    ),
    h(
      "section", { class: "card sticky" },
      h("h2", {}, "What is left to draw from"), sum, bars.element, note, bans,
    ),
  );

  function update() {
    const order = store.order();
    const params = store.params();
    if ([...list.children].map((c) => c.dataset.stage).join() !== order.join()) {
      list.replaceChildren(...order.map((name) => stages.get(name).item));
    }
    for (const button of orders.children) {
      const own = button.dataset.order === "own";
      const on = own ? !about.orders[store.state.order] : store.state.order === button.dataset.order;
      setAttribute(button, "aria-pressed", String(on));
      button.hidden = own && !on;
    }
    ties.input.checked = params.keep_ties;
    const on = new Set(active(params, order, about));
    for (const [name, one] of stages) {
      one.item.classList.toggle("off", !on.has(name));
      one.item.hidden = name === "allowed_ids" || (!CONTROLS[name].fields && !on.has(name));
      for (const [field, control] of one.sliders) {
        if (document.activeElement?.id !== `c-${field}`) control.set(params[field]);
      }
    }
    const banned = String(store.state.banned_ids ?? []);
    if (banned !== bans.dataset.ids) {
      bans.dataset.ids = banned;
      bans.replaceChildren(...tags());
    }
    if (store.logits) draw();
  }

  function tags() {
    return (store.state.banned_ids ?? []).map((id) =>
      h("button", {
        type: "button", class: "tag", "aria-label": `Allow ${visible(store.text(id))} again`,
        onclick: () => store.set({ banned_ids: store.state.banned_ids.filter((i) => i !== id) }),
      }, "banned ", h("code", {}, visible(store.text(id))), " ×"));
  }

  function draw() {
    const steps = store.steps();
    const did = new Map(steps.map((step) => [step.name, step]));
    for (const [name, one] of stages) {
      const step = did.get(name);
      setText(one.left, step ? count(step.left) : "");
      const cut = step && (step.cut > 0 ? `cut ${percent(step.cut)}` : `moved ${percent(step.moved)}`);
      setText(one.cut, step ? cut : "off");
      setVar(one.meter, "w", step ? Math.min(1, Math.max(step.cut, step.moved)).toFixed(4) : "0");
    }
    const last = steps[steps.length - 1];
    if (!last.left) {
      bars.draw([]);
      sum.textContent = `No token is left after ${CONTROLS[last.name].title}; relax a stage.`;
      return;
    }
    const { c } = last;
    const best = highest(c.z, SHOWN);
    const largest = probability(c, best[0]);
    bars.draw(best.map((i) => tokenRow(store, c.ids[i], probability(c, i), largest)));
    setText(sum, `${count(last.left)} of ${count(steps[0].left)} tokens, entropy ${last.entropy.toFixed(2)} nats`);
  }
  return { element, update };
}
