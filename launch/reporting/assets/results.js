// Results of queries, and what sets a result apart from the gold query's.

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
    const shared = left.map(({row}) => row.filter((cell, n) => isSame(cell, pair.gold[n])).length), most = Math.max(...shared);
    if (most > 0 || gold.length === 1 && own.length === 1) [{row: pair.own}] = left.splice(shared.indexOf(most), 1);
  }
  return [...pairs, ...left.map(({row}) => ({own: row}))];
}

/** Show a result, beside the gold's where they differ; `rule` may say that a right one differs. */
function results(turn, {gold, gold_result: wanted}, rule) {
  const own = turn.result, isEqual = wanted?.columns && isSame(wanted.rows, own.rows);
  if (!wanted?.columns || turn.correct && (isEqual || !rule))
    return resultTable(isEqual ? "result, equal to the gold's" : "result", own, own.rows.map(row => ({gold: row, own: row})), "own");
  const pairs = align(wanted.rows, own.rows, /\border\s+by\b/i.test(gold)), both = pairs.filter(pair => pair.gold && pair.own);
  const lengths = [wanted.columns.length, own.columns.length], columns = [...Array(Math.max(...lengths)).keys()];
  const wrong = columns.map(n => n >= Math.min(...lengths) || both.length > 0 && both.every(pair => !isSame(pair.gold[n], pair.own[n])));
  const count = (what, found) => found && `${plural(found, what)}`;
  const words = [[pairs.filter(pair => !pair.own).length, "row", "missing"], [pairs.filter(pair => !pair.gold).length, "row", "too many"],
    [pairs.filter(pair => pair.moved).length, "row", "in another order"],
    [both.filter(pair => !isSame(pair.gold, pair.own)).length, "row", "with other values"],
    [wrong.filter(Boolean).length, "column", "wrong in every row"]].filter(([count]) => count).map(([count, what, how]) =>
    `${plural(count, what)} ${how}`);
  if (turn.correct) words.unshift(`right by the rule of this run, env.match=${rule}`);
  return [h("div", {class: "small muted"}, words.join(", ") || "equal in what is recorded"),
    h("div", {class: "results"}, resultTable("gold", wanted, pairs, "gold", wrong),
      resultTable("prediction", own, pairs, "own", wrong))];
}

const goldResult = found => found && (found.columns
  ? h("details", {class: "small"}, h("summary", {}, `its result, ${plural(found.count, "row")}`),
    resultTable("", found, found.rows.map(row => ({gold: row, own: row})), "gold"))
  : h("p", {class: "wrong small"}, `The gold query does not run: ${found.message}`));

function resultTable(title, {columns, rows, count, width}, pairs, side, wrong = []) {
  const sides = {gold: ["own", "−", "missing in the prediction"], own: ["gold", "+", "not in the gold result"]};
  const [beside, sign, words] = sides[side];
  const lines = pairs.map(pair => {
    const row = pair[side], other = pair[beside], signed = other ? ["↕", "at another place"] : [sign, words];
    const isMarked = row && (!other || pair.moved);
    return h("tr", {class: row && !other ? "alone" : null},
      h("td", {class: "sign", title: isMarked ? signed[1] : null}, isMarked && signed[0]),
      row ? row.map((cell, n) => h("td", {class: other && !isSame(cell, other[n]) ? "differs" : null}, cellText(cell)))
        : h("td", {colspan: Math.max(1, columns.length)}, "\u00a0"));
  });
  const cut = [count > rows.length && `first ${rows.length} of ${plural(count, "row")}`,
    width > columns.length && `first ${columns.length} of ${plural(width, "column")}`].filter(Boolean).join(", ");
  const heads = [h("th", {class: "sign"}), ...columns.map((name, n) => h("th", {class: wrong[n] ? "differs" : null}, name))];
  return h("div", {class: "result"}, who(title, cut || plural(count, "row")), h("div", {class: "scroll"}, table(heads, lines)));
}
