// A line chart of the last minutes, drawn as SVG.

import { make, number } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const POINTS = 90;
const [WIDTH, HEIGHT] = [300, 100];

/** The next of 1, 2, 5, 10, 20, 50, ... that is at least `value`. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
}

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export class Chart {
  /** `least`: the axis reaches at least so far up; `most`: and never farther. */
  constructor(title, names, { unit = "", least = 1, most = Infinity, seconds }) {
    Object.assign(this, { unit, least, most });
    this.history = names.map(() => []);
    this.now = names.map(() => make("b", { textContent: "–" }));
    this.items = names.map((name, i) => make("li", {}, `${name} `, this.now[i], unit));
    this.svg = shape("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
    this.svg.setAttribute("aria-hidden", "true"); // the numbers above say what the lines end with
    for (const y of [1, HEIGHT / 2, HEIGHT - 1])
      this.svg.append(shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    this.lines = names.map(() => this.svg.appendChild(shape("polyline", {})));
    this.top = make("span");
    const axis = make("div", { className: "axis" }, this.top, make("span", { textContent: `last ${(POINTS * seconds) / 60} min` }));
    this.element = make("figure", {}, make("figcaption", { textContent: title }), make("ul", {}, ...this.items), this.svg, axis);
  }

  /** One value for each line; undefined hides a line that this server does not tell. */
  add(values) {
    values.forEach((value, i) => {
      this.items[i].hidden = value === undefined;
      this.now[i].textContent = number(value);
      this.history[i].push(value ?? 0);
      if (this.history[i].length > POINTS) this.history[i].shift();
    });
    this.draw();
  }

  draw() {
    const largest = Math.max(this.least, ...this.history.flat());
    const top = Math.min(ceiling(largest), this.most);
    this.top.textContent = `0 to ${number(top)}${this.unit}`;
    this.lines.forEach((line, i) => {
      const values = this.items[i].hidden ? [] : this.history[i];
      const first = POINTS - values.length;
      const points = values.map((value, j) => {
        const x = ((first + j) / (POINTS - 1)) * WIDTH;
        return `${x.toFixed(1)},${(HEIGHT - 1 - (Math.min(value, top) / top) * (HEIGHT - 3)).toFixed(1)}`;
      });
      line.setAttribute("points", points.join(" "));
    });
  }
}
