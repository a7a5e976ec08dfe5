// Results of queries, and what sets one apart from the gold query's.

const isSame = (x, y) => JSON.stringify(x) === JSON.stringify(y);
const cellText = cell => cell === null ? h("i", {class: "muted"}, "NULL")
  : typeof cell === "object" ? cell.number ?? `x'${cell.blob}'` : String(cell);

/** Pair the rows of two results: equal rows, then those that share most cells, then what is left. */
function align(gold, own, inOrder) {
  const left = own.map((row, n) => ({row, n})), pairs = gold.map(row => ({gold: row}));
  for (const [n, pair] of pairs.entries()) {
    const at = left.findIndex(({row}) => isSame(row, pair.gold));
    pair.moved = inOrder && at >= 0 && left[at].n !== n;
    if (at >= 0) [{row: pair.own}] = left.splice(at, 1);
  }
  for (const pair of pairs.filter(each => !each.own)) {
    const shared = left.map(({row}) => row.filter((cell, n) => isSame(cell, pair.gold[n])).length);
    const at = shared.indexOf(Math.max(...shared));
    if (shared[at] || gold.length === 1 && own.length === 1) [{row: pair.own}] = left.splice(at, 1);
  }
  return [...pairs, ...left.map(({row}) => ({own: row}))];
}

/** Show a result, beside the gold's where they differ; a right one that differs names the rule. */
function results({result, correct}, {gold, gold_result: wanted}, rule) {
  const isEqual = wanted?.columns && isSame(wanted.rows, result.rows);
  if (!wanted?.columns || correct && (isEqual || !rule))
    return resultTable(isEqual ? "result, equal to the gold's" : "result", result);
  const pairs = align(wanted.rows, result.rows, /\border\s+by\b/i.test(gold));
  const both = pairs.filter(pair => pair.gold && pair.own), lengths = [wanted, result].map(each => each.columns.length);
  const wrong = Array.from({length: Math.max(...lengths)}, (_, n) => n >= Math.min(...lengths)
    || both.length > 0 && both.every(pair => !isSame(pair.gold[n], pair.own[n])));
  const counts = {
    "missing": pairs.filter(pair => !pair.own), "too many": pairs.filter(pair => !pair.gold),
    "in another order": pairs.filter(pair => pair.moved),
    "with other values": both.filter(pair => !isSame(pair.gold, pair.own)),
  };
  const words = Object.entries(counts).map(([how, {length}]) => length && `${plural(length, "row")} ${how}`);
  const columns = wrong.filter(Boolean).length;
  return [h("div", {class: "small muted"}, [correct && `right by the rule of this run, env.match=${rule}`, ...words,
    columns && `${plural(columns, "column")} wrong in every row`].filter(Boolean).join(", ")),
  h("div", {class: "results"}, resultTable("gold", wanted, pairs, "gold", wrong),
    resultTable("prediction", result, pairs, "own", wrong))];
}

const goldResult = found => found && (!found.columns
  ? h("p", {class: "wrong small"}, `The gold query does not run: ${found.message}`)
  : h("details", {class: "small"}, h("summary", {}, `its result, ${plural(found.count, "row")}`),
    resultTable("", found)));

const ALONE = {gold: ["−", "missing in the prediction"], own: ["+", "not in the gold result"]};

/** Show one side of pairs of rows; a sign tells those that have no other, or another place. */
function resultTable(title, {columns, rows, count, width}, pairs = null, side = "own", wrong = []) {
  const other = side === "own" ? "gold" : "own";
  const lines = (pairs ?? rows.map(row => ({own: row, gold: row}))).map(pair => {
    const row = pair[side], moved = pair.moved ? ["↕", "at another place"] : [];
    const [sign, title] = !row ? [] : pair[other] ? moved : ALONE[side];
    return h("tr", {class: row && !pair[other] ? "alone" : null}, h("td", {class: "sign", title}, sign),
      row ? row.map((cell, n) => h("td", {class: pair[other] && !isSame(cell, pair[other][n]) ? "differs" : null},
        cellText(cell))) : h("td", {colspan: Math.max(1, columns.length)}, "\u00a0"));
  });
  const cut = [count > rows.length && `first ${rows.length} of ${plural(count, "row")}`,
    width > columns.length && `first ${columns.length} of ${plural(width, "column")}`].filter(Boolean).join(", ");
  const heads = columns.map((name, n) => h("th", {class: wrong[n] ? "differs" : null}, name));
  return h("div", {class: "result"}, who(title, cut || plural(count, "row")),
    h("div", {class: "scroll"}, table([h("th", {class: "sign"}), ...heads], lines)));
}
