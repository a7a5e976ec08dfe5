// Verdict and curves.

const EX = "Execution accuracy";
const scoreOf = run => run.measured.after ?? run.measured.answers ?? run.measured.before;

function verdict() {
  const {runs} = data, one = runs[0], several = runs.length > 1;
  document.title = several ? `${runs.length} runs compared` : visible(one.name);
  const parts = [h("h1", {}, several ? `${runs.length} runs compared` : one.name)];
  parts.push(...(several ? comparison() : summary(one)));
  parts.push(breakdown(), ...data.notes.map(line => h("p", {class: "note small"}, line)));
  parts.push(...runs.map(run => h("details", {class: "small"}, h("summary", {},
    several ? `${run.name}: command, versions, settings` : "Command, versions, settings"), facts(run))));
  fill($("verdict"), ...parts);
}

function summary(run) {
  const {before, after, answers} = run.measured, numbers = run.numbers;
  const steps = (numbers.step ?? []).at(-1) ?? 0, planned = run.settings["train.steps"];
  const state = run.kind === "run" && !run.result.questions ? `not finished: ${steps} of ${planned ?? "?"} steps so far` : "";
  const facts = [
    run.kind === "run" ? (state || plural(steps, "step")) : `decoding ${run.result.decode ?? "of a file"}`,
    scoreOf(run) && plural(scoreOf(run).questions, "held-out question"),
    run.settings["reward.kind"] && `reward ${run.settings["reward.kind"]}`,
    run.settings["train.algorithm.kind"] && `algorithm ${run.settings["train.algorithm.kind"]}`,
    run.settings.seed !== undefined && `seed ${run.settings.seed}`,
    run.result.seconds && duration(run.result.seconds), run.result.accelerator,
  ];
  const out = [h("p", {class: "facts muted"}, facts.filter(Boolean).map(each => h("span", {}, each)))];
  const shown = [before && ["before", before], after && ["after", after], answers && ["answers", answers]].filter(Boolean);
  if (!shown.length) return out;
  const first = shown[0][1], last = shown.at(-1)[1], tests = run.tests;
  out.push(h("div", {class: "scores"},
    h("div", {class: "card"}, h("h3", {class: "muted"}, EX),
      h("div", {class: "big"}, shown.length > 1 ? [percent(first.mean), h("small", {}, "\u2002→\u2002")] : null,
      percent(last.mean)),
      tests.ci95 && h("div", {class: "gain"}, h("b", {class: tests.gain < 0 ? "wrong" : "right"},
        `${points(tests.gain)} points`), h("span", {class: "muted"}, ` [${points(tests.ci95[0])}, ${points(tests.ci95[1])}]`)),
      h("div", {class: "muted small"}, "brackets: 95 % intervals")),
    h("div", {class: "card"}, intervals(shown)),
    tests.mcnemar && h("div", {class: "card"}, h("div", {class: "flips"},
      flip("right", tests.mcnemar.only_second, "flipped to right"), flip("wrong", tests.mcnemar.only_first, "flipped to wrong")),
      h("p", {class: "muted small", style: {margin: ".5rem 0 0"}},
        `Is it more than chance? McNemar's exact test on these questions: ${chance(tests.mcnemar.p)}`))));
  return out;
}

const flip = (kind, count, words) => h("a", {href: link({flip: kind, a: "0.before", b: "0.after", set: "held",
  to: "questions"})}, h("b", {class: kind}, `${kind === "right" ? "✓" : "✗"} ${count}`), h("span", {class: "small"}, words));

/** Draw means with their 95 % intervals on one scale; labels beside them, for those who read. */
function intervals(rows) {
  const wide = 420, left = 92, top = 8, step = 40, high = top + rows.length * step + 22;
  const lows = rows.map(([, one]) => one.ci95[0]), highs = rows.map(([, one]) => one.ci95[1]);
  const from = Math.max(0, Math.floor(Math.min(...lows) * 10 - .3) / 10),
    to = Math.min(1, Math.ceil(Math.max(...highs) * 10 + .3) / 10);
  const x = value => left + (wide - left - 16) * (value - from) / (to - from || 1);
  const label = (at, y, text, more) => { const t = svg("text", {x: at, y, ...more}); t.textContent = visible(text); return t; };
  const node = svg("svg", {viewBox: `0 0 ${wide} ${high}`, width: "100%", class: "intervals", role: "img",
    "aria-label": "Means with 95 % intervals"});
  const stride = to - from > .5 ? .2 : .1;
  for (let tick = from; tick <= to + 1e-9; tick += stride)
    node.append(svg("line", {x1: x(tick), x2: x(tick), y1: top, y2: high - 20, stroke: "var(--line)"}),
      label(x(tick), high - 6, `${Math.round(100 * tick)} %`, {"text-anchor": "middle"}));
  rows.forEach(([name, one], n) => {
    const y = top + step * (n + .5), short = name.length > 13 ? `${name.slice(0, 12)}…` : name;
    node.append(label(0, y + 4, short, {class: "name"}),
      svg("line", {x1: x(one.ci95[0]), x2: x(one.ci95[1]), y1: y, y2: y, stroke: "var(--accent)", "stroke-width": 3,
        "stroke-linecap": "round"}),
      svg("circle", {cx: x(one.mean), cy: y, r: 6, fill: name === "before" ? "var(--surface)" : "var(--accent)",
        stroke: "var(--accent)", "stroke-width": 3}),
      label(x(one.mean), y - 11, `${percent(one.mean)} [${(100 * one.ci95[0]).toFixed(1)}, ${(100 * one.ci95[1]).toFixed(1)}]`,
        {"text-anchor": "middle"}));
  });
  return node;
}

function comparison() {
  const {runs} = data, rows = runs.map(run => {
    const tests = run.tests, score = scoreOf(run);
    return h("tr", {}, h("td", {}, run.name), h("td", {}, run.measured.before ? percent(run.measured.before.mean) : "–"),
      h("td", {}, score ? `${percent(score.mean)} [${(100 * score.ci95[0]).toFixed(1)}, ${(100 * score.ci95[1]).toFixed(1)}]`
        : "–"),
      h("td", {}, tests.ci95 ? `${points(tests.gain)} [${points(tests.ci95[0])}, ${points(tests.ci95[1])}]` : "–"),
      h("td", {}, tests.mcnemar ? `${tests.mcnemar.only_second} / ${tests.mcnemar.only_first}` : "–"),
      h("td", {}, (run.numbers.step ?? []).at(-1) ?? "–"), h("td", {}, run.result.seconds ? duration(run.result.seconds) : "–"));
  });
  const heads = ["run", "before", "after [95 % interval]", "gain in points [95 %]", "questions flipped to right / wrong",
    "steps", "time"];
  const scored = runs.filter(scoreOf).map(run => [run.name, scoreOf(run)]);
  const out = [h("div", {class: "card scroll"}, h("table", {}, h("tr", {}, heads.map(head => h("th", {}, head))), rows))];
  if (scored.length) out.push(h("div", {class: "card", style: {marginTop: "1rem", maxWidth: "40rem"}},
    h("h3", {class: "muted"}, `${EX}, 95 % intervals`), intervals(scored)));
  if (data.against?.length) out.push(h("h2", {style: {marginTop: "1.5rem"}}, `Beside ${data.against[0].base}`),
    h("div", {class: "card scroll"}, h("table", {},
    h("tr", {}, ["run", "gain in points [95 %]", "bootstrap", "only the base right", "only this right",
      "McNemar"].map(head => h("th", {}, head))),
    data.against.map(each => h("tr", {}, h("td", {}, each.run), h("td", {},
      `${points(each.gain)} [${points(each.ci95[0])}, ${points(each.ci95[1])}]`), h("td", {}, chance(each.p)),
      each.mcnemar ? [h("td", {}, each.mcnemar.only_first), h("td", {}, each.mcnemar.only_second),
        h("td", {}, chance(each.mcnemar.p))] : h("td", {colspan: 3}, "–"))))));
  const differing = Object.entries(data.differing);
  out.push(h("h2", {style: {marginTop: "1.5rem"}}, "Settings that differ"),
    differing.length ? h("div", {class: "card scroll"},
    h("table", {}, h("tr", {}, h("th", {}, "setting"), runs.map(run => h("th", {}, run.name))),
    differing.map(([key, values]) => h("tr", {}, h("td", {}, h("code", {}, key)),
      values.map(value => h("td", {}, said(value))))))) : h("p", {class: "muted"}, "None."));
  return out;
}

/** Where accuracy changed, and which mistakes went away: the two places that are compared, in parts. */
function breakdown() {
  const [a, b] = chosenViews({}), names = views(), pairs = data.questions.map(q =>
    [q, seenIn(q, a), seenIn(q, b)]).filter(([, one, two]) => one && two && one !== two);
  if (!pairs.length) return null;
  const count = (pick, test) => {
    const found = new Map();
    for (const [q, ...ends] of pairs) ends.forEach((seen,
      n) => { for (const key of new Set(pick(q, seen))) { if (!found.has(key)) found.set(key, [0, 0, 0, 0]);
      found.get(key)[n] += test(seen); found.get(key)[n + 2] += 1; } });
    return [...found].filter(([key]) => key);
  };
  const share = pick => count(pick, seen => isRight(seen) ? 1 : 0).map(([key, [x, y, n, m]]) =>
    [key, x / n, y / m, n]).sort((x, y) => y[3] - x[3]).slice(0, 8);
  const mistakes = count((q, seen) => seen[6], () => 1).map(([key, [x, y]]) =>
    [key, x / pairs.length, y / pairs.length, x + y]).sort((x, y) => y[3] - x[3]).slice(0, 8);
  const table = (title, key, rows, better, about) => rows.length > 0
    && h("div", {class: "card"}, h("h3", {class: "muted"}, title),
    h("table", {class: "parts"}, h("tr", {}, ["", names.get(a).replace(" learning", ""), names.get(b).replace(" learning", ""),
    "points"].map(head => h("th", {}, head))),
    rows.map(([name, x, y, n]) => h("tr", {}, h("td", {}, h("a", {href: link({[key]: name, to: "questions"})},
      key === "tag" ? asWords(name) : brief(name)),
      about && h("span", {class: "muted small"}, `\u00a0${n}`)), h("td", {}, percent(x, 0)), h("td", {}, percent(y, 0)),
      h("td", {class: Math.abs(y - x) < .005 ? "muted" : (y > x) === better ? "right" : "wrong"},
        `${points(y - x).slice(0, 1)}${Math.abs(100 * (y - x)).toFixed(0)}`)))));
  return h("details", {open: true}, h("summary", {}, "What changed: by difficulty, by clause of the gold query, by mistake"),
    h("div", {class: "thirds"},
    table("Right, by difficulty", "level", share(q => [q.level || "unknown"]), true, true),
      table("Right, by what the gold query has", "clause", share(q => q.clauses), true, true),
      table("Queries with a mistake, by tag", "tag", mistakes, false)));
}

const said = value => value === undefined || value === null ? "–" : typeof value === "object" ? JSON.stringify(value)
  : String(value);

function facts(run) {
  const rows = pairs => h("table", {}, pairs.map(([key, value]) => h("tr", {}, h("td", {}, h("code", {}, key)),
    h("td", {}, said(value)))));
  return [run.command && h("pre", {class: "card"}, run.command),
    h("p", {class: "facts"}, Object.entries(run.versions).map(([name, version]) => h("span", {}, `${name} ${said(version)}`))),
    h("div", {class: "scroll card"}, rows(Object.entries(run.settings)))];
}

// Each panel: title, names of metrics, how its numbers are written, whether its axis may be logarithmic.
const LABELS = {"rollout/accuracy": "training episodes", "rollout/accuracy_first": "their first query",
  "validation/accuracy": "validation", "reward/total": "total", "rollout/turns": "replies", "rollout/reply_tokens": "a reply",
  "rollout/response_tokens": "an episode", "rollout/invalid_share": "replies without a result", "groups/equal_share": "all rewards equal", "time/rollout_tokens_per_s": "sampled",
  "time/update_tokens_per_s": "updated"};
const labelOf = key => LABELS[key] ?? asWords(key.replace(/^[^/]*\//, ""));

function panels(names) {
  const under = prefix => names.filter(name => name.startsWith(prefix) && name !== "reward/total");
  const often = keys => keys.map(key => [key, mean(key)]).sort((a, b) => b[1] - a[1]).slice(0, 6).map(([key]) => key);
  const mean = key => { const all = data.runs.flatMap(run => run.numbers[key] ?? []).filter(Number.isFinite);
    return all.reduce((a, b) => a + b, 0) / (all.length || 1); };
  const all = [
    [EX, ["validation/accuracy", "rollout/accuracy", "rollout/accuracy_first"], "%"],
      ["Reward and its parts", ["reward/total", ...(under("reward/").length > 1 ? under("reward/") : [])], ""],
    ["Tags: what is wrong in the last query", often(under("tag/")), "%"],
      ["How queries end", [...under("case/"), "rollout/invalid_share"], "%"],
    ["Turns of an episode", ["rollout/turns"], ""], ["Tokens", ["rollout/reply_tokens", "rollout/response_tokens"], ""],
    ["Groups without signal", ["groups/equal_share"], "%"], ["Entropy of the policy", ["update/entropy"], "log"],
    ["Sampler-learner gap, largest of a step", ["update/logp_gap_max"], "log"],
      ["Divergence from the start", ["update/kl"], "log"],
    ["Gradient norm", ["update/grad_norm"], "log"],
      ["Tokens a second", ["time/rollout_tokens_per_s", "time/update_tokens_per_s"], "log"],
  ];
  return all.map(([title, keys, unit]) => ({title, keys: keys.filter(key => names.includes(key)), unit})).filter(panel =>
    panel.keys.length);
}

const drawn = [];
const smooth = (values, weight) => {
  let last = null;
  return values.map(value => value === null || value === undefined ? null
    : (last = last === null ? value : weight * last + (1 - weight) * value));
};

function curves() {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.numbers)))].filter(name => name !== "step").sort();
  if (!names.length) { $("curves").hidden = true; return; }
  const shown = panels(names), used = new Set(shown.flatMap(panel => panel.keys)), grid = h("div", {class: "plots"});
  const add = panel => {
    grid.append(plot(panel));
    // A link to a question shows no curves yet.
    if (!("q" in address())) drawn.at(-1).redraw();
  };
  const slider = h("input", {type: "range", min: 0, max: 0.95, step: 0.05, value: 0.6, "aria-label": "Smoothing",
    oninput: () => drawn.forEach(each => each.redraw())});
  const log = h("button", {"aria-pressed": "false", title: "Where it helps: entropy, gap, divergence, gradient, speed",
    onclick: () => { log.setAttribute("aria-pressed", log.getAttribute("aria-pressed") !== "true");
    drawn.forEach(each => each.redraw()); }}, "log axes");
  const more = h("select", {"aria-label": "Another number", onchange: () => { if (more.value) add({title: more.value,
    keys: [more.value], unit: "log"}); more.value = ""; }},
    h("option", {value: ""}, "another number…"), names.filter(name => !used.has(name)).map(name =>
      h("option", {value: name}, name)));
  curves.weight = () => Number(slider.value);
  curves.isLog = () => log.getAttribute("aria-pressed") === "true";
  const seeds = data.alike.some(group => group.length > 1);
  fill($("curves"), h("div", {class: "row", style: {marginBottom: ".6rem"}}, h("h2", {style: {margin: 0}}, "Curves"),
    h("span", {class: "grow"}), h("label", {class: "small muted row"}, "smoothing", slider), log, more),
    seeds && h("p", {class: "small muted"},
      "Seeds of one configuration are one line, their mean; its band goes from the lowest to the highest of them (smoothed likewise). It is no confidence interval."), grid);
  shown.forEach(add);
}

/** Lines of a panel: the metrics of one run, or one metric of several. */
function linesOf(panel, key) {
  if (data.runs.length === 1) return panel.keys.map(each => ({label: labelOf(each), runs: [data.runs[0]], key: each}));
  return data.alike.map(group =>
    ({label: group.length > 1 ? `${data.runs[group[0]].name.replace(/-?seed\d+$/, "")} (${group.length} seeds)`
    : data.runs[group[0]].name, runs: group.map(n => data.runs[n]), key}));
}

function plot(panel) {
  const box = h("div"), legend = h("div", {class: "legend"}), off = new Set();
  const pick = data.runs.length > 1 && panel.keys.length > 1
    && h("select", {"aria-label": `Which of ${panel.title}`, onchange: () => redraw()},
    panel.keys.map(key => h("option", {value: key}, labelOf(key))));
  const card = h("div", {class: "card plot", "data-plot": panel.title}, h("header", {}, h("h3", {}, panel.title), pick), legend,
    box);
  let chart = null;
  function redraw() {
    chart?.destroy();
    const lines = linesOf(panel, pick ? pick.value : panel.keys[0]).filter(line => line.runs.some(run => run.numbers[line.key]));
    const steps = [...new Set(lines.flatMap(line => line.runs.flatMap(run => run.numbers.step ?? [])))].sort((a, b) => a - b);
    const rows = [steps], series = [{label: "step"}], bands = [], marks = [];
    const aligned = (run, key) => { const at = new Map((run.numbers.step ?? []).map((step, n) =>
      [step, run.numbers[key]?.[n] ?? null])); return steps.map(step => at.get(step) ?? null); };
    lines.forEach((line, n) => {
      const raw = line.runs.map(run => aligned(run, line.key)),
        sparse = raw[0].filter(Number.isFinite).length * 2 <= steps.length;
      const soft = raw.map(values => sparse ? values : smooth(values, curves.weight())), stroke = colour(n),
        hidden = off.has(line.label);
      const over = (all, pickOf) => steps.map((_, at) => { const there = all.map(one => one[at]).filter(Number.isFinite);
        return there.length ? pickOf(there) : null; });
      if (raw.length > 1) {
        rows.push(over(soft, there => Math.max(...there)), over(soft, there => Math.min(...there)));
        series.push({stroke: `${stroke}55`, width: .5, show: !hidden, points: {show: false}},
          {stroke: `${stroke}55`, width: .5, show: !hidden, points: {show: false}});
        bands.push({series: [rows.length - 2, rows.length - 1], fill: `${stroke}2e`});
      } else if (!sparse && lines.length < 4) { rows.push(raw[0]);
        series.push({stroke: `${stroke}40`, width: 1, show: !hidden, points: {show: false}}); }
      rows.push(over(soft, there => there.reduce((a, b) => a + b, 0) / there.length));
      series.push({stroke, width: 2, dash: DASHES[n % 8], show: !hidden, spanGaps: true,
        points: {show: sparse, size: 7, fill: stroke}});
      marks.push({line, row: rows.length - 1, stroke, hidden, own: raw.length > 1 ? rows.at(-1) : raw[0]});
    });
    const muted = ink("--muted"), grid = {stroke: ink("--line"), width: 1}, percents = panel.unit === "%";
    const write = value => percents ? percent(value) : number(value);
    const values = marks.map(() => h("b"));
    const tell = at => marks.forEach(({own}, n) => { const there = at ?? own.findLastIndex(Number.isFinite);
      values[n].textContent = Number.isFinite(own[there]) ? write(own[there]) : "–"; });
    fill(legend, marks.map((mark, n) => h("button", {"aria-pressed": String(!mark.hidden),
      title: `${mark.line.key}; click to hide or show`,
      onclick: () => { off.has(mark.line.label) ? off.delete(mark.line.label) : off.add(mark.line.label); redraw(); }},
      svg("svg", {width: 20, height: 8}, svg("line", {x1: 0, x2: 20, y1: 4, y2: 4, stroke: mark.stroke, "stroke-width": 3,
        "stroke-dasharray": DASHES[n % 8].join(" ")})), mark.line.label, values[n])));
    const isLog = curves.isLog() && panel.unit === "log"
      && marks.every(mark => rows[mark.row].every(value => value === null || value > 0));
    chart = new uPlot({
      width: box.clientWidth || 360, height: 190, legend: {show: false}, bands, series,
      cursor: {sync: {key: "steps"}, drag: {x: true, y: false}, points: {size: 6}},
        scales: {x: {time: false}, y: {distr: isLog ? 3 : 1}},
      axes: [{stroke: muted, grid, ticks: grid, size: 28, font: "11px system-ui"},
        {stroke: muted, grid, ticks: grid, size: 48, font: "11px system-ui",
        values: (_, ticks) => ticks.map(tick => tick === null ? "" : percents ? `${Math.round(100 * tick)} %` : number(tick))}],
      hooks: {setCursor: [each => tell(each.cursor.idx)]},
    }, rows, box);
    tell(null);
  }
  drawn.push({redraw});
  // Once it has its place in the page, and its width.
  new ResizeObserver(() => { if (box.clientWidth && (!chart || chart.width !== box.clientWidth)) redraw(); }).observe(box);
  return card;
}
