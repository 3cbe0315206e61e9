// Wires the page: looks at the server every two seconds while somebody can see it.

import { Adapters } from "./adapters.js";
import { ApiError, getJson, getText, key } from "./api.js";
import { Ask } from "./ask.js";
import { byId } from "./dom.js";
import { Live } from "./live.js";
import { parse } from "./metrics.js";

const SECONDS = 2;

const ask = new Ask();
const adapters = new Adapters(look);
const live = new Live(SECONDS);
let hasAdapters = true; // until the server says that it has no such route
let looking = null;
let wantsKey = false; // no use in asking on until somebody enters one

function say(state, text) {
  byId("status").dataset.state = state;
  byId("status").textContent = text;
}

/** Entries of /v1/adapters, or null on a server without this route. */
async function adapterInfos() {
  if (!hasAdapters) return null;
  try {
    return (await getJson("v1/adapters")).data;
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 404) throw error;
    hasAdapters = false;
    return null;
  }
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
  try {
    told = await Promise.all([getJson("v1/models"), adapterInfos(), metricsPage()]);
  } catch (error) {
    complain(error);
    return;
  }
  const [models, infos, page] = told;
  show(models.data, infos, parse(page));
  wantsKey = false;
  say("good", "serving");
}

function complain(error) {
  wantsKey = error instanceof ApiError && error.status === 401;
  if (wantsKey) byId("key-form").hidden = false;
  const reason = error.name === "TimeoutError" ? "no answer within 8 seconds" : error.message;
  say("bad", wantsKey ? "this server wants an API key" : `not reachable: ${reason}`);
}

function show(models, infos, samples) {
  ask.update(models);
  adapters.update(models, infos, samples);
  live.update(samples);
  const count = models.filter((one) => one.parent).length;
  const base = models.find((one) => !one.parent)?.id ?? "one model";
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
