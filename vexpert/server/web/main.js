// Wires the page: looks at the server every two seconds while somebody can see it.

import { Adapters } from "./adapters.js";
import { ApiError, getSome, getText, key } from "./api.js";
import { Ask } from "./ask.js";
import { byId } from "./dom.js";
import { Live } from "./live.js";
import { parse, sum } from "./metrics.js";

const SECONDS = 2;

const ask = new Ask(look);
const adapters = new Adapters(look);
const live = new Live(SECONDS);
let looking = null;
let wantsKey = false; // no use in asking on until somebody enters one

function say(state, text) {
  byId("status").dataset.state = state;
  byId("status").textContent = text;
}

/** The metrics page; nothing for a key that may not read it, with which the rest of the page works. */
async function metricsPage() {
  try {
    return await getText("metrics");
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 403) throw error;
    return "";
  }
}

async function lookOnce() {
  let told;
  const part = ask.wanted();
  try {
    told = await Promise.all([getSome("v1/models", part), adapters.infos(), metricsPage()]);
  } catch (error) {
    complain(error);
    return;
  }
  const [models, infos, page] = told;
  show(models, part, infos, parse(page));
  wantsKey = false;
  say("good", "serving");
}

function complain(error) {
  wantsKey = error instanceof ApiError && error.status === 401;
  if (wantsKey) byId("key-form").hidden = false;
  const reason = error.name === "TimeoutError" ? "no answer within 8 seconds" : error.message;
  say("bad", wantsKey ? "this server wants an API key" : `not reachable: ${reason}`);
}

function show(models, part, infos, samples) {
  ask.update(models, part);
  adapters.update(models.data, infos, samples);
  live.update(samples);
  // Of many the metrics know the number, which not every key may read.
  const known = sum(samples, "vexpert:adapters", { tier: "known" }) ?? "many";
  const count = ask.isPart ? known : models.data.filter((one) => one.parent).length;
  const base = ask.models.find((one) => !one.parent)?.id ?? "one model";
  byId("summary").textContent = `${base}, ${count} adapter${count === 1 ? "" : "s"}`;
}

/** Look now; calls that come meanwhile wait for the look after this one. */
async function look() {
  await looking;
  looking ??= lookOnce().finally(() => (looking = null));
  await looking;
}

byId("key").value = key.get();
byId("key-form").hidden = !key.get();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  look();
});
document.addEventListener("visibilitychange", () => document.hidden || look());
setInterval(() => document.hidden || looking || wantsKey || look(), SECONDS * 1000);
look();
