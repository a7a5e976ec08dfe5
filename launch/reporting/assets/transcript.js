// One question: its groups side by side, and what was said in an episode.

const CLASSES = ["k", "s", "n"];

/** Cut a text where layers begin and end, and give every part the classes and styles over it. */
function paint(text, layers) {
  const cuts = new Set([0, text.length]);
  const inside = layers.filter(([from, to]) => from < to && from < text.length);
  for (const [from, to] of inside) { cuts.add(Math.max(0, from)); cuts.add(Math.min(to, text.length)); }
  const places = [...cuts].sort((x, y) => x - y), out = [], starts = [...inside].sort((x, y) => x[0] - y[0]);
  let open = [], next = 0;
  for (let n = 0; n + 1 < places.length; n++) {
    const at = places[n];
    while (next < starts.length && starts[next][0] <= at) open.push(starts[next++]);
    open = open.filter(layer => layer[1] > at);
    const part = text.slice(at, places[n + 1]);
    if (!open.length) { out.push(visible(part)); continue; }
    out.push(h("span", {class: open.map(layer => layer[2]).join(" "),
      title: open.map(layer => layer[3]).filter(Boolean).join("\n") || null,
      style: Object.assign({}, ...open.map(layer => layer[4] ?? {}))}, part));
  }
  return out;
}

/** The layers of a query's keywords, strings and numbers, from a place of a text on. */
function sqlLayers(sql, tokens, from = 0) {
  const flat = tokens[sql] ?? [], out = [];
  for (let n = 0; n < flat.length; n += 3) out.push([from + flat[n], from + flat[n] + flat[n + 1], CLASSES[flat[n + 2]]]);
  return out;
}

const sqlText = (sql, tokens, more = []) => h("div", {class: "sql"}, paint(sql, [...sqlLayers(sql, tokens), ...more]));

/** The words of one text that are not in the other, by their longest common sequence. */
function differences(one, other) {
  const words = text => [...text.matchAll(/[\p{L}\p{N}_.]+|'[^']*'|[^\s\p{L}\p{N}_]/gu)].slice(0, 600);
  const a = words(one), b = words(other), size = b.length + 1, best = new Uint16Array((a.length + 1) * size);
  const same = (x, y) => x[0].toLowerCase() === y[0].toLowerCase();
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--)
    best[i * size + j] = same(a[i], b[j]) ? 1 + best[(i + 1) * size + j + 1]
      : Math.max(best[(i + 1) * size + j], best[i * size + j + 1]);
  const gone = [[], []], add = (side, word) => gone[side].push([word.index, word.index + word[0].length, "changed",
    "not in the other"]);
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && same(a[i], b[j])) { i++; j++; }
    else if (j >= b.length || (i < a.length && best[(i + 1) * size + j] >= best[i * size + j + 1])) add(0, a[i++]);
    else add(1, b[j++]);
  }
  return gone;
}

const lastTurn = member => member?.turns.at(-1) ?? {};
const isMemberRight = member => member.correct ?? (lastTurn(member).correct && (lastTurn(member).kind ?? "answer") === "answer");
let visit = 0;

async function detail(state) {
  const own = ++visit, question = data.questions.find(each => each.id.toWellFormed() === state.q);
  if (!question) { fill($("detail"), h("p", {class: "note"}, `No question is called ${state.q}.`),
    h("a", {href: link({q: null})}, "All questions")); return; }
  rows = filtered(state);
  const at = rows.indexOf(question), names = views(), [a, b] = chosenViews(state);
  let sides = [["a", a], ["b", b]].map(([side, view]) => ({side, view, seen: seenIn(question, view)}));
  if (!sides.some(each => each.seen)) sides = [{side: "b",
    view: question.seen.map(each => `${each[0]}.${each[1]}`).at(-1)}].map(each => ({...each, seen: seenIn(question, each.view)}));
  const isSame = sides.length > 1 && sides[0].seen === sides[1].seen;
  if (isSame || sides.some(each => !each.seen)) sides = [sides.findLast(each => each.seen)];
  for (const each of sides) {
    const opened = await piece(each.seen[2]);
    each.group = opened.groups[each.seen[3]]; each.tokens = opened.tokens;
    const members = each.group.trajectories, asked = Number(state[`n${each.side}`] ?? NaN);
    each.order = members.map((_, n) => n).sort((x, y) =>
      (members[y].advantage ?? members[y].reward ?? 0) - (members[x].advantage ?? members[x].reward ?? 0));
    each.chosen = Number.isInteger(asked) && members[asked] ? asked : each.order[0];
    each.member = members[each.chosen];
  }
  if (own !== visit) return;
  const group = sides[0].group, tokens = sides[0].tokens;
  const finals = sides.map(each => lastTurn(each.member).sql ?? ""),
    changes = sides.length > 1 && finals.every(Boolean) ? differences(...finals) : [[], []];
  const step = by => { const to = rows[at + by]; if (to) go({q: to.id, na: null, nb: null}); };
  detail.step = step;
  const keep = [...$("detail").querySelectorAll("details[data-keep]")].filter(each => each.open).map(each => each.dataset.keep);
  fill($("detail"), 
    h("div", {class: "head"}, h("a", {href: link({q: null, na: null, nb: null, to: "questions"}), id: "back"},
      "← all questions"), h("span", {class: "grow"}),
      h("span", {class: "muted small"}, at >= 0 ? `${at + 1} of ${rows.length}` : "outside of the filters"),
      h("button", {onclick: () => step(-1), disabled: at <= 0, title: "Previous (k)"}, "← previous"),
        h("button", {onclick: () => step(1), disabled: at < 0 || at + 1 >= rows.length, title: "Next (j)"}, "next →")),
    h("h1", {}, question.question || question.id),
    h("p", {class: "facts small muted"}, [question.id, question.db && `database ${question.db}`, question.level,
      ...question.clauses].filter(Boolean).map(each => h("span", {class: "chip"}, each))),
    group.evidence && h("p", {class: "small muted"}, `Evidence: ${group.evidence}`),
    h("div", {class: "card"}, h("div", {class: "who"}, "gold query"),
      question.gold ? [sqlText(question.gold, tokens), goldResult(group)] : h("span", {class: "muted"}, "not recorded")),
    timeline(question, state, names, sides),
    h("div", {class: "panes", style: {marginTop: "1rem"}},
      sides.map((each, n) => pane(each, state, names, changes[n], sides.length > 1))));
  $("detail").dataset.shown = data.questions.indexOf(question);
  for (const name of keep) $("detail").querySelectorAll(`details[data-keep="${name}"]`).forEach(each => { each.open = true; });
}

/** Every time the question was seen, as a strip; a click puts it on the right. */
function timeline(question, state, names, sides) {
  if (question.seen.length < 2) return null;
  return h("div", {class: "row small", style: {marginTop: ".8rem"}}, h("span", {class: "muted"}, "seen"),
    question.seen.map(seen => {
    const key = `${seen[0]}.${seen[1]}`;
    return h("button", {"aria-pressed": String(sides.some(each => each.seen === seen)), title: "Show on the right",
      onclick: () => go({b: key, nb: null})}, `${names.get(key)} `, mark(seen));
  }));
}

function pane(side, state, names, changed, isPair) {
  const {member, group, tokens} = side, last = lastTurn(member), right = isMemberRight(member);
  const sql = last.sql ?? "";
  return h("section", {class: "pane card", style: {margin: 0}, "data-side": side.side, "data-view": side.view},
    h("div", {class: "row"}, h("h2", {style: {margin: 0}}, names.get(`${side.seen[0]}.${side.seen[1]}`) ?? side.view),
      h("span", {class: `${right ? "right" : "wrong"}`}, `${right ? "✓ right" : "✗ wrong"}`),
      group.trajectories.length > 1 && h("span", {class: "muted small"}, `one of ${group.trajectories.length}`),
      isPair && h("span", {class: "muted small"}, side.side === "a" ? "left of the comparison" : "right of the comparison")),
    group.trajectories.length > 1 && members(side, state),
    h("div", {}, h("div", {class: "who"}, "final query",
      changed.length > 0 && h("span", {}, "words that the other one lacks are ", h("span", {class: "changed"}, "marked"))),
      sql ? sqlText(sql, tokens, changed) : h("span", {class: "wrong"}, "no query")),
    earned(member), legend(member, state), member.turns.map((turn, n) => turnOf(turn, n, side, state)));
}

function members(side, state) {
  const all = side.group.trajectories, best = Math.max(...all.map(each => Math.abs(each.advantage ?? 0)), 1e-9);
  const count = all.filter(isMemberRight).length;
  const note = all.every(each => each.advantage === null || each.advantage === undefined)
    && typeof side.seen[1] === "number" ? "; left out of the update: this group gave no signal" : "";
  return h("div", {}, h("div", {class: "who"}, `group of ${all.length}, ${count} right, by advantage${note}`),
    h("div", {class: "group"}, side.order.map(n => {
      const one = all[n], value = one.advantage ?? 0;
      return h("button", {class: "member", "aria-pressed": String(n === side.chosen), "data-member": n,
        onclick: () => adjust({[`n${side.side}`]: n})},
        h("b", {class: isMemberRight(one) ? "right" : "wrong"}, isMemberRight(one) ? "✓ " : "✗ "),
          one.reward !== undefined && `reward ${number(one.reward)}`, h("br"),
        h("span", {class: "muted"}, one.advantage === null || one.advantage === undefined
          ? plural(one.turns.length, "reply").replace("replys", "replies") : `advantage ${number(one.advantage)}`),
        bar(value / best), h("div", {class: "sql"}, brief(lastTurn(one).sql || lastTurn(one).reply || "no query")));
    })));
}

/** A bar from the middle: to the right for more than 0, to the left for less. */
function bar(share) {
  const width = 50 * Math.min(1, Math.abs(share));
  return svg("svg", {viewBox: "0 0 100 6", width: "100%", height: 6, preserveAspectRatio: "none", "aria-hidden": "true"},
    svg("rect", {x: 0, y: 2.5, width: 100, height: 1, fill: "var(--line)"}),
    svg("rect", {x: share < 0 ? 50 - width : 50, y: 0, width, height: 6, fill: share < 0 ? "var(--wrong)" : "var(--right)"}));
}

function earned(member) {
  const parts = Object.entries(member.parts ?? {}).filter(([name, value]) => name !== "total" && value !== 0);
  if (member.reward === undefined) return null;
  return h("div", {class: "small"}, h("b", {}, `reward ${number(member.reward)}`),
    parts.length > 0 && h("span", {class: "muted"}, " = "),
    parts.map(([name, value], n) => h("span", {class: "muted"}, n ? " + " : "", `${asWords(name)} ${number(value)}`)),
    member.advantage !== null && member.advantage !== undefined && h("span", {}, ` · advantage ${number(member.advantage)}`),
      member.versions && h("span", {class: "muted"}, ` · sampled by weights ${[...new Set(member.versions)].join(" to ")}`),
    member.ended === "budget" && h("span", {class: "wrong"}, " · ended by the token limit"));
}

// Credit and tokens share one scale: blue and a solid line above 0, orange and a broken line below.
const tint = (value, most) =>
  ({background: `color-mix(in srgb, var(${value < 0 ? "--wrong" : "--right"}) ${Math.round(8 + 34 * Math.min(1, Math.abs(value) / (most || 1)))}%, transparent)`});
const TOKENS = {advantage: "advantage", gap: "log-probability gap, learner less sampler",
  sampler: "log-probability of the sampler", learner: "log-probability of the learner", version: "weight version"};

function legend(member, state) {
  const hasTokens = member.turns.some(turn => turn.tokens), hasSpans = member.spans?.length;
  if (!hasTokens && !hasSpans) return null;
  const values = [...new Set((member.spans ?? []).map(span => span[3]))].sort((x, y) => x - y).slice(0, 8);
  const most = Math.max(...values.map(Math.abs), 1e-9);
  return h("div", {class: "row"}, hasSpans && h("span", {class: "scale"}, "credit of clauses:", values.map(value =>
      h("span", {class: `credit ${value < 0 ? "minus" : "plus"}`, style: tint(value, most)}, number(value))),
      h("span", {}, "(below 0 blamed, above 0 rewarded)")),
    hasTokens && h("label", {class: "scale"}, "tokens:",
      h("select", {"aria-label": "Token layer", onchange: event => adjust({tok: event.target.value})},
      h("option", {value: ""}, "off"), Object.entries(TOKENS).map(([key, label]) =>
      h("option", {value: key, selected: state.tok === key}, label)))));
}

function halves(text) {
  const bytes = Uint8Array.from(atob(text), each => each.charCodeAt(0)), view = new DataView(bytes.buffer), out = [];
  for (let n = 0; n < bytes.length; n += 2) {
    const bits = view.getUint16(n, true), exponent = bits >> 10 & 31, fraction = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
    out.push(sign * (exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024)
      : 2 ** -14 * fraction / 1024));
  }
  return out;
}

function tokenLayers(turn, kind) {
  if (!turn.tokens || !TOKENS[kind]) return [];
  const {ends, versions} = turn.tokens, [masked, advantage, sampler, learner] = ["mask", "advantage", "sampler",
    "learner"].map(key => halves(turn.tokens[key]));
  const version = n => versions[n] ?? versions[0], values = {advantage, sampler, learner,
    gap: learner.map((value, n) => value - sampler[n]), version: ends.map((_, n) => version(n) - versions[0])}[kind];
  const most = Math.max(...values.map(Math.abs).filter(Number.isFinite), 1e-9);
  return ends.map((end, n) => [n ? ends[n - 1] : 0, end, `token credit ${values[n] < 0 ? "minus" : "plus"}`,
    `${masked[n] ? "trained on" : "masked"}; advantage ${number(advantage[n])}; sampler ${number(sampler[n])}, learner ${number(learner[n])}, gap ${number(learner[n] - sampler[n])}; weights ${version(n)}`, tint(values[n], most)]);
}

function turnOf(turn, n, side, state) {
  const reply = turn.reply ?? "", sql = turn.sql ?? "", {member, group, tokens} = side;
  const first = n ? turn.observation : group.prompt, place = sql ? reply.indexOf(sql) : -1;
  const spans = (member.spans ?? []).filter(span => span[0] === n),
    most = Math.max(...(member.spans ?? []).map(span => Math.abs(span[3])), 1e-9);
  const layers = [...(place >= 0 ? sqlLayers(sql, tokens, place) : []), ...(state.tok ? tokenLayers(turn, state.tok)
    : spans.map(span => [span[1], span[2], `credit ${span[3] < 0 ? "minus" : "plus"}`, `credit ${number(span[3])}`,
      tint(span[3], most)]))];
  const kind = {call: "call of the tool", bad_call: "call that cannot be read"}[turn.kind] ?? "answer";
  return h("div", {class: "turn", "data-turn": n},
    first && h("div", {class: "said seen"}, h("div", {class: "who"}, n ? "what came back" : "prompt",
      h("span", {}, "not trained on")), n || first.length < 200 ? h("pre", {}, first.replace(/^\n+/, ""))
      : h("details", {"data-keep": "prompt"}, h("summary", {}, `${first.length.toLocaleString("en")} characters`),
      h("pre", {}, first))),
    h("div", {class: "said wrote"}, h("div", {class: "who"}, `reply ${n + 1}`, h("span", {}, kind),
      turn.finish === "length" && h("span", {class: "wrong"}, "cut by the token limit")),
      reply ? h("pre", {}, paint(reply, layers)) : h("span", {class: "muted"}, "the text of the reply was not recorded"),
      reply && sql && place < 0 && h("div", {}, h("div", {class: "who"}, "its query"), sqlText(sql, tokens))),
    h("div", {class: "outcome"}, outcome(turn), results(turn, side)));
}

function outcome(turn) {
  const status = turn.result?.status, ran = status === "ok";
  const parts = Object.entries(turn.parts ?? {});
  return h("div", {class: "row small"}, turn.correct ? h("b", {class: "right"}, "✓ right")
    : h("b", {class: "wrong"}, !status ? "✗ wrong" : ran ? "✗ runs, wrong result"
    : `✗ ${({error: "fails", timeout: "takes too long", too_large: "too large", denied: "not allowed"})[status] ?? status}`),
    turn.result?.message && h("span", {class: "wrong"}, turn.result.message),
      (turn.tags ?? []).map(tag => h("span", {class: "chip tag"}, asWords(tag))),
    parts.map(([name, value]) => h("span", {class: "chip"}, `${name} ${number(value)}`)));
}

const cellText = cell => cell === null ? h("span", {class: "null"}, "NULL") : typeof cell === "object"
  ? cell.number ?? `x'${cell.blob}'` : String(cell);

/** Pair the rows of two results: equal rows, then those that share most cells, then what is left. */
function align(gold, own, inOrder) {
  const pairs = [], left = own.map((row, n) => ({row, n, key: JSON.stringify(row)})), rest = [];
  gold.forEach((row, n) => {
    const key = JSON.stringify(row), at = left.findIndex(each => each.key === key);
    if (at < 0) rest.push({row, n}); else { const [found] = left.splice(at, 1);
      pairs.push({gold: row, own: found.row, at: n, moved: inOrder && found.n !== n}); }
  });
  for (const {row, n} of rest) {
    const shared = left.map(each => each.row.filter((cell, m) => m < row.length
      && JSON.stringify(cell) === JSON.stringify(row[m])).length);
    const best = shared.length ? shared.indexOf(Math.max(...shared)) : -1;
    if (best >= 0 && (shared[best] > 0 || gold.length === 1 && own.length === 1)) pairs.push({gold: row,
      own: left.splice(best, 1)[0].row, at: n}); else pairs.push({gold: row, own: null, at: n});
  }
  return [...pairs.sort((x, y) => x.at - y.at), ...left.map(each => ({gold: null, own: each.row}))];
}

function results(turn, side) {
  const {group} = side, rule = data.runs[side.seen[0]].settings["env.match"];
  const own = turn.result?.columns ? turn.result : null, gold = group.gold_result?.columns ? group.gold_result : null;
  if (!own) return null;
  const isSame = gold && JSON.stringify(gold.rows) === JSON.stringify(own.rows);
  if (!gold || turn.correct && (isSame || !rule)) return h("div", {class: "results"},
    resultTable(isSame ? "result, equal to the gold's" : "result", own, own.rows.map(row => ({own: row})), "own", []));
  const pairs = align(gold.rows, own.rows, /\border\s+by\b/i.test(group.gold)),
    both = pairs.filter(each => each.gold && each.own);
  const width = Math.max(gold.columns.length, own.columns.length), wrong = [];
  for (let n = 0; n < width; n++) wrong.push(n >= gold.columns.length || n >= own.columns.length || both.length > 0
    && both.every(each => JSON.stringify(each.gold[n]) !== JSON.stringify(each.own[n])));
  const count = {missing: pairs.filter(each => !each.own).length, extra: pairs.filter(each => !each.gold).length,
    moved: pairs.filter(each => each.moved).length,
    changed: both.filter(each => JSON.stringify(each.gold) !== JSON.stringify(each.own)).length,
    columns: wrong.filter(Boolean).length};
  const words = [turn.correct && `right by the rule of this run, env.match=${rule}`, count.missing && plural(count.missing, "row") + " missing",
    count.extra && plural(count.extra, "row") + " too many", count.moved && plural(count.moved, "row") + " in another order",
    count.changed && plural(count.changed, "row") + " with other values",
    count.columns && `${plural(count.columns, "column")} wrong in every row`].filter(Boolean);
  return [h("div", {class: "small muted"}, words.join(", ") || "equal in what is recorded"),
    h("div", {class: "results"}, resultTable("gold", gold, pairs, "gold", wrong),
      resultTable("prediction", own, pairs, "own", wrong))];
}

function goldResult(group) {
  const gold = group.gold_result;
  if (!gold) return null;
  if (!gold.columns) return h("p", {class: "wrong small"}, `The gold query does not run: ${gold.message}`);
  return h("details", {class: "small", "data-keep": "gold"}, h("summary", {}, `its result, ${plural(gold.count, "row")}`),
    resultTable("gold", gold, gold.rows.map(row => ({gold: row})), "gold", []));
}

function resultTable(title, result, pairs, side, wrong) {
  const other = side === "gold" ? "own" : "gold", isBeside = pairs.some(each => "gold" in each && "own" in each);
  const lines = pairs.map(each => {
    const row = each[side], lacks = isBeside && !each[other];
    if (!row) return h("tr", {}, h("td", {class: "sign"}, " "),
      h("td", {colspan: Math.max(1, result.columns.length), class: "null"}, " "));
    const sign = !isBeside ? "" : lacks ? (side === "gold" ? "−" : "+") : each.moved ? "↕" : "";
    return h("tr", {class: lacks ? (side === "gold" ? "missing" : "extra") : ""},
      isBeside && h("td", {class: "sign", title: lacks ? (side === "gold" ? "missing in the prediction"
      : "not in the gold result") : each.moved ? "at another place" : null}, sign),
      row.map((cell, n) => h("td", {class: "cell" + (isBeside && !lacks
        && JSON.stringify(cell) !== JSON.stringify(each[other]?.[n]) ? " differs" : "")}, cellText(cell))));
  });
  const more = [result.count > result.rows.length && `first ${result.rows.length} of ${result.count.toLocaleString("en")} rows`,
    result.width > result.columns.length
    && `first ${result.columns.length} of ${result.width.toLocaleString("en")} columns`].filter(Boolean).join(", ");
  return h("div", {class: "result"}, h("div", {class: "who"}, title, h("span", {}, more || plural(result.count, "row"))),
    h("div", {class: "scroll"}, h("table", {},
    h("thead", {}, h("tr", {}, isBeside && h("th"),
      result.columns.map((name, n) => h("th", {class: isBeside && wrong[n] ? "differs" : "", scope: "col"}, name)))),
      h("tbody", {}, lines))));
}
