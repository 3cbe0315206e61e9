// The table of adapters, and the form that loads one.

import { ApiError, getSome, MOST, post } from "./api.js";
import { byId, bytes, make, number } from "./dom.js";
import { sumsBy } from "./metrics.js";

const PATH = "v1/adapters";
const NOTABLE = ["loading", "host", "device", "errored", "draining"]; // states: all but in files alone
const UNTOLD = "This server does not tell states and sizes (it has no /v1/adapters): names are from /v1/models.";

export class Adapters {
  /** `changed` is called after a load or unload. */
  constructor(changed) {
    this.changed = changed;
    this.hasRoute = true; // until the server says that it has no such route
    byId("find").addEventListener("input", () => this.changed());
    byId("load").addEventListener("submit", (event) => this.load(event));
  }

  /** A list of /v1/adapters, or null on a server without this route. Of many those in memory come first. */
  async infos() {
    if (!this.hasRoute) return null;
    const part = byId("find").value.trim();
    try {
      const all = await getSome(PATH, part);
      if (!all.has_more) return all;
      const notable = await getSome(PATH, part, NOTABLE);
      const names = new Set(notable.data.map((one) => one.name));
      const data = [...notable.data, ...all.data.filter((one) => !names.has(one.name))];
      return { data: data.slice(0, MOST), has_more: true };
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) throw error;
      this.hasRoute = false;
      return null;
    }
  }

  /** `infos`: what `infos` found; `samples`: the metrics. */
  update(models, infos, samples) {
    byId("adapters-note").hidden = infos !== null;
    byId("adapters-note").textContent = infos === null ? UNTOLD : "";
    const hasMore = infos?.has_more ?? false;
    byId("rows-more").hidden = !hasMore;
    byId("find-label").hidden = !hasMore && !byId("find").value;
    const told = infos?.data ?? models.filter((one) => one.parent).map((one) => ({ name: one.id, path: one.root }));
    const answers = sumsBy(samples, "vexpert:adapter_requests_total", "adapter");
    const tokens = sumsBy(samples, "vexpert:adapter_generation_tokens_total", "adapter");
    this.draw(told.map((info) => ({ ...info, answers: answers.get(info.name), tokens: tokens.get(info.name) })));
  }

  draw(infos) {
    const drawn = JSON.stringify(infos);
    if (drawn === this.drawn) return; // rows that stay keep the keyboard's focus
    this.drawn = drawn;
    const focused = document.activeElement?.dataset.unload;
    byId("rows").replaceChildren(...infos.map((info) => this.row(info)));
    if (!infos.length) byId("rows").append(make("tr", {}, make("td", { colSpan: 9, textContent: byId("find").value ? "no such name" : "none loaded" })));
    if (focused) byId("rows").querySelector(`[data-unload="${CSS.escape(focused)}"]`)?.focus();
  }

  row(info) {
    const name = make("th", { scope: "row", textContent: info.name, title: info.path });
    const state = make("td", { textContent: info.state ?? "–", title: info.error ?? "" });
    if (info.error) state.className = "bad";
    const button = make("button", { type: "button", className: "small", textContent: "Unload" });
    button.dataset.unload = info.name;
    button.setAttribute("aria-label", `Unload ${info.name}`);
    button.disabled = info.state === "draining";
    button.addEventListener("click", () => this.unload(info.name, button));
    const tier = info.pinned ? `${info.tier}, pinned` : info.tier ?? "–";
    const figures = [
      number(info.rank), bytes(info.device_bytes), bytes(info.host_bytes),
      number(info.answers ?? 0), number(info.tokens ?? 0),
    ];
    const cells = figures.map((text) => make("td", { className: "number", textContent: text }));
    const row = make("tr", {}, name, state, make("td", { textContent: tier }), ...cells, make("td", {}, button));
    row.dataset.adapter = info.name;
    return row;
  }

  async load(event) {
    event.preventDefault();
    const [name, path] = [byId("load-name").value.trim(), byId("load-path").value.trim()];
    this.tell(`loading ${name} …`);
    await this.do(async () => {
      await post("v1/load_lora_adapter", { lora_name: name, lora_path: path });
      event.target.reset();
      return `${name} is loaded`;
    });
  }

  async unload(name, button) {
    button.disabled = true;
    this.tell(`unloading ${name}: requests that use it finish first …`);
    await this.do(async () => {
      await post("v1/unload_lora_adapter", { lora_name: name });
      return `${name} is unloaded`;
    });
    button.disabled = false;
  }

  async do(action) {
    try {
      this.tell(await action());
    } catch (error) {
      this.tell(error.message, true);
    }
    await this.changed();
  }

  tell(text, isBad = false) {
    byId("told").textContent = text;
    byId("told").className = isBad ? "bad" : "";
  }
}
