// The table of questions, and its filters.

// How a question can stand at two places, and of those what there is at one.
const FLIPS = { // of one run at two places, of two systems, of one place
  right: ["flipped to right", "only the second is right"], wrong: ["flipped to wrong", "only the first is right"],
  both: ["right in both", "both are right", "right"], neither: ["wrong in both", "both are wrong", "wrong"],
};
/** What questions are filtered by: a label, and the values of a question with what was seen of it at two places. */
const FACETS = {
  flip: ["flip", (_, ends) => {
    const [x, y] = ends.map(seen => seen && isRight(seen));
    return ends.includes(undefined) ? [] : [x && y ? "both" : y ? "right" : x ? "wrong" : "neither"];
  }],
  set: ["set", q => [q.set]],
  db: ["database", q => [q.db]],
  level: ["difficulty", q => [q.level]],
  clause: ["clause", q => q.clauses],
  tag: ["tag", (_, ends) => [...new Set(ends.flatMap(seen => seen?.tags ?? []))]],
};
const PAGE = 150;

/** Give the address with what it leaves open: held-out questions first, before and after, or of two runs. */
function chosen(state) {
  const last = data.runs.length - 1, [first] = data.questions, set = state.set ?? first?.set;
  const [a, b] = [last ? "0.last" : "0.first", `${last}.last`].map(view =>
    set === "held-out" && seenIn(first, view)?.view || view);
  return {set, a, b, ...state};
}

/** Give what was seen of a question at a place, `run.where`; the first and the last of a run are places too. */
function seenIn(question, view) {
  const [run, where] = view.split("."), own = question.seen.filter(seen => seen.view.startsWith(`${run}.`));
  return {first: own[0], last: own.at(-1)}[where] ?? own.find(seen => seen.view === view);
}

/** By the chosen rule, where there are verdicts; of a group most answers have to be right. */
const isRight = seen => (entry(seen.scores ?? {}, ruleOf()) ?? seen.right / seen.total) > .5;
/** The score by the chosen rule, which may be a share; without one, whether it is right. */
const scoreOf = seen => entry(seen.scores ?? {}, ruleOf()) ?? isRight(seen);
const verdictOf = right => h("b", {class: right ? "right" : "wrong"}, right ? "✓ right" : "✗ wrong");
const mark = seen => seen ? h("b", {class: isRight(seen) ? "right" : "wrong"}, isRight(seen) ? "✓" : "✗",
  seen.total > 1 && h("small", {}, ` ${seen.right}/${seen.total}`)) : h("span", {title: "not seen there"}, "·");

/** Find the questions that the filters leave, but for one of these, with what was seen of each. */
function filtered(state, besides) {
  const active = Object.entries(FACETS).filter(([name]) => state[name] && name !== besides);
  const words = (state.find ?? "").toLowerCase();
  return data.questions.map(q => [q, [seenIn(q, state.a), seenIn(q, state.b)]]).filter(([q, ends]) =>
    ends.some(Boolean) && active.every(([name, [, valuesOf]]) => valuesOf(q, ends).includes(state[name]))
      && `${q.id}\n${q.question}\n${q.gold_sql}`.toLowerCase().includes(words));
}

function questions(state) {
  const isPair = state.a !== state.b, isOneRun = Number.parseInt(state.a) === Number.parseInt(state.b), rows = filtered(state), views = Object.entries(data.views), limit = PAGE * (state.more ?? 1);
  /** Count the questions that each value of a facet would leave. */
  const counts = name => {
    const found = Object.create(null);
    for (const [q, ends] of filtered(state, name))
      for (const value of FACETS[name][1](q, ends)) found[value] = (found[value] ?? 0) + 1;
    return found;
  };
  const facet = name => {
    const [label] = FACETS[name], found = Object.entries(counts(name)).sort(([, x], [, y]) => y - x);
    const options = found.filter(([value]) => value).map(([value, count]) =>
      [value, `${brief(name === "tag" ? asWords(value) : value, 60)} (${count})`]);
    return select(name, label, name === "set" ? options : [["", `any ${label}`], ...options], state[name]);
  };
  const flips = counts("flip"), caret = document.activeElement.id === "find" && document.activeElement.selectionStart;
  fill($("questions"),
    h("div", {class: "row"}, h("h2", {}, "Questions"), h("span", {class: "muted small", id: "count"},
      `${plural(rows.length, "question")} of ${data.questions.length.toLocaleString("en")}`)),
    views.length > 1 && h("div", {class: "row small muted"}, "compare", select("a", "first of two", views, state.a),
      "with", select("b", "second of two", views, state.b)),
    h("div", {class: "row"}, Object.entries(FLIPS).map(([name, words]) => [name, words[!isPair ? 2 : isOneRun ? 0 : 1]])
      .filter(([, label]) => label).map(([name, label]) => h("a", {class: "button", "data-flip": name,
        "aria-current": state.flip === name ? "true" : null, href: link({flip: state.flip === name ? null : name})},
      `${label} ${flips[name] ?? 0}`))),
    h("div", {class: "row filters"}, h("input", {type: "search", id: "find", value: state.find ?? "",
      placeholder: "search question, id or gold query", oninput: event => { // a letter is no step back
        history.replaceState(null, "", link({find: event.target.value}));
        show();
      }}), Object.keys(FACETS).slice(1).map(facet), h("a", {class: "button", href: anew({to: "questions"})}, "clear")),
    h("div", {class: "card list"}, table(["verdict", "question", "database", "difficulty", "gold query has", "tags"],
      rows.slice(0, limit).map(([q, ends]) => rowOf(q, ends, state)))),
    rows.length > limit && h("a", {class: "button", href: link({more: limit / PAGE + 3})},
      `show more (${(rows.length - limit).toLocaleString("en")} left)`));
  if (caret === false) return;
  $("find").focus();
  $("find").setSelectionRange(caret, caret);
}

const rowOf = (q, ends, state) => h("tr", {"data-id": q.id},
  h("td", {class: "mark"}, mark(ends[0]), state.a !== state.b && [" → ", mark(ends[1])]),
  h("td", {}, h("a", {href: link({q: q.id, na: null, nb: null})}, brief(q.question || q.id))),
  [q.db, q.level, q.clauses.join(", ")].map(text => h("td", {class: "muted small"}, h("div", {}, brief(text)))),
  h("td", {}, h("div", {}, FACETS.tag[1](q, ends).map(tag => h("span", {class: "chip"}, asWords(brief(tag)))))));
