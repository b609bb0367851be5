// Steer: a vector, its strength, what it does to the vocabulary, and the text with and without it.

import { decoded, json, lines, offline, upload } from "./api.js";
import { Bars } from "./bars.js";
import { h, percent, problem, quietly, setVar, signed, slider, toggle } from "./dom.js";
import { picker } from "./picker.js";
import { highest } from "./select.js";

const SHOWN = 8;

export function steerPanel(store) {
  const up = picker({ label: "Raise", name: "up", store, choose: (id) => words(id, parts().down), empty: "a word" });
  const down = picker({ label: "Lower", name: "down", store, choose: (id) => words(parts().up, id), empty: "the mean of all" });
  const files = h("select", { id: "vector" });
  const file = h("input", { type: "file", id: "upload", accept: ".safetensors,.gguf" });
  file.disabled = offline;
  const alpha = slider({
    label: "alpha", name: "alpha", min: -1, max: 1, step: 0.01, value: 0, most: 1e6,
    oninput: (value) => store.set({ alpha: value }),
  });
  const guard = toggle("Guard", false, (on) => store.set({ cap: on ? 0.1 : null }), { id: "guard" });
  const cap = slider({
    label: "KL cap, nats", name: "cap", min: 0.001, max: 2, step: 0.001, value: 0.1, scale: "log", most: 100,
    oninput: (value) => store.set({ cap: value }),
  });
  const raised = new Bars(SHOWN, { label: "Most raised", columns: ["delta", "p"] });
  const lowered = new Bars(SHOWN, { label: "Most lowered", columns: ["delta", "p"] });
  const live = h("span", { class: "live" });
  const limit = h("span", { class: "limit" });
  const meter = h("div", { class: "kl", role: "img", "aria-label": "No steering" }, live, limit);
  const facts = h("dl", { class: "facts" });
  const notes = h("div", {});
  const plain = h("div", { class: "output", role: "region", "aria-label": "Plain text" });
  const steered = h("div", { class: "output", role: "region", "aria-label": "Steered text" });
  const go = h("button", { type: "button", class: "main", id: "steer-go" }, "Write both");
  const stop = h("button", { type: "button", id: "steer-stop", disabled: true }, "Stop");
  const status = h("p", { class: "muted", role: "status" });
  let known = [];
  let listed = false;
  let pending = null;
  let running = null;
  let drawn = null;

  files.addEventListener("change", () => {
    const one = known.find((v) => v.id === files.value);
    store.set(one ? { steer: `file:${one.id}`, alpha: one.alpha } : { steer: "", alpha: 0 });
  });
  file.addEventListener("change", async () => {
    if (!file.files.length) return;
    try {
      const one = await upload(`/api/vector?name=${encodeURIComponent(file.files[0].name)}`, file.files[0]);
      known = [...known.filter((v) => v.id !== one.id), one];
      offer();
      store.set({ steer: `file:${one.id}`, alpha: one.alpha });
    } catch (error) {
      notes.replaceChildren(problem(error));
    }
  });
  go.addEventListener("click", write);
  stop.addEventListener("click", () => running?.abort());

  function parts() {
    const [kind, a, b] = store.state.steer.split(":");
    if (kind !== "words") return { up: null, down: null };
    return { up: a === "" ? null : Number(a), down: b === "" || b === undefined ? null : Number(b) };
  }
  function words(a, b) {
    const was = store.state.alpha;
    store.set({ steer: a === null ? "" : `words:${a}:${b ?? ""}`, alpha: a === null ? 0 : was || 0.5 });
  }
  function vector() {
    const { steer } = store.state;
    if (steer.startsWith("file:")) return { file: steer.slice(5) };
    const { up: a, down: b } = parts();
    return a === null ? null : { raise: a, lower: b };
  }
  function offer() {
    files.replaceChildren(h("option", { value: "" }, "two words"),
      ...known.map((v) => h("option", { value: v.id }, `${v.name}, layer ${v.layers.join(", ")}`)));
  }

  const element = h(
    "div", { class: "stack" },
    h("div", { class: "columns" },
      h("section", { class: "card" },
        h("h2", {}, "Vector"),
        h("div", { class: "row wrap" },
          h("label", { class: "field", for: "vector" }, "Take ", files),
          h("label", { class: "field", for: "upload" }, "or a file ", file)),
        h("div", { class: "row wrap" }, up.element, down.element),
        alpha.element,
        h("div", { class: "row wrap grow" }, guard.element, cap.element),
        notes),
      h("section", { class: "card" },
        h("h2", {}, "What it does here"),
        h("p", { class: "muted small" }, "KL from the plain answer, and the most that the certificate allows"),
        meter, facts)),
    h("div", { class: "columns even" },
      h("section", { class: "card", id: "raised" }, h("h2", {}, "Most raised"), idle(), raised.element),
      h("section", { class: "card", id: "lowered" }, h("h2", {}, "Most lowered"), idle(), lowered.element)),
    h("section", { class: "card" },
      h("div", { class: "row between wrap" }, h("h2", {}, "The text, plain and steered"), h("div", { class: "row" }, go, stop)),
      status,
      h("div", { class: "columns even" },
        h("div", {}, h("h3", {}, "Plain"), plain), h("div", {}, h("h3", {}, "Steered"), steered))),
  );

  function idle() {
    return h("p", { class: "muted small when-idle" }, "Choose a word to raise, then move alpha.");
  }

  const ask = quietly(async () => {
    const chosen = vector();
    pending?.abort();
    if (!chosen || !store.logits) { show(null); return; }
    const mine = (pending = new AbortController());
    const { alpha: strength, cap: kl_cap } = store.state;
    const late = setTimeout(() => notes.replaceChildren(h("p", { class: "muted small", role: "status" }, "computing")), 300);
    try {
      const result = await json("/api/steer", { ids: store.read.ids, vector: chosen, alpha: strength, kl_cap }, mine.signal);
      if (mine !== pending) return;
      notes.replaceChildren(...result.notes.map((text) => h("p", { class: "muted small" }, text)));
      show(result);
    } catch (error) {
      if (error.name !== "AbortError") { notes.replaceChildren(problem(error)); show(null); }
    } finally {
      clearTimeout(late);
    }
  }, 40);

  async function update() {
    if (!listed) {
      listed = true;
      known = await json("/api/vectors").catch(() => []);
      offer();
    }
    const { up: a, down: b } = parts();
    const isFile = store.state.steer.startsWith("file:");
    files.value = isFile && known.some((v) => `file:${v.id}` === store.state.steer) ? store.state.steer.slice(5) : "";
    up.element.hidden = down.element.hidden = isFile;
    up.set(a);
    down.set(b);
    guard.input.checked = store.state.cap !== null;
    cap.element.hidden = store.state.cap === null;
    if (document.activeElement?.id !== "c-cap") cap.set(store.state.cap ?? 0.1);
    if (document.activeElement?.id !== "c-alpha") alpha.set(store.state.alpha);
    go.disabled = offline || !vector() || running !== null;
    const question = JSON.stringify([store.read?.ids, store.state.steer, store.state.alpha, store.state.cap]);
    if (question !== drawn) {
      drawn = question;
      ask();
    }
  }

  function show(result) {
    element.classList.toggle("idle", !result);
    if (!result) {
      raised.draw([]);
      lowered.draw([]);
      setVar(meter, "live", 0);
      facts.replaceChildren(h("dt", {}, "Nothing yet"), h("dd", { class: "muted" }, "choose a word to raise, or a file"));
      meter.setAttribute("aria-label", "No steering");
      limit.hidden = true;
      return;
    }
    const reach = Number(result.reach.toPrecision(2));
    if (document.activeElement?.id !== "c-alpha") {
      const most = Math.max(reach, Math.abs(store.state.alpha));
      alpha.range.min = -most;
      alpha.range.max = most;
      alpha.range.step = "any";
      alpha.set(store.state.alpha);
    }
    const z = store.logits;
    const other = decoded(result.logits);
    const delta = other.map((value, i) => value - z[i]);
    const p = softmax(z);
    const q = softmax(other);
    const most = Math.max(1e-9, ...[...highest(delta, 1), ...highest(delta.map((d) => -d), 1)].map((i) => Math.abs(delta[i])));
    const row = (i) => ({
      id: i, text: store.text(i), share: Math.abs(delta[i]) / most,
      numbers: [signed(delta[i], 2), `${percent(p[i])} → ${percent(q[i])}`],
    });
    const moves = store.state.alpha !== 0;
    raised.draw(moves ? highest(delta, SHOWN).filter((i) => delta[i] > 0).map(row) : []);
    lowered.draw(moves ? highest(delta.map((d) => -d), SHOWN).filter((i) => delta[i] < 0).map(row) : []);
    const kl = klOf(p, q);
    const bound = result.certificate?.kl_bound ?? null;
    const scale = (x) => Math.min(1, Math.log1p(20 * x) / Math.log1p(20 * 8));
    setVar(meter, "live", scale(kl).toFixed(4));
    limit.hidden = bound === null;
    if (bound !== null) setVar(meter, "limit", scale(bound).toFixed(4));
    meter.setAttribute("aria-label", bound === null
      ? `KL ${kl.toFixed(4)} nats` : `KL ${kl.toFixed(4)} nats, at most ${bound.toFixed(4)}`);
    facts.replaceChildren(
      h("dt", {}, "KL here"), h("dd", {}, h("b", { id: "kl-live" }, `${kl.toFixed(4)} nats`)),
      ...(result.certificate
        ? [h("dt", {}, "Certificate"), h("dd", {}, h("b", {}, `KL ≤ ${bound.toFixed(3)} nats`),
            h("span", { class: "muted small" }, `in every context; range of delta ${result.certificate.range.toFixed(3)}`))]
        : [h("dt", {}, "Certificate"), h("dd", { class: "muted" }, "none below the head; the guard keeps a cap")]),
      h("dt", {}, "Let through"), h("dd", {}, h("b", {}, percent(result.strength)),
        h("span", { class: "muted small" }, store.state.cap === null ? "the guard is off" : "by the guard, at this token")));
  }

  async function write() {
    running = new AbortController();
    go.disabled = true;
    stop.disabled = false;
    status.textContent = "writing";
    const { alpha: strength, cap: kl_cap } = store.state;
    const params = { ...store.asked(), seed: store.state.seed ?? 0 };
    if (params.temperature === undefined) params.temperature = 0;
    const common = { ids: store.read.ids, params, order: store.order(), max_tokens: store.state.n };
    const one = (place, steer) => {
      place.textContent = "";
      return lines("/api/generate", { ...common, steer }, ({ token }) => {
        if (!store.about.stop_ids.includes(token.id)) place.textContent += token.text;
      }, running.signal);
    };
    const both = await Promise.allSettled([
      one(plain, null), one(steered, { vector: vector(), alpha: strength, kl_cap }),
    ]);
    const failed = both.find((r) => r.status === "rejected" && r.reason.name !== "AbortError");
    const held = both[1].value?.guard;
    if (failed) status.replaceChildren(problem(failed.reason));
    else if (both.some((r) => r.status === "rejected")) status.textContent = "stopped";
    else status.textContent = held ? `done; the guard held back ${held.held_back} of ${held.tokens} tokens` : "done";
    running = null;
    stop.disabled = true;
    go.disabled = false;
  }
  return { element, update };
}

function softmax(z) {
  let best = -Infinity;
  for (let i = 0; i < z.length; i++) if (z[i] > best) best = z[i];
  const p = new Float64Array(z.length);
  let sum = 0;
  for (let i = 0; i < z.length; i++) sum += p[i] = Math.exp(z[i] - best);
  for (let i = 0; i < z.length; i++) p[i] /= sum;
  return p;
}

function klOf(p, q) {
  let kl = 0;
  for (let i = 0; i < p.length; i++) if (p[i] > 0 && q[i] > 0) kl += p[i] * Math.log(p[i] / q[i]);
  return Math.max(0, kl);
}
