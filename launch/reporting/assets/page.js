"use strict";
// What all parts share: the data, elements, the address, numbers. Text from data only ever becomes
// text nodes; the page's policy refuses anything else.

let data = null; // the overview
const $ = id => document.getElementById(id);

/** Make an element; properties that begin with `on` are listeners, strings become text. */
function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (![null, undefined, false].includes(value)) node.setAttribute(key, value);
  }
  return fill(node, children);
}

/** Put elements and texts in an element, in place of what it holds; nothing for what is missing. */
function fill(node, ...children) {
  const there = children.flat(Infinity).filter(child => ![null, undefined, false, ""].includes(child));
  node.replaceChildren(...there.map(child => child instanceof Node ? child : visible(String(child))));
  return node;
}

/** Make a table of heads, if there are any, and rows: elements, or lists of cells. */
function table(heads, rows, properties) {
  const row = (cells, tag) =>
    h("tr", {}, cells.map(cell => cell instanceof HTMLTableCellElement ? cell : h(tag, {}, cell)));
  return h("table", properties, heads && h("thead", {}, row(heads, "th")),
    h("tbody", {}, rows.map(each => each instanceof Node ? each : row(each, "td"))));
}

/** Make a choice that is written into the address. */
const select = (key, label, options, chosen) => h("select",
  {"aria-label": label, onchange: event => { location.hash = link({[key]: event.target.value}); }},
  options.map(([value, text]) => h("option", {value, selected: value === chosen}, text)));

/** Show what has no shape of its own, or would turn the text around it: controls, marks, halves of characters. */
const visible = text => text.replace(/(?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu, mark => {
  const code = mark.codePointAt(0);
  return code < 0x20 ? String.fromCharCode(0x2400 + code)
    : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
});

/** Look a text up in a table; a name such as "constructor", which every object has, is in none. */
const entry = (table, key) => Object.hasOwn(table, key) ? table[key] : undefined;

const bytes = text => Uint8Array.from(atob(text), each => each.charCodeAt(0));

async function unpack(id) {
  const stream = new Blob([bytes($(`data-${id}`).textContent)]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).json();
}

// The address holds everything that is chosen, so that every view has a link and Back works.
const address = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** Link to what is chosen now, with changes; null and "" choose nothing. */
function link(changes) {
  const chosen = Object.entries({...address(), to: null, more: null, ...changes});
  return "#" + new URLSearchParams(chosen.filter(([, value]) => value !== null && value !== ""));
}

/** Link to these choices alone; the rule stays. */
const anew = changes => "#" + new URLSearchParams({..."rule" in address() && {rule: address().rule}, ...changes});

/** Shorten a text; all of it is a click away. */
const brief = (text, most = 300) =>
  text.length > most ? `${text.slice(0, most).replace(/[\ud800-\udbff]$/, "")}…` : text;
/** Tags and metrics as words. */
const asWords = name => name.replaceAll("_", " ").toLowerCase();
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
const points = (value, digits = 1) => {
  const size = Math.abs(100 * value).toFixed(digits);
  return `${+size === 0 ? "" : value < 0 ? "−" : "+"}${size}`;
};
const chance = p => p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`;
const mean = ({mean, ci95}) => `${percent(mean)} [${ci95.map(each => (100 * each).toFixed(1)).join(", ")}]`;
const bounds = ci95 => ci95 ? `[${ci95.map(each => points(each)).join(", ")}]` : "–";
const gain = ({difference, ci95}) => `${points(difference)} ${bounds(ci95)}`;
const duration = s => s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min`
  : `${(s / 3600).toFixed(1)} h`;

function number(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3))).replace("-", "−");
}
