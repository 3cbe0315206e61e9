// The question, who is asked, and the answers side by side.

import { Answer } from "./answer.js";
import { byId, make } from "./dom.js";

// Browsers open six connections to one server; with one left for the figures, answers beyond five
// would queue inside the browser and their times would be wrong. They wait here instead, untimed.
const AT_ONCE = 5;
const CHOSEN_AT_FIRST = 8;
const MANY = 12; // from here on there is a field to find a name

export class Ask {
  /** `changed` is called when other names are wanted from the server. */
  constructor(changed) {
    this.isPart = false; // the server has more names than it tells at once
    this.chosen = null; // names; null until the first list has come
    this.models = [];
    byId("ask").addEventListener("submit", (event) => this.submit(event));
    byId("prompt").addEventListener("keydown", (event) => this.pressed(event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("stop").addEventListener("click", () => this.stop());
    byId("filter").addEventListener("input", () => {
      this.drawNames();
      if (this.isPart) changed();
    });
    byId("all").addEventListener("click", () => this.choose(this.found().map((one) => one.id)));
    byId("none").addEventListener("click", () => this.choose(this.models.filter((one) => !one.parent).map((one) => one.id)));
  }

  /** The part of a name that the server is to look for; none where it tells all names. */
  wanted() {
    return this.isPart ? byId("filter").value.trim() : "";
  }

  /** A list of /v1/models with `part` in the names; chosen ones stay chosen, a new adapter is chosen where few are. */
  update({ data, has_more: hasMore }, part) {
    if (!part) this.isPart = hasMore ?? false;
    const told = new Set(data.map((one) => one.id));
    const stays = (one) => !told.has(one.id) && (!one.parent || this.chosen?.has(one.id));
    const models = this.isPart ? [...this.models.filter(stays), ...data] : data;
    const known = new Set(this.models.map((one) => one.id));
    const names = models.map((one) => one.id);
    if (names.length === known.size && names.every((name) => known.has(name))) return;
    const fresh = names.filter((name) => !known.has(name));
    const kept = names.filter((name) => this.chosen?.has(name));
    this.models = models;
    const room = this.isPart && this.chosen ? 0 : Math.max(CHOSEN_AT_FIRST - kept.length, 0);
    this.choose([...kept, ...fresh.slice(0, room)]);
  }

  choose(names) {
    this.chosen = new Set(names);
    this.drawNames();
  }

  found() {
    const part = byId("filter").value.trim().toLowerCase();
    return this.models.filter((one) => one.id.toLowerCase().includes(part));
  }

  drawNames() {
    byId("filter-label").hidden = this.models.length <= MANY && !this.isPart;
    const focused = document.activeElement?.value;
    const inside = byId("names").contains(document.activeElement);
    byId("names").replaceChildren(...this.found().map((one) => this.box(one)));
    this.count();
    if (inside) byId("names").querySelector(`[value="${CSS.escape(focused)}"]`)?.focus();
  }

  box(entry) {
    const input = make("input", { type: "checkbox", name: "model", value: entry.id });
    input.checked = this.chosen.has(entry.id);
    input.addEventListener("change", () => {
      if (input.checked) this.chosen.add(entry.id);
      else this.chosen.delete(entry.id);
      this.count();
    });
    return make("label", {}, input, entry.id);
  }

  count() {
    const [size, all] = [this.chosen.size, this.models.length];
    const of = this.isPart ? "" : ` of ${all}`; // nobody has told the number
    byId("chosen").textContent = size ? `${size}${of} chosen` : "nobody chosen: choose who answers";
    byId("chosen").classList.toggle("bad", !size);
  }

  pressed(event) {
    // An Enter that ends the choice of an input method's character does not send.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  }

  async submit(event) {
    event.preventDefault();
    const text = byId("prompt").value;
    const asked = this.models.filter((one) => this.chosen.has(one.id));
    if (!text.trim()) byId("prompt").focus();
    else if (!asked.length) byId("names").querySelector("input")?.focus();
    if (!text.trim() || !asked.length) return;
    this.stop();
    const run = new AbortController();
    this.run = run;
    const answers = asked.map((one) => new Answer(one.id, !one.parent));
    byId("answers").replaceChildren(...answers.map((one) => one.element));
    this.busy(true);
    const body = this.body(text);
    const queue = [...answers];
    const work = async () => {
      for (let one = queue.shift(); one; one = queue.shift()) await one.run(body, run.signal);
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    if (this.run === run) this.busy(false);
  }

  body(text) {
    const system = byId("system").value.trim();
    const messages = [{ role: "user", content: text }];
    if (system) messages.unshift({ role: "system", content: system });
    const body = { messages, temperature: Number(byId("temperature").value) };
    if (byId("max-tokens").value) body.max_tokens = Number(byId("max-tokens").value);
    return body;
  }

  stop() {
    this.run?.abort();
  }

  busy(is) {
    byId("stop").disabled = !is;
    byId("answers").setAttribute("aria-busy", String(is));
  }
}
