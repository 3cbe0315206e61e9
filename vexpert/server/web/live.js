// Three charts from the metrics page.

import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { sum } from "./metrics.js";

export class Live {
  /** `seconds`: between two updates. */
  constructor(seconds) {
    this.throughput = new Chart("Throughput, tokens/s", ["generated", "prompt"], { least: 10, seconds });
    this.batch = new Chart("Batch", ["running", "waiting", "adapters"], { least: 5, seconds });
    this.memory = new Chart("Memory in use", ["KV cache", "adapters", "host"], { unit: "%", most: 100, seconds });
    byId("charts").append(this.throughput.element, this.batch.element, this.memory.element);
    this.before = null;
  }

  update(samples) {
    this.throughput.add(this.rates(samples));
    this.batch.add([
      sum(samples, "vllm:num_requests_running"),
      sum(samples, "vllm:num_requests_waiting"),
      adaptersOf(samples),
    ]);
    this.memory.add([
      percent(sum(samples, "vllm:kv_cache_usage_perc")),
      share(samples, "device"),
      share(samples, "host"),
    ]);
  }

  /** Generated and prompt tokens per second since the last update. */
  rates(samples) {
    const names = ["vllm:generation_tokens_total", "vllm:prompt_tokens_total"];
    const now = { time: performance.now(), counts: names.map((name) => sum(samples, name)) };
    const before = this.before ?? now;
    this.before = now;
    const seconds = (now.time - before.time) / 1000;
    // A count that went down is a server that was started anew.
    return now.counts.map((count, i) => {
      if (count === undefined || before.counts[i] === undefined) return undefined; // not told
      return seconds ? Math.max(count - before.counts[i], 0) / seconds : 0;
    });
  }
}

/** Different adapters in the running batch. */
function adaptersOf(samples) {
  const names = samples.find((one) => one.name === "vllm:lora_requests_info")?.labels.running_lora_adapters;
  return names === undefined ? undefined : names.split(",").filter(Boolean).length;
}

const percent = (share) => (share === undefined ? undefined : 100 * share);

/** Percent of a tier's budget for adapters; undefined where the server does not tell it. */
function share(samples, tier) {
  const name = "vexpert:adapter_tier_bytes";
  const budget = sum(samples, name, { tier, kind: "budget" });
  return budget ? (100 * sum(samples, name, { tier, kind: "used" })) / budget : undefined;
}
