// Curves: a panel for each subject, drawn by uPlot; three columns for each line.

const PANELS = [ // title, a word on it, metrics (a name that ends with / is a family, the largest first), unit
  ["Execution accuracy", "Right answers: of held-out questions greedily, of training episodes as they are sampled.",
    ["validation/accuracy", "rollout/accuracy", "rollout/accuracy_first"], "%"],
  ["What there is to learn from", "Groups whose rewards are equal, or that a filter drops, teach nothing; replies without a query or cut off earn nothing.",
    ["groups/live_share", "rollout/no_query_share", "rollout/cut_share"], "%"],
  ["Reward and its parts", "What training pays for an episode, on average.", ["reward/total", "reward/"]],
  ["Tags: what is wrong in the last query", "Where its structure differs from the gold query's.", ["tag/"], "%"],
  ["How queries end", "Of all replies.", ["case/", "rollout/invalid_share"], "%"],
  ["Right by luck", "Of training's answers that look right, those that a witness refutes.", ["rollout/refuted_share"], "%"],
  ["Turns of an episode", "Replies until it ends.", ["rollout/turns"]],
  ["Tokens", "Written in training.", ["rollout/reply_tokens", "rollout/response_tokens"]],
  ["Entropy of the policy", "Near 0 all samples of a question are alike.", ["update/entropy"]],
  ["Sampler-learner gap, nats a token", "How far the log-probabilities of the two are apart; near 0 where they compute alike.", ["mismatch/gap_mean", "mismatch/gap_p99", "mismatch/gap_max"]],
  ["KL of sampler and learner", "Estimated on sampled tokens.", ["mismatch/kl"]],
  ["Sequences far from the sampler", "What a correction bounds or masks.", ["mismatch/far_share", "update/correction_beyond"], "%"],
  ["Divergence from the start", "KL to the model that learning began with.", ["update/kl"]],
  ["Gradient norm", "Before clipping.", ["update/grad_norm"]],
  ["Tokens a second", "Of all processes.", ["time/rollout_tokens_per_s", "time/update_tokens_per_s"]],
];
const LABELS = {
  "rollout/accuracy": "training episodes", "rollout/accuracy_first": "their first query", "rollout/turns": "replies",
  "rollout/reply_tokens": "a reply", "rollout/response_tokens": "an episode", "groups/live_share": "groups that teach",
  "rollout/invalid_share": "replies without a result", "rollout/no_query_share": "no query in the answer",
  "rollout/cut_share": "cut off at the token limit", "rollout/refuted_share": "refuted", "time/rollout_tokens_per_s": "sampled",
  "time/update_tokens_per_s": "updated", "mismatch/gap_mean": "mean", "mismatch/gap_p99": "99th percentile",
  "mismatch/gap_max": "largest", "mismatch/far_share": "sequences off by 1 % a token", "update/correction_beyond": "tokens beyond the bounds", "validation/accuracy": "validation",
};
const labelOf = key => entry(LABELS, key) ?? asWords(key.split("/").at(-1));
const DASHES = [["solid"], ["dashed", 6, 3], ["dotted", 2, 2]]; // colours alone are not for everybody
const average = (...values) => values.reduce((x, y) => x + y, 0) / values.length;
const drawn = []; // what draws each panel again
const drawAll = () => drawn.forEach(draw => draw());

function curves() {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.numbers)))].filter(name => name !== "step").sort();
  const size = key => average(...data.runs.flatMap(run => entry(run.numbers, key) ?? []).filter(Number.isFinite));
  const family = key => names.filter(name => name.startsWith(key)).sort((x, y) => size(y) - size(x)).slice(0, 6);
  const found = PANELS.map(([title, about, keys, unit]) => ({title, about, unit, keys: [...new Set(keys.flatMap(key =>
    key.endsWith("/") ? family(key) : names.filter(name => name === key)))]}));
  // A panel has the metrics of one run, or one metric of all.
  const panels = data.runs.length === 1 ? found : found.flatMap(({title, about, keys, unit}) => keys.map(key =>
    ({title: keys.length > 1 ? `${title}: ${labelOf(key)}` : title, about, keys: [key], unit})));
  const others = names.filter(name => !found.some(({keys}) => keys.includes(name)));
  for (const each of [$("curves"), document.querySelector('[href="#to=curves"]')]) each.hidden = !names.length;
  fill($("curves"), h("div", {class: "row"}, h("h2", {}, "Curves"), h("span", {class: "grow"}),
    h("label", {class: "small row"}, "smoothing",
      h("input", {id: "smoothing", type: "range", min: 0, max: 0.95, step: 0.05, value: 0.6, oninput: drawAll})),
    h("label", {class: "small row"}, h("input", {id: "log", type: "checkbox", oninput: drawAll}),
      "log axes where all numbers are above 0")),
  data.alike.some(group => group.length > 1) && h("p", {class: "small muted"}, "Seeds of one configuration are one "
    + "line, the mean of those that are finished, or of all where none is; its band goes from the lowest to the highest. "
    + "It is no confidence interval."),
  h("div", {class: "plots"}, panels.filter(({keys}) => keys.length).map(plot)),
  h("details", {}, h("summary", {}, plural(others.length, "other metric")),
    h("div", {class: "plots"}, others.map(name => plot({title: name, keys: [name]})))));
}

/** Name the lines of a panel; the seeds of a configuration are one. */
const linesOf = keys => keys.flatMap(key => data.alike.map(group => {
  const {all, finished, label} = seedsOf(group);
  return {key, runs: finished.length ? finished : all, label: data.runs.length === 1 ? labelOf(key) : label};
})).filter(({key, runs}) => runs.some(run => entry(run.numbers, key)));

/** Give the highest, the lowest and the mean seed of a line, smoothed, by step; and its mean as it is. */
function columnsOf({key, runs}, steps) {
  const weight = Number($("smoothing").value), exact = runs.map(({numbers}) => {
    const at = new Map((numbers.step ?? []).map((step, n) => [step, entry(numbers, key)?.[n]]));
    return steps.map(step => at.get(step) ?? null);
  });
  const isSparse = 2 * exact[0].filter(Number.isFinite).length <= steps.length;
  const smooth = (values, last = null) => values.map(value => value === null ? null
    : last = isSparse || last === null ? value : weight * last + (1 - weight) * value);
  const over = (columns, of) => steps.map((_, n) => columns.map(each => each[n]).filter(Number.isFinite))
    .map(values => values.length ? Number(of(...values).toPrecision(6)) : null);
  const soft = exact.map(values => smooth(values));
  return {isSparse, exact: over(exact, average), columns: [Math.max, Math.min, average].map(of => over(soft, of))};
}

function plot({title, about, keys, unit}) {
  const box = h("div"), write = value => unit ? percent(value) : number(value);
  /** Write the number of a tick in the room that an axis has. */
  const short = value => Math.abs(value) < 1e4 ? number(value) : `${number(value / 1000)}k`;
  /** Resolve a colour of the style sheet for the canvas. */
  const ink = outlineColor => Object.assign(box.style, {outlineColor}) && getComputedStyle(box).outlineColor;
  let chart = null;
  const draw = () => {
    if (!box.clientWidth) return; // not in sight yet
    const lines = linesOf(keys), all = lines.flatMap(({runs}) => runs.flatMap(run => run.numbers.step ?? []));
    const steps = [...new Set(all)].sort((x, y) => x - y), found = lines.map(line => columnsOf(line, steps));
    const lows = found.flatMap(({columns}) => columns[1]).filter(Number.isFinite);
    const isLog = $("log").checked && !unit && lows.every(value => value > 0);
    const grid = {stroke: ink("var(--line)"), width: 1};
    const axis = {stroke: ink("var(--muted)"), grid, ticks: grid, font: "11px system-ui"};
    const series = lines.flatMap(({label}, n) => {
      const {isSparse, columns: [, , line]} = found[n], [, ...dash] = DASHES[n % 3];
      const end = line.findLastIndex(Number.isFinite);
      const color = `var(--c${n % 8})`, stroke = ink(`color-mix(in srgb, ${color} 25%, #0000)`);
      const edge = {class: "edge", stroke, spanGaps: true, points: {show: false}};
      return [edge, {...edge}, {label: visible(label), stroke: ink(color), dash, width: 2, spanGaps: true,
        points: {show: isSparse, size: 7}, value: (_, __, ___, at) => write(line[at ?? end])}];
    });
    const shown = chart?.series.map(each => each.show) ?? [];
    chart?.destroy();
    chart = new uPlot({
      width: box.clientWidth, height: 190, axes: [{...axis, size: 28}, {...axis, size: (_, values) => 18 + 7 * Math.max(3, ...(values ?? []).map(each => each.length)),
        values: (_, ticks) => ticks.map(tick => tick === null ? "" : unit ? percent(tick, 0) : short(tick))
          .map((text, n, all) => all.indexOf(text) === n ? text : "")}],
      series: [{label: "step", value: (_, step) => step ?? steps.at(-1)},
        ...series.map((each, n) => ({...each, show: shown[n + 1] ?? true}))],
      bands: lines.map((_, n) => ({series: [3 * n + 1, 3 * n + 2], fill: series[3 * n].stroke})),
      scales: {x: {time: false}, y: {distr: isLog ? 3 : 1, ...unit && {range: [0, 1]}}}, cursor: {sync: {key: "steps"}, points: {size: 6}},
      legend: {markers: {dash: (_, n) => DASHES[Math.floor((n - 1) / 3) % 3][0]}},
      hooks: {setSeries: [(self, n, {show}) => { // a band goes with its line
        if (n % 3 === 0 && show !== undefined) [n - 2, n - 1].forEach(edge => self.setSeries(edge, {show}));
      }]},
    }, [steps, ...found.flatMap(({columns}) => columns)], box);
  };
  drawn.push(draw);
  new ResizeObserver(() => { if (box.clientWidth !== chart?.width) draw(); }).observe(box);
  return h("div", {class: "card plot", "data-plot": title}, h("h3", {}, title),
    about && h("p", {class: "small muted"}, about), box);
}
