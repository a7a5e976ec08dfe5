// Keys, colours, and the beginning.

const KEYS = { // what a key does, and the element that it clicks or the function that it calls
  j: ["next question", "#next, #overview:not([hidden]) [data-id] a"],
  k: ["previous question", "#previous"],
  f: ["only questions that flipped: to right, to wrong, all", () => {
    const {flip, q, a, b} = chosen(address()), next = {right: "wrong", wrong: null};
    if (a === b) return; // one place has no flips
    location.hash = link({flip: flip in next ? next[flip] : "right", to: q === undefined ? "questions" : null});
  }],
  "/": ["search", () => {
    location.hash = link({q: null, na: null, nb: null, to: "find"});
    $("find")?.focus();
  }],
  "[": ["the episode before in the group", ".pane:last-child .member:has(+ [aria-current])"],
  "]": ["the episode after it", ".pane:last-child [aria-current] + .member"],
  d: ["dark or light", "#theme"],
  Escape: ["back to all questions", "#detail:not([hidden]) #back"],
  "?": ["these keys", "#help"],
};

addEventListener("keydown", event => {
  const isTyping = event.target.matches("input, select"), action = KEYS[event.key]?.[1];
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping || !action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (typeof action === "string") document.querySelector(action)?.click();
  else action();
});

function turnLights(isDark) {
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  drawAll();
}

async function show() {
  const state = chosen(address()), isDetail = "q" in state;
  if (isDetail && state.q !== show.last) scrollTo(0, 0);
  show.last = state.q;
  $("overview").hidden = isDetail;
  $("detail").hidden = !isDetail;
  if (isDetail) return detail(state.q);
  if (show.rule !== state.rule) verdict();
  show.rule = state.rule;
  questions(state);
  $(state.to)?.scrollIntoView();
  if (state.to === "find") $("find").focus();
}

async function start() {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  turnLights(scheme.matches);
  scheme.onchange = () => turnLights(scheme.matches);
  $("theme").onclick = () => turnLights(document.documentElement.style.colorScheme === "light");
  fill($("keys"), table(null, Object.entries(KEYS).map(([key, [words]]) => [h("kbd", {}, key), words])));
  data = await unpack("overview");
  verdict();
  curves();
  onhashchange = show;
  await show();
  drawAll();
  document.documentElement.dataset.ready = Math.round(performance.now());
}

start().catch(error => {
  fill($("verdict"), `This page cannot be shown: ${error.message}. It needs a browser of 2025 or later.`);
  throw error;
});
