// Curves: a panel for each subject, drawn by uPlot; a column of numbers for each line.

const PANELS = [ // title, metrics (a name that ends with / is a family, most frequent first), unit
  ["Execution accuracy", ["validation/accuracy", "rollout/accuracy", "rollout/accuracy_first"], "%"],
  ["Reward and its parts", ["reward/total", "reward/"]],
  ["Tags: what is wrong in the last query", ["tag/"], "%"],
  ["How queries end", ["case/", "rollout/invalid_share"], "%"],
  ["Turns of an episode", ["rollout/turns"]],
  ["Tokens", ["rollout/reply_tokens", "rollout/response_tokens"]],
  ["Groups without signal", ["groups/equal_share"], "%"],
  ["Entropy of the policy", ["update/entropy"]],
  ["Sampler-learner gap, largest of a step", ["update/logp_gap_max"]],
  ["Divergence from the start", ["update/kl"]],
  ["Gradient norm", ["update/grad_norm"]],
  ["Tokens a second", ["time/rollout_tokens_per_s", "time/update_tokens_per_s"]],
];
const LABELS = {
  "rollout/accuracy": "training episodes", "rollout/accuracy_first": "their first query", "rollout/turns": "replies",
  "rollout/reply_tokens": "a reply", "rollout/response_tokens": "an episode", "groups/equal_share": "all rewards equal",
  "rollout/invalid_share": "replies without a result", "time/rollout_tokens_per_s": "sampled",
  "time/update_tokens_per_s": "updated", "validation/accuracy": "validation",
};
const labelOf = key => LABELS[key] ?? asWords(key.replace(/^[^/]*\//, ""));
const DASHES = [["solid"], ["dashed", 6, 3], ["dotted", 2, 2]]; // colours alone are not for everybody
const average = values => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
const drawn = []; // what draws each panel again

/** Resolve a colour of the style sheet for a canvas. */
function ink(name, share = 100) {
  const color = `color-mix(in srgb, var(${name}) ${share}%, transparent)`;
  const probe = document.body.appendChild(h("span", {style: {color}}));
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function curves() {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.numbers)))].filter(name => name !== "step").sort();
  const mean = key => average(data.runs.flatMap(run => run.numbers[key] ?? []).filter(Number.isFinite));
  const family = key => names.filter(name => name.startsWith(key)).sort((x, y) => mean(y) - mean(x)).slice(0, 6);
  const panels = PANELS.map(([title, keys, unit]) => ({title, unit, keys: [...new Set(keys.flatMap(key =>
    key.endsWith("/") ? family(key) : names.includes(key) ? [key] : []))]})).filter(panel => panel.keys.length);
  const used = new Set(panels.flatMap(panel => panel.keys));
  const others = names.filter(name => !used.has(name)).map(name => ({title: name, keys: [name]}));
  const again = () => drawn.forEach(draw => draw());
  $("curves").hidden = !names.length;
  fill($("curves"), h("div", {class: "row"}, h("h2", {}, "Curves"), h("span", {class: "grow"}),
    h("label", {class: "small row"}, "smoothing",
      h("input", {id: "smoothing", type: "range", min: 0, max: 0.95, step: 0.05, value: 0.6, oninput: again})),
    h("label", {class: "small row", title: "Where all numbers are above 0, and no shares"},
      h("input", {id: "log", type: "checkbox", oninput: again}), "log axes")),
  data.alike.some(group => group.length > 1) && h("p", {class: "small muted"}, "Seeds of one configuration are one line, "
    + "their mean; its band goes from the lowest to the highest seed (smoothed likewise). It is no confidence interval."),
  h("div", {class: "plots"}, panels.map(plot)),
  h("details", {}, h("summary", {}, plural(others.length, "other metric")), h("div", {class: "plots"}, others.map(plot))));
}

/** Name the lines of a panel: the metrics of one run, or one metric of all; seeds are one line. */
function linesOf(keys) {
  if (data.runs.length === 1) return keys.map(key => ({key, label: labelOf(key), runs: data.runs}));
  return data.alike.map(group => {
    const runs = group.map(n => data.runs[n]), [{name}] = runs;
    return {key: keys[0], runs, label: runs.length > 1 ? `${name.replace(/-?seed\d+$/, "")} (${runs.length} seeds)` : name};
  }).filter(({runs, key}) => runs.some(run => run.numbers[key]));
}

/** Give the columns of a line: upper and lower edge of its band, and its middle; and what the legend says of a step. */
function columnsOf({key, runs}, steps, isFaint) {
  const weight = Number($("smoothing").value), all = runs.map(({numbers}) => {
    const at = new Map((numbers.step ?? []).map((step, n) => [step, numbers[key]?.[n] ?? null]));
    return steps.map(step => at.get(step) ?? null);
  });
  const isSparse = 2 * all[0].filter(Number.isFinite).length <= steps.length, nothing = steps.map(() => null);
  const smooth = (values, last = null) => values.map(value => isSparse || value === null ? value
    : last = last === null ? value : weight * last + (1 - weight) * value);
  const over = (columns, of) => steps.map((_, n) => of(columns.map(each => each[n]).filter(Number.isFinite)));
  const soft = all.map(values => smooth(values)), edge = of => over(soft, there => there.length ? of(...there) : null);
  const edges = runs.length > 1 ? [edge(Math.max), edge(Math.min)] : [isFaint && !isSparse ? all[0] : nothing, nothing];
  return {isSparse, exact: over(all, average), columns: [...edges, over(soft, average)]};
}

function plot({title, keys, unit}) {
  const box = h("div"), isPercent = unit === "%", write = value => isPercent ? percent(value) : number(value);
  const pick = data.runs.length > 1 && keys.length > 1 && h("select", {"aria-label": `Which of ${title}`, onchange: () => draw()},
    keys.map(key => h("option", {value: key}, labelOf(key))));
  let chart = null;
  const draw = () => {
    if (!box.clientWidth) return; // not in sight yet
    const lines = linesOf(pick ? [pick.value] : keys);
    const steps = [...new Set(lines.flatMap(({runs}) => runs.flatMap(run => run.numbers.step ?? [])))].sort((x, y) => x - y);
    const found = lines.map(line => columnsOf(line, steps, lines.length < 4));
    const isLog = $("log").checked && !isPercent && found.every(({columns}) => columns[2].every(value => value === null || value > 0));
    const grid = {stroke: ink("--line"), width: 1}, axis = {stroke: ink("--muted"), grid, ticks: grid, font: "11px system-ui"};
    const series = lines.flatMap(({label, runs}, n) => {
      const stroke = ink(`--c${n % 8}`), [, ...dash] = DASHES[n % 3], {isSparse, exact} = found[n];
      const end = exact.findLastIndex(Number.isFinite), show = chart?.series[3 * n + 3]?.show ?? true;
      const edge = {class: "edge", width: runs.length > 1 ? .5 : 1, stroke: ink(`--c${n % 8}`, 25), show, points: {show: false}};
      return [edge, edge, {label: visible(label), stroke, dash, show, width: 2, spanGaps: true,
        points: {show: isSparse, size: 7, fill: stroke}, value: (_, __, ___, at) => write(exact[at ?? end])}];
    });
    chart?.destroy();
    chart = new uPlot({
      width: box.clientWidth, height: 190, axes: [{...axis, size: 28}, {...axis, size: 48, values: (_, ticks) =>
        ticks.map(tick => tick === null ? "" : isPercent ? percent(tick, 0) : number(tick))}],
      series: [{label: "step", value: (_, step) => step ?? steps.at(-1)}, ...series.map(each => ({...each}))],
      bands: lines.map((_, n) => ({series: [3 * n + 1, 3 * n + 2], fill: series[3 * n].stroke})),
      scales: {x: {time: false}, y: {distr: isLog ? 3 : 1}}, cursor: {sync: {key: "steps"}, points: {size: 6}},
      legend: {markers: {dash: (_, n) => DASHES[Math.floor((n - 1) / 3) % 3][0]}},
      hooks: {setSeries: [(self, n, {show}) => { // a band goes with its line
        if (n % 3 === 0 && show !== undefined) [n - 2, n - 1].forEach(edge => self.setSeries(edge, {show}));
      }]},
    }, [steps, ...found.flatMap(({columns}) => columns)], box);
  };
  drawn.push(draw);
  new ResizeObserver(() => { if (box.clientWidth !== chart?.width) draw(); }).observe(box);
  return h("div", {class: "card plot", "data-plot": title}, h("header", {}, h("h3", {}, title), pick), box);
}
