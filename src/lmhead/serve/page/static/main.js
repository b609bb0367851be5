// The page: its parts, put together.

import { exportPage, exportedState, json, loading, offline, ping, watch } from "./api.js";
import { count, h, plural, problem, quietly, setAttribute, sparingly, working } from "./dom.js";
import { funnelPanel } from "./funnel.js";
import { lensPanel } from "./lens.js";
import { nextPanel } from "./next.js";
import { sizePanel } from "./size.js";
import { steerPanel } from "./steer.js";
import { Store } from "./store.js";
import { Alternatives, drawStrip, growStrip } from "./strip.js";
import { whyPanel } from "./why.js";

const PANELS = {
  next: ["Next", nextPanel], funnel: ["Funnel", funnelPanel], lens: ["Lens", lensPanel],
  why: ["Why", whyPanel], steer: ["Steer", steerPanel], size: ["Size", sizePanel],
};
const find = (id) => document.getElementById(id);

function themed() {
  const root = document.documentElement;
  const remembered = (() => {
    try { return localStorage.getItem("lmhead-theme"); } catch { return null; }
  })();
  if (remembered) root.dataset.theme = remembered;
  find("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("lmhead-theme", root.dataset.theme); } catch { /* not kept */ }
  });
}

function skips() { // the address is the page's state, so the link does not go there
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    find("panels").focus();
  });
}

function banner(text, action = null) {
  const box = find("banner");
  box.hidden = !text;
  box.replaceChildren(...(text ? [h("span", {}, text), action].filter(Boolean) : []));
}

function watchServer() {
  let restarted = false;
  watch((what) => {
    if (what === "restarted") {
      restarted = true;
      banner("The server was restarted. What is shown may be of another model.",
        h("button", { type: "button", onclick: () => location.reload() }, "Reload"));
    } else if (what === "lost") {
      banner("The server does not answer. Is lmhead explore still running?",
        h("button", { type: "button", onclick: ping }, "Try again"));
    } else if (!restarted) banner("");
  });
  if (offline) return;
  document.addEventListener("visibilitychange", () => document.hidden || ping());
  setInterval(() => document.hidden || ping(), 10_000);
}

function tabs(store, panels) {
  const names = Object.keys(PANELS);
  const list = find("tabs");
  const choose = (name, focus) => {
    store.set({ tab: name });
    if (focus) find(`tab-${name}`).focus();
  };
  for (const name of names) {
    list.append(h("button", {
      type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`,
      onclick: () => choose(name),
    }, PANELS[name][0]));
  }
  list.addEventListener("keydown", (event) => {
    const at = names.indexOf(store.state.tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(names[(to + names.length) % names.length], true);
  });
  for (const name of names) {
    panels[name] = { made: null, place: h("div", {
      role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, hidden: true,
    }) };
    find("panels").append(panels[name].place);
  }
}

/** Wait for the model, and tell how far it is. */
async function loaded() {
  const shown = working(null);
  const card = h("section", { class: "card", id: "loading" }, shown.element);
  for (let step = await loading(); step; step = await loading()) {
    if (!card.isConnected) find("panels").append(card);
    shown.update(step);
    await new Promise((done) => { setTimeout(done, 250); });
  }
  card.remove();
}

async function start() {
  themed();
  skips();
  watchServer();
  if (offline) find("export").hidden = find("link").hidden = true;
  find("prompt").disabled = true; // until it is known what the address holds
  await loaded();
  const about = await json("/api/model");
  find("model").textContent = `${about.model} · ${count(about.vocab_size)} tokens · ${about.blocks ?? "?"} blocks${offline ? " · saved page" : ""}`;
  const tokens = await json("/api/tokens");
  const address = () => (offline && !location.hash ? exportedState : location.hash.slice(1));
  const store = new Store(about, tokens, address());
  if (!PANELS[store.state.tab]) store.state.tab = "next";
  const panels = {};
  tabs(store, panels);
  const pop = new Alternatives(find("alternatives"));
  const prompt = find("prompt");
  const goOn = (at, id) => store.refresh([at, id]);
  const view = {
    strip: (list, first) => drawStrip(find("strip"), list, first, pop, goOn),
    grow: (token) => growStrip(find("strip"), token, pop, goOn),
  };

  const typed = quietly(() => store.set({ prompt: prompt.value, more: [] }), 350);
  prompt.value = store.state.prompt;
  prompt.disabled = false;
  prompt.readOnly = offline;
  prompt.addEventListener("input", () => typed());
  const saved = sparingly(() => history.replaceState(null, "", `#${store.address()}`), 120);

  function shown() {
    const { tab } = store.state;
    for (const [name, panel] of Object.entries(panels)) {
      const on = name === tab;
      panel.place.hidden = !on;
      const button = find(`tab-${name}`);
      setAttribute(button, "aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
    }
    const panel = panels[tab];
    if (!panel.made) {
      panel.made = PANELS[tab][1](store, view);
      panel.place.append(panel.made.element);
    }
    panel.made.update();
  }

  store.watch((what, names) => {
    if (what === "busy") find("status").textContent = "reading";
    if (what === "text") {
      const { read, error } = store;
      find("status").replaceChildren(...(error ? [problem(error)] : [
        `${plural(read.ids.length, "token")}${read.more.length ? `, ${count(read.more.length)} of them appended` : ""}`,
      ]));
      document.body.classList.toggle("failed", Boolean(error));
      if (read && !error) view.strip(read.tokens, read.start);
    }
    if (what === "state") {
      saved();
      if (names.includes("prompt") && document.activeElement !== prompt) prompt.value = store.state.prompt;
    }
    if (what !== "busy") shown();
  });
  window.addEventListener("hashchange", () => {
    const next = new Store(about, tokens, address()).state;
    for (const name of Object.keys(store.state)) if (!(name in next)) next[name] = about.defaults[name];
    store.set(next);
  });
  find("link").addEventListener("click", async () => {
    history.replaceState(null, "", `#${store.address()}`);
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    find("link").textContent = "Copied";
    setTimeout(() => { find("link").textContent = "Copy link"; }, 1500);
  });
  find("export").addEventListener("click", async () => {
    try {
      const blob = await exportPage(store.address());
      const link = h("a", { href: URL.createObjectURL(blob), download: `lmhead-${about.model.replace(/\W+/g, "-")}.html` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    } catch (error) {
      banner(error.message);
    }
  });
  shown();
  await store.refresh();
  document.body.dataset.ready = "1";
}

start().catch((error) => banner(error.message));
