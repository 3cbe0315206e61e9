// Prometheus' text format, as far as this server writes it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** All samples of a page: [{name, labels, value}]. */
export function parse(page) {
  const samples = [];
  for (const line of page.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, text] of (found[2] ?? "").matchAll(LABEL))
      labels[name] = text.replace(/\\[n"\\]/g, (escape) => ESCAPES[escape]);
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

/** The sum over the samples of `name` that have all of `labels`; undefined where there is none. */
export function sum(samples, name, labels = {}) {
  const wanted = Object.entries(labels);
  const found = samples.filter(
    (one) => one.name === name && wanted.every(([key, value]) => one.labels[key] === value),
  );
  return found.length ? found.reduce((total, one) => total + one.value, 0) : undefined;
}

/** Sums of `name` by the value of one label. */
export function sumsBy(samples, name, label) {
  const sums = new Map();
  for (const one of samples)
    if (one.name === name) sums.set(one.labels[label], (sums.get(one.labels[label]) ?? 0) + one.value);
  return sums;
}
