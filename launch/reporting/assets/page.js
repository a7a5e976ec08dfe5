"use strict";
// What all parts share: data, elements, the address, numbers. Text from data only ever becomes text
// nodes; the page's policy refuses anything else.

let data = null; // the overview
const pieces = new Map();
const $ = id => document.getElementById(id);

/** Make an element; properties that begin with `on` are listeners. Strings become text. */
function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...nodes(children));
  return node;
}

/** What is to stand in an element: text as it can be seen, and nothing for what is missing. */
function nodes(children) {
  const there = children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false);
  return there.map(child => child instanceof Node ? child : visible(String(child)));
}

const fill = (node, ...children) => node.replaceChildren(...nodes(children));

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/gu;

/** Show what has no shape of its own, or would turn the text around it: controls, marks, halves. */
function visible(text) {
  return text.replace(HIDDEN, mark => {
    const code = mark.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob($(`data-${id}`).textContent), each => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Open a piece; the last few that were looked at stay open. */
async function piece(number) {
  const found = pieces.get(number) ?? unpack(`piece${number}`);
  pieces.delete(number);
  pieces.set(number, found);
  if (pieces.size > 8) pieces.delete(pieces.keys().next().value);
  return found;
}

// The address holds everything that is chosen, so that every view has a link and Back works.
const address = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const link = changes => {
  const all = {...address(), ...changes};
  const kept = Object.entries(all).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return "#" + new URLSearchParams(kept);
};
const go = changes => { location.hash = link(changes); };
/** Change the address without a step back to it: for what is typed. */
const adjust = changes => { history.replaceState(null, "", link(changes)); show(); };

/** The beginning of a text, where all of it is a click away. */
const brief = text => text.length > 300 ? `${text.slice(0, 300).replace(/[\ud800-\udbff]$/, "")}…` : text;

const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
const points = value => `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)}`;
const chance = p => p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`;
const number = value => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3))).replace("-", "−");
};
const duration = s => s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
/** Tags and metrics as words. */
const asWords = name => name.replaceAll("_", " ").toLowerCase();
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// Okabe and Ito's colours, which people with any colour vision tell apart; dashes tell them apart too.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#a06b00"];
const ON_DARK = ["#56b4e9", "#ff8a3d", "#2fd6a3", "#e8a8cf", "#f0c95a", "#8fa8ff", "#a8b0b8", "#d8b070"];
const isDark = () => document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3], [4, 4], [1, 3], [12, 3], [3, 6]];
const colour = n => (isDark() ? ON_DARK : COLOURS)[n % COLOURS.length];
/** Resolve a colour of the style sheet for a canvas. */
function ink(name) {
  const probe = h("span", {style: {color: `var(${name})`, display: "none"}});
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
