// Elements, and numbers as people read them.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element; text is set as text, so that no answer or name is read as HTML. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** 1536 -> "1.5 KiB"; 0 and undefined -> "–". */
export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(value) / 10), units.length - 1);
  return `${(value / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** A count with the reader's own separators; three digits of small fractions. */
export function number(value) {
  if (value === undefined || Number.isNaN(value)) return "–";
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : 1;
  return value.toLocaleString(undefined, { maximumFractionDigits: digits });
}
