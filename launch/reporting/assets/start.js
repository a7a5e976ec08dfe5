// Keys, colours, and the beginning.

const HELP = [["j, k", "next and previous question"], ["f", "only questions that flipped: to right, to wrong, all"],
  ["/", "search"], ["[, ]", "other episodes of the group"], ["t", "token layer, where tokens were recorded"],
  ["d", "dark or light"], ["Esc", "back to all questions"], ["?", "these keys"]];

async function show() {
  const state = address(), isDetail = "q" in state;
  $("overview").hidden = isDetail;
  $("detail").hidden = !isDetail;
  if (isDetail) { if (show.last !== state.q) scrollTo(0, 0); await detail(state); } else { questions(state);
    if (state.to) $(state.to)?.scrollIntoView(); }
  show.last = state.q;
}

function paintAgain() {
  drawn.forEach(each => each.redraw());
}

function turnLights() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  paintAgain();
}

function otherMember(by) {
  const panes = document.querySelectorAll("#detail .group"), last = panes[panes.length - 1];
  const all = [...last?.querySelectorAll(".member") ?? []],
    at = all.findIndex(each => each.getAttribute("aria-pressed") === "true");
  all[at + by]?.click();
}

const ACTIONS = {
  j: () => address().q ? detail.step?.(1) : document.querySelector("tr[data-id] a")?.click(),
    k: () => address().q && detail.step?.(-1),
  f: () => { const order = [undefined, "right", "wrong"];
    adjust({flip: order[(order.indexOf(address().flip) + 1) % 3] ?? null, to: null});
    if (!address().q) $("questions").scrollIntoView(); },
  "/": () => { if (address().q) go({q: null}); setTimeout(() => { $("find")?.focus();
    $("find")?.scrollIntoView({block: "center"}); }); },
  "[": () => otherMember(-1), "]": () => otherMember(1), d: turnLights, "?": () => $("keys").showModal(),
  t: () => { const order = ["", ...Object.keys(TOKENS)];
    adjust({tok: order[(order.indexOf(address().tok ?? "") + 1) % order.length]}); },
  Escape: () => { if (address().q) go({q: null, na: null, nb: null, to: "questions"}); },
};

addEventListener("keydown", event => {
  if (event.target.matches("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const action = ACTIONS[event.key];
  if (action) { event.preventDefault(); action(); }
});
addEventListener("hashchange", show);

(async () => {
  $("theme").addEventListener("click", turnLights);
  $("help").addEventListener("click", () => $("keys").showModal());
  fill($("keys"), h("h2", {}, "Keys"), h("table", {}, HELP.map(([key, words]) =>
    h("tr", {}, h("td", {}, key.split(", ").map(each => [h("kbd", {}, each), " "])), h("td", {}, words)))),
    h("p", {}, h("button", {onclick: () => $("keys").close()}, "close")));
  document.querySelectorAll("#bar a").forEach(each =>
    each.addEventListener("click", event => { event.preventDefault(); const to = each.hash.slice(1);
    go({q: null, na: null, nb: null, to: to || "verdict"}); }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAgain);
  data = await unpack("overview");
  if (data.version !== 1) throw new Error(`version ${data.version} of the data`);
  verdict();
  curves();
  await show();
  document.documentElement.dataset.ready = Math.round(performance.now());
})().catch(error => { fill($("verdict"),
  h("p", {class: "note"}, `This page cannot be shown: ${error.message}. It needs a browser of 2024 or later.`)); throw error; });
