// One question: its groups side by side, and what was said in an episode.

const who = (...words) => h("div", {class: "who"}, words.map(each => each && h("span", {}, each)));

/** Cut a text where layers begin and end, and give every part the classes, styles and titles over it. */
function paint(text, layers) {
  const waiting = layers.filter(({from, to}) => from < to && from < text.length).sort((x, y) => y.from - x.from);
  const ends = waiting.flatMap(({from, to}) => [Math.max(from, 0), Math.min(to, text.length)]);
  const places = [...new Set([0, text.length, ...ends])].sort((x, y) => x - y);
  let open = [];
  return places.slice(1).map((to, n) => {
    while (waiting.length && waiting.at(-1).from <= places[n]) open.push(waiting.pop());
    open = open.filter(layer => layer.to > places[n]);
    const part = text.slice(places[n], to), title = open.map(layer => layer.title).filter(Boolean).join("\n") || null;
    return open.length ? h("span", {class: open.map(layer => layer.class).join(" "), title,
      style: Object.assign({}, ...open.map(layer => layer.style))}, part) : part;
  });
}

/** The layers of a query's keywords, strings and numbers, from a place of a text on. */
const sqlLayers = (sql, place = 0) => [...sql.matchAll(SQL)].map(({index, 0: {length}, groups}) =>
  ({from: place + index, to: place + index + length, class: ["s", "n", "k"].find(kind => groups[kind]) ?? ""}));
const KEYWORDS = "all and as asc avg between by case cast count cross desc distinct else end except exists from full " +
  "group having in inner intersect is join left like limit max min not null offset on or order outer over partition " +
  "recursive right select sum then union using values when where with";
const SQL = new RegExp(`(?<s>'(?:[^']|'')*')|"[^"]*"|\\b(?<n>\\d+(?:\\.\\d+)?)\\b|\\b(?<k>${
  KEYWORDS.replaceAll(" ", "|")})\\b`, "gi");
const sqlText = (sql, marks = []) => h("div", {class: "sql"}, paint(sql, [...sqlLayers(sql), ...marks]));

/** Mark the words of each of two queries that are not in the other, by their longest common sequence. */
function differences(one, other) {
  const word = /[\p{L}\p{N}_.]+|'[^']*'|[^\s\p{L}\p{N}_]/gu, found = [[], []];
  const [a, b] = [one, other].map(text => [...text.matchAll(word)].slice(0, 600));
  const isEqual = (i, j) => a[i][0].toLowerCase() === b[j][0].toLowerCase();
  const best = Array.from({length: a.length + 1}, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--)
    best[i][j] = isEqual(i, j) ? 1 + best[i + 1][j + 1] : Math.max(best[i + 1][j], best[i][j + 1]);
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    if (i < a.length && j < b.length && isEqual(i, j)) [i, j] = [i + 1, j + 1];
    else if (j === b.length || (i < a.length && best[i + 1][j] >= best[i][j + 1])) found[0].push(a[i++]);
    else found[1].push(b[j++]);
  }
  return found.map(words => words.map(({index, 0: {length}}) => ({from: index, to: index + length, class: "changed"})));
}

const lastTurn = member => member.turns.at(-1) ?? {};
/** Open what was seen of a question at two places; one where it is the same, or not seen at the other. */
function sidesOf(question, state) {
  const found = [["a", state.a], ["b", state.b]].map(([side, view]) => ({side, seen: seenIn(question, view)}));
  const sides = found.filter(({seen}, n) => seen && seen !== found[n + 1]?.seen);
  if (!sides.length) sides.push({side: "b", seen: question.seen.at(-1)});
  return Promise.all(sides.map(async each => {
    const {groups} = await unpack(`piece${each.seen.piece}`), group = groups[each.seen.at];
    const all = group.trajectories, worth = n => all[n].advantage ?? all[n].reward ?? 0;
    const order = [...all.keys()].sort((x, y) => worth(y) - worth(x));
    const at = order.find(n => String(n) === state[`n${each.side}`]) ?? order.find(n => n === group.chosen) ?? order[0];
    return {...each, group, order, at, member: all[at]};
  }));
}

async function detail(id) {
  const here = location.hash, question = data.questions.find(each => each.id.toWellFormed() === id);
  const home = h("a", {id: "back", href: link({q: null, na: null, nb: null, to: "questions"})}, "← all questions");
  if (!question) return fill($("detail"), h("p", {class: "note"}, `No question is called ${id}.`), home);
  const state = chosen({...address(), set: question.set});
  const sides = await sidesOf(question, state), [{group}] = sides;
  if (here !== location.hash) return null; // another one is looked at by now
  const rows = filtered(state).map(([each]) => each), at = rows.indexOf(question);
  const finals = sides.map(({member}) => lastTurn(member).sql), isPair = finals.length > 1 && finals.every(Boolean);
  const marks = isPair ? differences(...finals) : [];
  const step = (id, by, words) => h("a", {id, class: "button",
    href: at >= 0 && rows[at + by] ? link({q: rows[at + by].id, na: null, nb: null}) : null}, words);
  return fill($("detail"),
    h("div", {class: "row"}, home, h("span", {class: "grow"}),
      h("span", {class: "muted small"}, at < 0 ? "outside of the filters" : `${at + 1} of ${rows.length}`),
      step("previous", -1, "← previous"), step("next", 1, "next →")),
    h("h1", {}, question.question || question.id),
    h("p", {class: "row"}, [question.id, question.db && `database ${question.db}`, question.level, ...question.clauses]
      .map(each => each && h("span", {class: "chip"}, each))),
    group.evidence && h("p", {class: "small muted"}, `Evidence: ${group.evidence}`),
    h("div", {class: "card"}, who("gold query"), question.gold_sql ? sqlText(question.gold_sql) : "not recorded",
      goldResult(group.gold_result)),
    question.seen.length > 1 && h("div", {class: "row small muted"}, "seen", question.seen.map(seen =>
      h("a", {class: "button", title: "Show on the right", href: link({b: seen.view, nb: null}), "aria-current":
        sides.some(each => each.seen === seen) ? "true" : null}, data.views[seen.view], " ", mark(seen)))),
    h("div", {class: "panes"}, sides.map((side, n) => pane(side, marks[n]))));
}

const pane = (side, marks) => h("section", {class: "pane card"},
  h("div", {class: "row"}, h("h2", {}, data.views[side.seen.view]), verdictOf(side.member.correct)),
  side.order.length > 1 && members(side),
  who("final query", marks && ["words that the other one lacks are ", h("span", {class: "changed"}, "marked")]),
  sqlText(lastTurn(side.member).sql || "no query", marks),
  earned(side.member), legend(side.member), side.member.turns.map((turn, n) => turnOf(turn, n, side)));

/** The trajectories of a group, side by side. */
function members({group: {trajectories: all}, order, at, side}) {
  const most = largest(all.map(each => each.advantage ?? 0));
  const isTrained = all.some(each => Number.isFinite(each.advantage));
  const by = isTrained ? "by advantage" : "reward" in all[0] ? "by reward; left out of the update" : "";
  return [who(`group of ${all.length}, ${all.filter(each => each.correct).length} right`, by),
    h("div", {class: "group"}, order.map(n => {
      const each = all[n], share = 50 * (each.advantage ?? 0) / most, {sql, reply} = lastTurn(each);
      return h("a", {class: "member", "aria-current": n === at ? "true" : null, href: link({[`n${side}`]: n})},
        verdictOf(each.correct), Number.isFinite(each.reward) && ` reward ${number(each.reward)}`,
        isTrained && [` advantage ${number(each.advantage)}`, h("div", {class: "bar"},
          h("i", {class: share < 0 ? "minus" : "plus",
            style: {width: `${Math.abs(share)}%`, left: `${50 + Math.min(0, share)}%`}}))],
        h("div", {class: "sql"}, brief(sql || reply || "no query")));
    }))];
}

function earned({reward, parts = {}, advantage, versions, ended}) {
  const paid = Object.entries(parts).filter(([name, value]) => name !== "total" && value !== 0);
  return Number.isFinite(reward) && h("div", {class: "small muted"}, h("b", {}, `reward ${number(reward)}`),
    paid.length > 0 && ` = ${paid.map(([name, value]) => `${asWords(name)} ${number(value)}`).join(" + ")}`,
    Number.isFinite(advantage) && ` · advantage ${number(advantage)}`,
    versions && ` · sampled by weights ${[...new Set(versions)].join(" to ")}`,
    ended === "budget" && " · ended by the token limit");
}

// Credit: blue and a solid line above 0, orange and a broken line below.
const largest = values => Math.max(...values.map(Math.abs).filter(Number.isFinite), 1e-9);
function credit(value, most) {
  const color = value < 0 ? "--wrong" : "--right", share = Math.round(6 + 22 * Math.min(1, Math.abs(value) / most));
  return {class: `credit ${value < 0 ? "minus" : "plus"}`,
    style: {background: `color-mix(in srgb, var(${color}) ${share}%, #0000)`}};
}
function legend({spans = []}) {
  const values = [...new Set(spans.map(span => span[3]))].sort((x, y) => x - y).slice(0, 8), most = largest(values);
  return values.length > 0 && h("div", {class: "row small muted"}, "credit of clauses:", values.map(value =>
    h("span", credit(value, most), number(value))), "(above 0 rewarded, below 0 punished)");
}

const ENDS = {length: "cut by the token limit", failed: "the endpoint gave no answer",
  too_long: "the prompt is too long"};
const KINDS = {call: "call of the tool", bad_call: "call that cannot be read"};
const ENDINGS = {ok: "runs, wrong result", error: "fails", timeout: "takes too long", too_large: "too large",
  denied: "not allowed"};

function turnOf(turn, n, {member: {spans = []}, group, seen}) {
  const {reply = "", sql = "", place = -1, result, correct} = turn;
  const observed = (n ? turn.observation : group.prompt) ?? "", most = largest(spans.map(span => span[3]));
  // Places count characters, of which JavaScript counts some twice.
  const at = count => Array.from(reply).slice(0, count).join("").length;
  const layers = spans.filter(span => span[0] === n).map(([, from, to, value]) =>
    ({from: at(from), to: at(to), title: `credit ${number(value)}`, ...credit(value, most)}));
  return h("div", {class: "turn"},
    observed && h("details", {class: "said seen", open: n || observed.length < 200 ? "" : null},
      h("summary", {}, n ? "what came back" : "prompt", `, not trained on: ${plural(observed.length, "character")}`),
      h("pre", {}, observed.trim())),
    h("div", {class: "said wrote"},
      who(`reply ${n + 1}`, entry(KINDS, turn.kind) ?? "answer", entry(ENDS, turn.finish)),
      h("pre", {}, reply ? paint(reply, [...place < 0 ? [] : sqlLayers(sql, at(place)), ...layers])
        : "the text of the reply was not recorded")),
    h("div", {class: "row small"}, correct || !result ? verdictOf(correct)
      : h("b", {class: "wrong"}, `✗ ${entry(ENDINGS, result.status) ?? result.status}`),
    result?.message && h("span", {class: "wrong"}, result.message),
    (turn.tags ?? []).map(tag => h("span", {class: "chip"}, asWords(tag)))),
    result?.columns && results(turn, group, seen.rule ?? ownRule(data.runs[Number.parseInt(seen.view)])),
    turn.witness && witness(turn.witness));
}
