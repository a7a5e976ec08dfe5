// Results of queries, and what sets one apart from the gold query's: `beside` pairs their columns and rows, and
// says in which columns each pair of rows differs; equal results have none.

const cellText = cell => cell === null ? h("i", {class: "muted"}, "NULL")
  : typeof cell === "object" ? cell.number ?? `x'${cell.blob}'` : String(cell);

/** Show a result, beside the gold's where they differ; a right one that differs names the rule. */
function results({result, correct, beside}, {gold_sql: gold, gold_result: wanted}, rule) {
  if (!beside || correct && !rule)
    return resultTable(wanted?.columns && !beside ? "result, equal to the gold's" : "result", result);
  const inOrder = /\border\s+by\b/i.test(gold), {columns, rows, differs} = beside;
  const pairs = rows.map((places, n) => ({places, differs: differs[n], moved: inOrder && !places.includes(null)
    && places[0] !== places[1]}));
  const both = pairs.filter(({places}) => !places.includes(null));
  const wrong = columns.map((pair, n) => pair.includes(null) || both.length > 0 && both.every(each => each.differs.includes(n)));
  const alone = side => columns.filter(pair => pair[1 - side] === null).length;
  const counts = {
    "column missing": alone(0), "column too many": alone(1),
    "row missing": pairs.filter(({places}) => places[1] === null).length,
    "row too many": pairs.filter(({places}) => places[0] === null).length,
    "row in another order": pairs.filter(({moved}) => moved).length,
    "row with other values": both.filter(each => each.differs.some(n => !columns[n].includes(null))).length,
  };
  const words = Object.entries(counts).map(([what, count]) => {
    const [noun, ...rest] = what.split(" ");
    return count && [plural(count, noun), ...rest].join(" ");
  });
  return [h("div", {class: "small muted"}, [correct && `right by the rule of this run, env.match=${rule}`, ...words]
    .filter(Boolean).join(", ")),
  h("div", {class: "results"}, resultTable("gold", wanted, {pairs, columns, side: 0, wrong}),
    resultTable("prediction", result, {pairs, columns, side: 1, wrong}))];
}

/** Show the witness against a query that is right by luck: its rows, and what both queries give there. */
const witness = (found, gold) => [
  h("p", {class: "wrong"}, `Right by luck: on witness ${found.number}, with these rows, it is wrong.`),
  h("div", {class: "results"}, Object.entries(found.tables).map(([name, rows]) => rows.columns && resultTable(name, rows))),
  found.result.columns ? results(found, {gold_sql: gold, gold_result: found.gold_result})
    : h("p", {class: "wrong small"}, `There it does not run: ${found.result.message}`)];

const goldResult = found => found && (!found.columns
  ? h("p", {class: "wrong small"}, `The gold query does not run: ${found.message}`)
  : h("details", {class: "small"}, h("summary", {}, `its result, ${plural(found.count, "row")}`),
    resultTable("", found)));

const ALONE = [["−", "missing in the prediction"], ["+", "not in the gold result"]];

/** Show a result, or one side of two: columns and rows in the same order, a sign where a side has no other. */
function resultTable(title, {columns: names, rows, count, width}, beside = null) {
  const order = beside?.columns.map(pair => pair[beside.side]) ?? names.map((_, n) => n);
  const shown = order.map((place, n) => [place, n]).filter(([place]) => place !== null);
  const lines = beside ? beside.pairs.map(({places, differs, moved}) => {
    const row = rows[places[beside.side]], isAlone = places.includes(null);
    const [sign, title] = !row ? [] : isAlone ? ALONE[beside.side] : moved ? ["↕", "at another place"] : [];
    return h("tr", {class: row && isAlone ? "alone" : null}, h("td", {class: "sign", title}, sign),
      row ? shown.map(([place, n]) => h("td", {class: differs.includes(n) ? "differs" : null}, cellText(row[place])))
        : h("td", {colspan: Math.max(1, shown.length)}, "\u00a0"));
  }) : rows.map(row => h("tr", {}, h("td", {class: "sign"}), row.map(cell => h("td", {}, cellText(cell)))));
  const cut = [count > rows.length && `first ${rows.length} of ${plural(count, "row")}`,
    width > names.length && `first ${names.length} of ${plural(width, "column")}`].filter(Boolean).join(", ");
  const heads = shown.map(([place, n]) => h("th", {class: beside?.wrong[n] ? "differs" : null}, names[place]));
  return h("div", {class: "result"}, who(title, cut || plural(count, "row")),
    h("div", {class: "scroll"}, table([h("th", {class: "sign"}), ...heads], lines)));
}
