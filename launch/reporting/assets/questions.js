// The table of questions, and its filters.

const KEYS = ["find", "flip", "set", "db", "level", "clause", "tag"];
const FLIPS = {
  right: ["flipped to right", ([a, b]) => a === false && b === true],
    wrong: ["flipped to wrong", ([a, b]) => a === true && b === false],
  both: ["right in both", ([a, b]) => a === true && b === true],
    neither: ["wrong in both", ([a, b]) => a === false && b === false],
};
const PAGE = 150;
let rows = []; // the questions that the filters leave
let shownRows = PAGE;

/** Every place where questions were answered: `run.where`; first and last are of any place. */
function views() {
  const found = new Map();
  data.runs.forEach((run, n) => {
    const name = data.runs.length > 1 ? `${run.name}: ` : "";
    found.set(`${n}.first`, `${name}first time seen`).set(`${n}.last`, `${name}last time seen`);
  });
  const steps = new Map();
  for (const question of data.questions) for (const [run, where] of question.seen) steps.set(`${run}.${where}`, [run, where]);
  const order = {before: -1, answers: 0, after: 1e12};
  for (const [key, [run, where]] of [...steps].sort(([, a], [, b]) =>
    a[0] - b[0] || (order[a[1]] ?? a[1]) - (order[b[1]] ?? b[1])))
    found.set(key, (data.runs.length > 1 ? `${data.runs[run].name}: ` : "") + placeName(where));
  return found;
}

const placeName = where => ({before: "before learning", after: "after learning",
  answers: "evaluation"})[where] ?? `step ${where}`;
const isHeld = question => question.seen.some(([, where]) => typeof where === "string");

/** What was seen of a question in a view: [run, where, piece, place, right, total, tags]. */
function seenIn(question, view) {
  const [run, where] = view.split(/\.(.*)/s);
  const own = question.seen.filter(each => each[0] === Number(run));
  if (where === "first") return own[0];
  if (where === "last") return own.at(-1);
  return own.find(each => String(each[1]) === where);
}

/** Of a group most answers have to be right. */
const isRight = seen => seen && seen[5] ? seen[4] / seen[5] > 0.5 : undefined;

/** The two views that are compared: as chosen, else before and after, else first and last. */
function chosenViews(state) {
  const last = data.runs.length - 1;
  if (state.set === "training") return [state.a ?? "0.first", state.b ?? `${last}.last`];
  const held = (run, where) => data.runs[run].measured[where] ? `${run}.${where}` : null;
  const a = last ? held(0, "after") ?? held(0, "answers") ?? "0.last" : held(0, "before") && held(0, "after") ? "0.before"
    : "0.first";
  const b = last ? held(last, "after") ?? held(last, "answers") ?? `${last}.last` : held(0, "before") && held(0, "after")
    ? "0.after" : "0.last";
  return [state.a ?? a, state.b ?? b];
}

function filtered(state, besides) {
  const [a, b] = chosenViews(state), words = (state.find ?? "").toLowerCase();
  const tests = {
    find: q => `${q.id}\n${q.question}\n${q.gold}`.toLowerCase().includes(words),
    flip: (q, ends) => FLIPS[state.flip]?.[1](ends) ?? true, set: q => isHeld(q) === (state.set === "held"),
    db: q => q.db === state.db, level: q => q.level === state.level, clause: q => q.clauses.includes(state.clause),
    tag: q => [a, b].some(view => seenIn(q, view)?.[6].includes(state.tag)),
  };
  const active = KEYS.filter(key => state[key] && key !== besides);
  return data.questions.filter(q => {
    const ends = [isRight(seenIn(q, a)), isRight(seenIn(q, b))];
    return (ends[0] !== undefined || ends[1] !== undefined) && active.every(key => tests[key](q, ends));
  });
}

const mark = seen => seen === undefined ? h("span", {class: "muted", title: "not seen there"}, "·")
  : h("span", {class: isRight(seen) ? "right" : "wrong", title: isRight(seen) ? "right" : "wrong"}, isRight(seen) ? "✓" : "✗",
    seen[5] > 1 && h("small", {}, ` ${seen[4]}/${seen[5]}`));

function questions(state) {
  const [a, b] = chosenViews(state), names = views();
  rows = filtered(state);
  const select = (key, label, values) => h("select", {"aria-label": label,
    onchange: event => { shownRows = PAGE; adjust({[key]: event.target.value}); }},
    h("option", {value: ""}, `any ${label}`), values.map(([value, text]) =>
      h("option", {value, selected: state[key] === value}, text)));
  const counted = (key, pick) => {
    const counts = new Map();
    for (const q of filtered(state, key)) for (const value of new Set(pick(q))) counts.set(value, (counts.get(value) ?? 0) + 1);
    return [...counts].filter(([value]) => value).sort((x, y) => y[1] - x[1]).map(([value, count]) =>
      [value, `${visible(key === "tag" ? asWords(value) : value).slice(0, 60)}${value.length > 60 ? "…" : ""} (${count})`]);
  };
  const view = (key, chosen) => h("select", {"aria-label": key === "a" ? "first of two" : "second of two",
    onchange: event => adjust({[key]: event.target.value})},
    [...names].map(([value, text]) => h("option", {value, selected: value === chosen}, text)));
  const base = filtered(state, "flip");
  const segments = Object.entries(FLIPS).map(([key, [label, test]]) =>
    h("button", {"aria-pressed": String(state.flip === key), "data-flip": key,
    onclick: () => { shownRows = PAGE; adjust({flip: state.flip === key ? null : key}); }},
    `${label} ${base.filter(q => test([isRight(seenIn(q, a)), isRight(seenIn(q, b))])).length}`));
  const search = h("input", {type: "search", id: "find", placeholder: "search question, id or gold query",
    value: state.find ?? "", "aria-label": "Search",
    oninput: event => { shownRows = PAGE; adjust({find: event.target.value}); }});
  const hasBoth = data.questions.some(isHeld) && !data.questions.every(isHeld);
  const place = document.activeElement?.id === "find" ? document.activeElement.selectionStart : null;
  fill($("questions"), 
    h("div", {class: "row"}, h("h2", {style: {margin: 0}}, "Questions"),
      h("span", {class: "muted small", id: "count"},
      `${plural(rows.length, "question")} of ${data.questions.length.toLocaleString("en")}`)),
    h("div", {class: "filters"}, h("span", {class: "row small muted"}, "compare", view("a", a), "with", view("b", b))),
    h("div", {class: "segments"}, segments),
    h("div", {class: "filters"}, search, hasBoth && select("set", "set",
      [["held", "held-out questions"], ["training", "training questions"]]),
      select("db", "database", counted("db", q => [q.db])), select("level", "difficulty", counted("level", q => [q.level])),
      select("clause", "clause", counted("clause", q => q.clauses)),
        select("tag", "tag", counted("tag", q => [a, b].flatMap(each => seenIn(q, each)?.[6] ?? []))),
      KEYS.some(key => state[key]) && h("button", {onclick: () => adjust(Object.fromEntries(KEYS.map(key => [key, null])))},
        "clear")),
    h("div", {class: "card", style: {padding: "0", overflow: "hidden"}},
      rows.length ? table(rows.slice(0, shownRows), a, b)
      : h("p", {class: "muted", style: {padding: "0 1rem"}}, "No question is left by these filters.")),
    rows.length > shownRows && h("p", {}, h("button", {onclick: () => { shownRows += 3 * PAGE; show(); }},
      `show more (${(rows.length - shownRows).toLocaleString("en")} left)`)));
  if (place !== null) { $("find").focus(); $("find").setSelectionRange(place, place); }
}

function table(some, a, b) {
  const lines = some.map(q => {
    const tags = [...new Set([seenIn(q, b), seenIn(q, a)].flatMap(seen => seen?.[6] ?? []))];
    return h("tr", {"data-id": q.id, onclick: event => { if (!event.target.closest("a")) go({q: q.id, na: null, nb: null}); }},
      h("td", {class: "mark"}, mark(seenIn(q, a)), a !== b && [h("span", {class: "muted"}, " → "), mark(seenIn(q, b))]),
      h("td", {}, h("a", {href: link({q: q.id, na: null, nb: null}), class: "text"}, brief(q.question || q.id))),
      [q.db, q.level, q.clauses.join(", ")].map((each, n) =>
        h("td", {class: `wide${n > 1 ? " small muted" : ""}`}, h("div", {class: "clip"}, brief(each)))),
      h("td", {class: "wide small"}, h("div", {class: "clip"}, tags.slice(0,
        3).map(tag => [h("span", {class: "chip tag"}, asWords(brief(tag))), " "]),
        tags.length > 3 && `+${tags.length - 3}`)));
  });
  const widths = ["6.2rem", null, "9rem", "6rem", "11rem", "14rem"];
  return h("table", {class: "list"}, h("colgroup", {}, widths.map((width, n) =>
    h("col", {class: n > 1 ? "wide" : "", style: width ? {width} : {}}))),
    h("thead", {}, h("tr", {}, ["verdict", "question", "database", "difficulty", "gold query has",
      "tags"].map((head, n) => h("th", {class: n > 1 ? "wide" : ""}, head)))), h("tbody", {}, lines));
}
