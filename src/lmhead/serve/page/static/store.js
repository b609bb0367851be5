// The state of the page, what the server said of it, and who wants to know.

import { floats, json } from "./api.js";
import { Funnel } from "./funnel_run.js";
import { parse, write } from "./state.js";

export class Store {
  constructor(about, tokens, address) {
    this.about = about;
    this.tokens = tokens;
    this.state = parse(address, about.defaults);
    this.read = null; // the reply of /api/read
    this.logits = null; // Float32Array of the next token
    this.error = null;
    this.busy = false;
    this.funnel = new Funnel(about);
    this.watchers = [];
    this.pending = null;
  }

  /** Call f(what) after changes: "state" (and which names), "text", "busy". */
  watch(f) {
    this.watchers.push(f);
  }

  tell(what, names = []) {
    for (const f of this.watchers) f(what, names);
  }

  /** Change the state, and its address. */
  set(changes) {
    const names = Object.keys(changes).filter(
      (name) => JSON.stringify(this.state[name]) !== JSON.stringify(changes[name]),
    );
    if (!names.length) return;
    Object.assign(this.state, changes);
    this.tell("state", names);
    if (names.some((name) => ["prompt", "more", "chat"].includes(name))) this.refresh();
  }

  address() {
    return write(this.state, this.about.defaults);
  }

  text(id) {
    return this.tokens[id] ?? `#${id}`;
  }

  /** The sampler's parameters as they stand. */
  params() {
    const own = {};
    for (const name of Object.keys(this.about.defaults)) {
      own[name] = name in this.state ? this.state[name] : this.about.defaults[name];
    }
    own.stop_ids = this.about.stop_ids;
    return own;
  }

  order() {
    const { order } = this.state;
    const known = this.about.orders[order];
    if (known) return known;
    const named = order.split(",").filter((name) => name in this.about.filters);
    const rest = this.about.orders.hf.filter((name) => !named.includes(name));
    return [...new Set([...named, ...rest])];
  }

  /** What the filters that look back look at. */
  sequence() {
    const { ids, start, breakers } = this.read;
    return { prompt: ids.slice(0, start), output: ids.slice(start), breakers, uniform: 0 };
  }

  /** Run the funnel on the logits that are there. */
  steps() {
    return this.funnel.run(this.logits, this.sequence(), this.params(), this.order());
  }

  /** The parameters that differ from their defaults, as the server takes them. */
  asked() {
    const own = {};
    for (const [name, usual] of Object.entries(this.about.defaults)) {
      const value = this.state[name];
      if (name in this.state && JSON.stringify(value) !== JSON.stringify(usual)) own[name] = value;
    }
    delete own.stop_ids;
    if (this.state.seed !== null) own.seed = this.state.seed;
    return own;
  }

  /** Ask for the text's tokens and for the logits behind it. */
  async refresh(cut = null) {
    this.pending?.abort();
    const mine = (this.pending = new AbortController());
    if (!this.state.prompt) {
      Object.assign(this, { read: null, logits: null, error: new Error("Type a prompt.") });
      this.tell("text");
      return;
    }
    this.busy = true;
    this.tell("busy");
    try {
      if (cut) {
        const { prompt, more, chat } = this.state;
        const end = await json("/api/read", { prompt, more, chat, cut }, mine.signal);
        Object.assign(this.state, { prompt: end.prompt, more: end.more });
        this.tell("state", ["prompt", "more"]);
      }
      const { prompt, more, chat } = this.state;
      const read = await json("/api/read", { prompt, more, chat, cut: null }, mine.signal);
      const logits = await floats("/api/logits", { ids: read.ids }, mine.signal);
      Object.assign(this, { read, logits, error: null });
    } catch (error) {
      if (mine.signal.aborted) return;
      Object.assign(this, { error });
    }
    this.busy = false;
    this.tell("text");
  }
}
