// Results of queries, and what sets one apart from the gold query's: the rows that one of the two has alone.

const cellText = cell => cell === null ? h("i", {class: "muted"}, "NULL")
  : typeof cell === "object" ? cell.number ?? `x'${cell.blob}'` : String(cell);

/** Name the rule of a run's environment; nothing of a result without one. */
const ownRule = ({settings: {"env.match": match}}) => match && `the rule of this run, env.match=${match}`;

/** Show a result, beside the gold's where they differ; a right one that differs names the rule. */
function results({result, correct}, {gold_result: wanted}, rule) {
  const [own, gold] = [result, wanted?.columns ? wanted : null].map(one => one?.rows.map(row => JSON.stringify(row)));
  const isEqual = gold && own.length === gold.length && own.every((row, n) => row === gold[n]);
  if (!gold || isEqual || correct && !rule)
    return resultTable(isEqual ? "result, equal to the gold's" : "result", result);
  const missing = lacking(gold, own), extra = lacking(own, gold);
  const words = [[missing, "missing"], [extra, "too many"]].map(([marks, what]) => {
    const count = marks.filter(Boolean).length;
    return count && `${plural(count, "row")} ${what}`;
  }).filter(Boolean);
  return [h("div", {class: "small muted"}, [correct && `right by ${rule}`,
    ...words.length ? words : ["the same rows in another order"]].filter(Boolean).join(", ")),
  h("div", {class: "results"}, resultTable("gold", wanted, missing, ["−", "missing in the prediction"]),
    resultTable("prediction", result, extra, ["+", "not in the gold result"]))];
}

/** Tell which rows the others lack; one that is there twice is looked for twice. */
function lacking(rows, others) {
  const left = [...others];
  return rows.map(row => {
    const place = left.indexOf(row);
    if (place >= 0) left.splice(place, 1);
    return place < 0;
  });
}

/** Show the witness against a query that is right by luck: its rows, and what both queries give there. */
const witness = found => [
  h("p", {class: "wrong"}, `Right by luck: on witness ${found.number}, with these rows, it is wrong.`),
  h("div", {class: "results"}, Object.entries(found.tables).map(([name, rows]) => rows.columns && resultTable(name, rows))),
  found.result.columns ? results(found, found)
    : h("p", {class: "wrong small"}, `There it does not run: ${found.result.message}`)];

const goldResult = found => found && (!found.columns
  ? h("p", {class: "wrong small"}, `The gold query does not run: ${found.message}`)
  : h("details", {class: "small"}, h("summary", {}, `its result, ${plural(found.count, "row")}`),
    resultTable("", found)));

/** Show a result; rows with a mark have a sign. */
function resultTable(title, {columns: names, rows, count, width}, marks = [], [sign, hint] = []) {
  const lines = rows.map((row, n) => h("tr", {class: marks[n] && "alone"},
    h("td", {class: "sign", title: marks[n] && hint}, marks[n] && sign), row.map(cell => h("td", {}, cellText(cell)))));
  const cut = [count > rows.length && `first ${rows.length} of ${plural(count, "row")}`,
    width > names.length && `first ${names.length} of ${plural(width, "column")}`].filter(Boolean).join(", ");
  return h("div", {class: "result"}, who(title, cut || plural(count, "row")),
    h("div", {class: "scroll"}, table([h("th", {class: "sign"}), ...names], lines)));
}
