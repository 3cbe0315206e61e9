// One card: a name, its answer as it comes, and how fast it came.

import { chat } from "./api.js";
import { make, number } from "./dom.js";

const REASONS = { length: "stopped at the most tokens", stop: "" };

export class Answer {
  constructor(model, isBase) {
    this.model = model;
    this.text = make("pre");
    this.rate = make("b", { textContent: "waits" });
    this.line = make("p");
    const kind = make("small", { textContent: isBase ? "base" : "adapter" });
    this.element = make("article", {}, make("h3", {}, make("span", { textContent: model }), kind), this.text, make("p", {}, this.rate), this.line);
    this.element.dataset.model = model;
    this.element.dataset.state = "wait";
  }

  /** Ask and show; never throws: what goes wrong is this card's text. */
  async run(body, signal) {
    this.started = performance.now();
    this.tokens = 0;
    this.element.dataset.state = "run";
    try {
      for await (const chunk of chat({ model: this.model, ...body }, signal)) this.take(chunk);
      this.end("done", REASONS[this.reason] ?? this.reason);
    } catch (error) {
      if (error.name === "AbortError") this.end("stopped", "stopped by you");
      else this.fail(error.message);
    }
  }

  take(chunk) {
    const choice = chunk.choices[0];
    const piece = choice?.delta.content;
    if (piece) {
      this.first ??= performance.now();
      this.tokens += 1;
      this.text.append(piece);
    }
    this.reason = choice?.finish_reason ?? this.reason;
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens; // exact, once the end tells it
    this.measure();
  }

  /** Tokens over the whole time, the wait for the first one included. */
  measure() {
    const seconds = (performance.now() - this.started) / 1000;
    this.rate.textContent = `${number(this.tokens / seconds)} tokens/s`;
    const first = this.first ? `, first after ${number(Math.round(this.first - this.started))} ms` : "";
    this.line.textContent = `${this.tokens} tokens${first}`;
  }

  end(state, remark) {
    this.element.dataset.state = state;
    this.measure();
    if (remark) this.line.append(`; ${remark}`);
  }

  fail(message) {
    this.element.dataset.state = "failed";
    this.rate.textContent = "failed";
    this.line.textContent = message;
    this.line.className = "bad";
  }
}
