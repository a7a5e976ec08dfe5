// The verdict: how accurate, how sure, what changed, and of which run.

const card = (...inner) => h("div", {class: "card"}, inner);
const said = value => typeof value === "object" ? JSON.stringify(value) : String(value);
const settings = (rows, heads) =>
  table(heads, rows.map(([key, ...values]) => [h("code", {}, key), ...values.map(said)]));

function verdict() {
  const {runs, against: {runs: [base], differences}} = data, isOne = runs.length === 1, rows = runs.map(factsOf);
  const heads = Object.keys(rows[0]).slice(isOne ? 2 : 0).filter(head => rows.some(row => row[head] !== "–"));
  const kinds = runs.every(({kind}) => kind === "evaluation") ? "systems" : "runs";
  const title = isOne ? runs[0].name : `${runs.length} ${kinds} compared`, differing = Object.entries(data.differing);
  const measured = isOne ? Object.entries(placesOf(runs[0])) : data.alike.flatMap(overSeeds);
  document.title = visible(title);
  fill($("verdict"), h("h1", {}, title),
    data.answer.map((words, n) => h("p", {class: n ? "small" : "answer"}, words)),
    data.rules.length > 1 && h("div", {class: "row small muted"}, "judged by",
      select("rule", "rule", data.rules.map(rule => [rule, rule]), ruleOf())),
    h("div", {class: isOne ? "scores one" : "scores"},
      measured.length > 0 && card(h("h3", {}, "Execution accuracy"), intervals(measured),
      h("div", {class: "muted small"}, "from 0 to 100 %; bars and brackets: 95 % intervals"
        + (data.alike.some(({length}) => length > 1) ? ", of seeds from the lowest to the highest" : "")),
        data.apart.includes(ruleOf()) && h("p", {class: "note small"},
          `Not by one rule: not all of these are judged by ${ruleOf()} alike.`)),
      card(isOne ? table(null, heads.map(head => [h("td", {class: "muted"}, head), rows[0][head]]))
        : table(["run", ...heads], rows.map((row, n) => [runs[n].name, ...heads.map(head => row[head])])))),
    differences.length > 0 && [h("h2", {}, `Beside ${base.name}`), card(table(
      ["run", "gain in points [95 %]", "over databases", "more than chance?", "only the base right", "only this right"],
      differences.map(each => [`${each.run}, ${each.column.replace("/", " ")}`, gain(each), bounds(each.ci95_databases), chance(each.p), each.only_first ?? "–", each.only_second ?? "–"])))],
    !isOne && [h("h2", {}, "Settings that differ"), h("div", {class: "card scroll"}, differing.length ? settings(
      differing.map(([key, values]) => [key, ...values]), ["setting", ...runs.map(run => run.name)]) : "None.")],
    changes(), data.notes.map(line => h("p", {class: "note small"}, line)),
    runs.map(run => h("details", {class: "small"},
      h("summary", {}, `${isOne ? "" : `${run.name}: `}${run.command && "command, "}versions, settings`),
      run.command && h("pre", {class: "card"}, run.command),
      h("p", {}, Object.entries(run.versions).map(([name, version]) => `${name} ${said(version)}`).join(", ")),
      h("div", {class: "card scroll"}, settings(Object.entries(run.settings))))));
}

/** The rule that answers are judged by: the chosen one, or what counts in the runs. */
const ruleOf = () => data.rules.includes(address().rule) ? address().rule : data.rules[0];
/** The same where it is one of these, else their first. */
const ruleIn = rules => Object.hasOwn(rules, ruleOf()) ? ruleOf() : Object.keys(rules)[0];
/** Give what was measured of a run by place. */
const placesOf = run => Object.fromEntries(
  Object.entries(run.accuracy).map(([where, rules]) => [where, rules[ruleIn(rules)]]));

/** Name a configuration, with how many of its seeds are finished, and give these. */
function seedsOf(group) {
  const all = group.map(n => data.runs[n]), finished = all.filter(run => run.finished), [first] = all;
  const count = finished.length === all.length ? `${all.length} seeds`
    : `${finished.length || "none"} of ${all.length} seeds finished`;
  return {all, finished, label: all.length > 1 ? `${first.configuration} (${count})` : first.name};
}

/** Give the last accuracy of a configuration: of several finished seeds their mean, lowest and highest. */
function overSeeds(group) {
  const {finished, label} = seedsOf(group), last = finished.flatMap(run => Object.values(placesOf(run)).slice(-1));
  const means = last.map(({mean}) => mean);
  const seeds = {mean: average(...means), ci95: [Math.min(...means), Math.max(...means)]};
  return last.length || !finished.length ? [[label, last.length > 1 ? seeds : last[0]]] : [];
}

/** What is said of a run in a line, by heads. */
function factsOf(run, n) {
  const {kind, replies, failing, finished, result, gains, settings, numbers} = run, measured = placesOf(run);
  const [tests, ...stages] = ["run", "warm start", "reinforcement"].map(stage => gains[stage] ?? {}).map(rules => rules[ruleIn(rules)] ?? {});
  const {before} = measured, [last] = Object.values(measured).slice(-1), steps = numbers.step?.at(-1) ?? 0;
  const first = settings["train.steps"], second = "train.second_stage.steps"; // null for as many as the first
  const planned = first + (second in settings ? settings[second] ?? first : 0);
  const ends = {set: "held-out", a: `${n}.before`, b: `${n}.after`};
  const flip = (name, count) => h("a", {class: name, href: anew({...ends, flip: name, to: "questions"})},
    `${name === "right" ? "✓" : "✗"} ${count} questions`);
  return {
    before: before ? percent(before.mean) : "–",
    accuracy: last && finished ? mean(last) : "–",
    "gain in points": tests.ci95 ? gain(tests) : "–",
    "over databases": bounds(tests.ci95_databases),
    "by the warm start": stages[0].ci95 ? gain(stages[0]) : "–",
    "by reinforcement": stages[1].ci95 ? gain(stages[1]) : "–",
    "flipped to right": Number.isFinite(tests.only_second) ? flip("right", tests.only_second) : "–",
    "flipped to wrong": Number.isFinite(tests.only_first) ? flip("wrong", tests.only_first) : "–",
    "more than chance?": tests.ci95 ? chance(tests.p) : "–",
    "judged by": ruleIn(Object.values(run.accuracy).at(-1) ?? {}) ?? "–",
    "held-out questions": last ? last.questions.toLocaleString("en") : "–",
    "queries that fail": Object.values(failing).map(count => count.toLocaleString("en")).join(" → "),
    screened: screened(run.screening),
    replies: Object.keys(replies).length ? h("details", {class: "small"}, h("summary", {}, "counts"),
      Object.entries(replies).map(([where, line]) => h("div", {}, where === "answers" ? line : `${where}: ${line}`))) : "–",
    decoding: result.decode ?? "–",
    steps: kind === "evaluation" ? "–" : finished ? steps
      : `not finished: ${steps} of ${planned || "?"} steps so far`,
    "learned by": [["reward", "reward.kind"], ["algorithm", "train.algorithm.kind"]].filter(([, key]) => settings[key])
      .map(([name, key]) => `${name} ${settings[key]}`).join(", ") || "–",
    seed: settings.seed ?? "–",
    "time of the last start": result.seconds ? [duration(result.seconds), result.accelerator].filter(Boolean).join(", ") : "–",
  };
}

/** Show which shares of the screened questions teach, by level and database in a table to open. */
function screened({all, ...parts}) {
  if (!all) return "–";
  const kinds = ["never", "sometimes", "always"];
  const rows = Object.values(parts).flatMap(part => Object.entries(part));
  return [`${all.questions.toLocaleString("en")} questions: `,
    kinds.map(kind => `${percent(all[kind])} ${kind}`).join(", "), " right",
    h("details", {class: "small"}, h("summary", {}, "by level and database"), h("div", {class: "scroll"}, table(
      ["", "questions", ...kinds.map(kind => `${kind} right`), "of all answers"],
      rows.map(([name, part]) => [name, part.questions, ...[...kinds, "right"].map(kind => percent(part[kind]))]))))];
}

/** Show means with their intervals on one scale, from 0 to 100 %; what has none is not finished. */
const intervals = rows => rows.map(([name, each]) => {
  if (!each) return h("div", {class: "interval"}, h("span", {}, brief(name, 60)), h("b", {}, "not finished"));
  const [low, high] = each.ci95.map(bound => 100 * bound), over = each.ci95_databases;
  return h("div", {class: "interval"}, h("span", {}, brief(name, 60)), h("b", {}, mean(each)),
    h("div", {class: "scale"}, h("i", {style: {left: `${low}%`, width: `${high - low}%`}}),
      h("b", {style: {left: `${100 * each.mean}%`}})),
    over && h("span", {class: "over muted small"}, `over databases [${over.map(bound => (100 * bound).toFixed(1)).join(", ")}]`));
});

/** Where accuracy changed and which mistakes went away, from one place to another; of one place the shares. */
function changes() {
  const state = chosen({}), seen = filtered(state).filter(([, ends]) => ends.every(Boolean));
  const changed = seen.filter(([, [x, y]]) => x !== y), isPair = changed.length > 0;
  const pairs = isPair ? changed : state.set === "held-out" ? seen : [], isTwo = data.runs.length > 1;
  const nameOf = view => (data.views[view] ?? "").replace(/( learning| time seen|: evaluation)$/, "");
  const heads = isPair ? ["", nameOf(state.a), nameOf(state.b), "points"] : ["", nameOf(state.a)];
  /** Of each value of a facet the share of questions with it that are right, or of all that have it. */
  const part = (title, key, isTag) => {
    const found = new Map(), start = {ends: [0, 0], all: 0};
    for (const [q, ends] of pairs) for (const value of FACETS[key][1](q, ends)) {
      const {ends: [x, y], all} = found.get(value) ?? start;
      const [first, last] = ends.map(seen => isTag ? seen.tags.includes(value) : scoreOf(seen));
      found.set(value, {ends: [x + first, y + last], all: all + 1});
    }
    const share = ({ends, all}) => ends[1] / all, isHard = key === "db";
    const most = [...found].filter(([value, {all}]) => value && (!isHard || all > 2)).sort(([, x], [, y]) =>
      isHard ? share(x) - share(y) : y.all - x.all).slice(0, 8);
    return most.length > 0 && card(h("h3", {class: "muted"}, title), table(heads, most.map(([value, {ends, all}]) => {
      const [x, y] = ends.map(count => count / (isTag ? pairs.length : all));
      const colour = Math.abs(y - x) < .005 ? "muted" : y > x === !isTag ? "right" : "wrong";
      const href = anew({[key]: value, to: "questions"});
      const of = !isTag && h("span", {class: "muted small"}, ` ${all}`);
      return [[h("a", {href}, isTag ? asWords(value) : brief(value)), of],
        percent(x, 0), ...isPair ? [percent(y, 0), h("td", {class: colour}, points(y - x, 0))] : []];
    }), {class: "parts"}));
  };
  return pairs.length > 0 && [isTwo && h("h2", {}, `The ${plural(pairs.length, "question")} of both: ${
    [state.a, state.b].map(nameOf).join(" and ")}`), h("div", {class: "thirds"},
    part("Right, by difficulty", "level"), part("Right, by what the gold query has", "clause"),
    part("Right, by database, the hardest first", "db"),
    part(`Mistakes in all ${pairs.length.toLocaleString("en")} answers, by tag`, "tag", true))];
}
