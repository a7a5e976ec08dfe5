// Keys, colours, and the beginning.

const ONTO = {right: "wrong", wrong: null};
const KEYS = { // what a key does, and the element that it clicks or the function that it calls
  j: ["next question", "#next, #overview:not([hidden]) [data-id] a"],
  k: ["previous question", "#previous"],
  f: ["only questions that flipped: to right, to wrong, all", () => {
    const {flip, q} = address();
    location.hash = link({flip: flip in ONTO ? ONTO[flip] : "right", to: q === undefined ? "questions" : null});
  }],
  "/": ["search", () => {
    location.hash = link({q: null, na: null, nb: null, to: "find"});
    $("find")?.focus();
  }],
  "[": ["the episode before in the group", () => document.querySelector(
    ".pane:last-child .member[aria-current]")?.previousElementSibling?.click()],
  "]": ["the episode after it", ".pane:last-child .member[aria-current] + .member"],
  t: ["token layer, where tokens were recorded", () => {
    const order = ["", ...Object.keys(TOKENS)];
    location.hash = link({tok: order[(order.indexOf(address().tok ?? "") + 1) % order.length]});
  }],
  d: ["dark or light", "#theme"],
  Escape: ["back to all questions", "#detail:not([hidden]) #back"],
  "?": ["these keys", "#help"],
};

addEventListener("keydown", event => {
  if (event.target.matches("input, select") && event.key === "Escape") event.target.blur();
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = KEYS[event.key]?.[1];
  if (!action) return;
  event.preventDefault();
  if (typeof action === "string") document.querySelector(action)?.click();
  else action();
});

function turnLights(isDark) {
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  drawn.forEach(draw => draw());
}

let shown; // the question that is shown
async function show() {
  const state = chosen(address()), isDetail = "q" in state;
  $("overview").hidden = isDetail;
  $("detail").hidden = !isDetail;
  if (isDetail && shown !== state.q) scrollTo(0, 0);
  shown = state.q;
  if (isDetail) return detail(state);
  questions(state);
  $(state.to)?.scrollIntoView();
  if (state.to === "find") $("find").focus();
}

async function start() {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", () => turnLights(scheme.matches));
  turnLights(scheme.matches);
  $("theme").onclick = () => turnLights(document.documentElement.style.colorScheme === "light");
  fill($("keys"), h("h2", {}, "Keys"), table(null, Object.entries(KEYS).map(([key, [words]]) => [h("kbd", {}, key), words])));
  data = await unpack("overview");
  if (data.version !== 2) throw new Error(`version ${data.version} of the data`);
  verdict();
  curves();
  addEventListener("hashchange", show);
  await show();
  document.documentElement.dataset.ready = Math.round(performance.now());
}

start().catch(error => {
  fill($("verdict"), h("p", {class: "note"}, `This page cannot be shown: ${error.message}. It needs a browser of 2025 or later.`));
  throw error;
});
