// Calls of the public API. Paths are relative, so that the page works below a proxy's prefix.

const KEY = "vexpert-api-key"; // of this tab alone, gone when it closes

export const MOST = 200; // names that are asked for, and shown, at once: there may be thousands
const SECONDS = 8; // for a look; a step of the engine may take some

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

/** An answer that is not 200; `message` is the server's own. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 300);
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Not one of this server's errors: a proxy's page, shown as it is.
  }
  throw new ApiError(response.status, message || `the server answers ${response.status}`);
}

/** GET; an engine that hangs holds an answer up, and somebody looks at the page. */
const get = (path) => request(path, undefined, AbortSignal.timeout(1000 * SECONDS));
export const getJson = async (path) => (await get(path)).json();
/** The first MOST entries of a list, of names with `name` in them and of these states; others there may be. */
export function getSome(path, name, states = []) {
  const query = new URLSearchParams({ limit: MOST });
  if (name) query.set("name", name);
  for (const state of states) query.append("state", state);
  return getJson(`${path}?${query}`);
}
export const getText = async (path) => (await get(path)).text();
export const post = async (path, body) => (await request(path, body)).text();

/** The chunks of a streamed chat completion. Throws ApiError, also for an error inside the stream. */
export async function* chat(body, signal) {
  const usage = { stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { ...body, ...usage }, signal);
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data: ")) continue; // a comment that keeps the connection alive
    const data = line.slice(6);
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(200, "the answer was cut off");
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}
