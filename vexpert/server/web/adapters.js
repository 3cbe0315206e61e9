// The table of adapters, and the form that loads one.

import { post } from "./api.js";
import { byId, bytes, make, number } from "./dom.js";
import { sumsBy } from "./metrics.js";

const SHOWN = 200;
const UNTOLD = "This server does not tell states and sizes (it has no /v1/adapters): names are from /v1/models.";

export class Adapters {
  /** `changed` is called after a load or unload. */
  constructor(changed) {
    this.changed = changed;
    byId("load").addEventListener("submit", (event) => this.load(event));
  }

  /** `infos`: entries of /v1/adapters, or null where there is none; `samples`: the metrics. */
  update(models, infos, samples) {
    byId("adapters-note").hidden = infos !== null;
    byId("adapters-note").textContent = infos === null ? UNTOLD : "";
    const told = infos ?? models.filter((one) => one.parent).map((one) => ({ name: one.id, path: one.root }));
    const answers = sumsBy(samples, "vexpert:adapter_requests_total", "adapter");
    const tokens = sumsBy(samples, "vexpert:adapter_generation_tokens_total", "adapter");
    this.draw(told.map((info) => ({ ...info, answers: answers.get(info.name), tokens: tokens.get(info.name) })));
  }

  draw(infos) {
    const drawn = JSON.stringify(infos);
    if (drawn === this.drawn) return; // rows that stay keep the keyboard's focus
    this.drawn = drawn;
    const focused = document.activeElement?.dataset.unload;
    byId("rows").replaceChildren(...infos.slice(0, SHOWN).map((info) => this.row(info)));
    if (!infos.length) byId("rows").append(make("tr", {}, make("td", { colSpan: 9, textContent: "none loaded" })));
    byId("rows-more").hidden = infos.length <= SHOWN;
    byId("rows-more").textContent = `${infos.length - SHOWN} more are not shown`;
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
