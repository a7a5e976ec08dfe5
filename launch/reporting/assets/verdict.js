// The verdict: how accurate, how sure, what changed, and of which run.

function verdict() {
  const {runs} = data, isOne = runs.length === 1, title = isOne ? runs[0].name : `${runs.length} runs compared`;
  document.title = visible(title);
  fill($("verdict"), h("h1", {}, title), isOne ? one(runs[0]) : several(runs), changes(),
    data.notes.map(line => h("p", {class: "note small"}, line)),
    runs.map(run => h("details", {class: "small"},
      h("summary", {}, `${isOne ? "" : `${run.name}: `}command, versions, settings`),
      run.command && h("pre", {class: "card"}, run.command),
      h("p", {class: "facts"}, Object.entries(run.versions).map(([name, version]) =>
        h("span", {}, `${name} ${said(version)}`))),
      h("div", {class: "scroll card"}, settings(Object.entries(run.settings))))));
}

const said = value => typeof value === "object" ? JSON.stringify(value) : String(value);
const settings = (rows, heads) =>
  table(heads, rows.map(([key, ...values]) => [h("code", {}, key), ...values.map(said)]));

function one(run) {
  const {measured, result, tests} = run, steps = run.numbers.step?.at(-1) ?? 0, shown = Object.entries(measured);
  const known = Object.entries({"reward.kind": "reward", "train.algorithm.kind": "algorithm", seed: "seed"});
  const facts = [
    run.kind === "evaluation" ? `decoding ${result.decode ?? "of a file"}`
      : result.questions ? plural(steps, "step")
        : `not finished: ${steps} of ${run.settings["train.steps"] ?? "?"} steps so far`,
    shown.length > 0 && plural(shown.at(-1)[1].questions, "held-out question"),
    ...known.map(([key, word]) => key in run.settings && `${word} ${run.settings[key]}`),
    result.seconds && duration(result.seconds), result.accelerator,
  ];
  const flip = (kind, count) => h("a", {href: `#flip=${kind}&to=questions`},
    h("b", {class: kind}, `${kind === "right" ? "✓" : "✗"} ${count}`), h("span", {class: "small"}, `flipped to ${kind}`));
  return [h("p", {class: "facts muted"}, facts.map(each => each && h("span", {}, each))),
    shown.length > 0 && h("div", {class: "scores"},
      h("div", {class: "card"}, h("h3", {class: "muted"}, "Execution accuracy"),
        h("div", {class: "big"}, shown.length > 1 && [percent(shown[0][1].mean), h("small", {}, "\u2002→\u2002")],
          percent(shown.at(-1)[1].mean)),
        tests.ci95 && h("div", {class: "gain"}, h("b", {class: tests.gain < 0 ? "wrong" : "right"},
          `${points(tests.gain)} points`), gain(tests).replace(/^\S+/, ""))),
      h("div", {class: "card"}, intervals(shown)),
      tests.mcnemar && h("div", {class: "card"},
        h("div", {class: "flips"}, flip("right", tests.mcnemar.only_second), flip("wrong", tests.mcnemar.only_first)),
        h("div", {class: "muted small"},
          `Is it more than chance? McNemar's exact test on these questions: ${chance(tests.mcnemar.p)}`)))];
}

/** Show means with their intervals on one scale, from 0 to 100 %. */
const intervals = rows => [
  rows.map(([name, each]) => h("div", {class: "interval"}, h("span", {}, brief(name, 60)), h("span", {}, mean(each)),
    h("div", {class: "scale"}, ["i", "b"].map((tag, n) => h(tag, {style: {left: `${100 * (n ? each.mean : each.ci95[0])}%`,
      width: n ? null : `${100 * (each.ci95[1] - each.ci95[0])}%`}}))))),
  h("div", {class: "muted small"}, "from 0 to 100 %; brackets and bars: 95 % intervals")];

function several(runs) {
  const last = run => Object.values(run.measured).at(-1), card = inner => h("div", {class: "card scroll"}, inner);
  const flips = tests => tests ? `${tests.only_second} / ${tests.only_first}` : "–";
  const heads = ["run", "before", "after [95 % interval]", "gain in points [95 %]",
    "questions flipped to right / wrong", "steps", "time"];
  const rows = runs.map(run => [run.name, run.measured.before ? percent(run.measured.before.mean) : "–",
    last(run) ? mean(last(run)) : "–", run.tests.ci95 ? gain(run.tests) : "–", flips(run.tests.mcnemar),
    run.numbers.step?.at(-1) ?? "–", run.result.seconds ? duration(run.result.seconds) : "–"]);
  const scored = runs.filter(last).map(run => [run.name, last(run)]), differing = Object.entries(data.differing);
  return [card(table(heads, rows)),
    scored.length > 0 && h("div", {class: "card"}, h("h3", {class: "muted"}, "Execution accuracy"), intervals(scored)),
    data.against.length > 0 && [h("h2", {}, `Beside ${data.against[0].base}`), card(table(
      ["run", "gain in points [95 %]", "bootstrap", "only the base right", "only this right", "McNemar"],
      data.against.map(each => [each.run, gain(each), chance(each.p), ...each.mcnemar
        ? [each.mcnemar.only_first, each.mcnemar.only_second, chance(each.mcnemar.p)] : ["–", "–", "–"]])))],
    h("h2", {}, "Settings that differ"), differing.length > 0
      ? card(settings(differing.map(([key, values]) => [key, ...values]), ["setting", ...runs.map(run => run.name)]))
      : h("p", {class: "muted"}, "None.")];
}

/** Where accuracy changed, and which mistakes went away, between the two places that are compared first. */
function changes() {
  const {a, b} = chosen({}), held = data.questions.filter(q => q.set === "held-out");
  const pairs = held.map(q => [q, seenIn(q, a), seenIn(q, b)]).filter(([, x, y]) => x && y && x !== y);
  const heads = ["", ...[a, b].map(view => data.views[view].replace(/ (learning|time seen)$/, "")), "points"];
  /** Of each name that `namesOf` gives: a share of the questions in both places. */
  const part = (title, key, namesOf, isTag) => {
    const counts = new Map();
    for (const [q, ...ends] of pairs) for (const [n, seen] of ends.entries()) for (const name of namesOf(q, seen)) {
      const found = counts.get(name) ?? counts.set(name, {ends: [0, 0], all: 0}).get(name);
      found.ends[n] += isTag || isRight(seen);
      found.all += 1;
    }
    const most = [...counts].sort(([, x], [, y]) => y.all - x.all).slice(0, 8);
    return most.length > 0 && h("div", {class: "card"}, h("h3", {class: "muted"}, title),
      table(heads, most.map(([name, {ends, all}]) => {
        const [x, y] = ends.map(count => count / (isTag ? pairs.length : all / 2));
        const colour = Math.abs(y - x) < .005 ? "muted" : y > x === !isTag ? "right" : "wrong";
        return [[h("a", {href: "#" + new URLSearchParams({[key]: name, to: "questions"})}, isTag ? asWords(name) : brief(name)),
          !isTag && h("span", {class: "muted small"}, `\u00a0${all / 2}`)],
        percent(x, 0), percent(y, 0), h("td", {class: colour}, points(y - x, 0))];
      }), {class: "parts"}));
  };
  return pairs.length > 0 && h("details", {open: ""},
    h("summary", {}, "What changed: by difficulty, by clause of the gold query, by mistake"),
    h("div", {class: "thirds"}, part("Right, by difficulty", "level", q => q.level ? [q.level] : []),
      part("Right, by what the gold query has", "clause", q => q.clauses),
      part("Queries with a mistake, by tag", "tag", (_, seen) => seen.tags, true)));
}
