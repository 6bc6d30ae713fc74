// The samples: choose a run and a step, search, filter, sort. A step is unpacked when somebody looks at it.

const PAGE = 20; // samples that are shown at once
const FOLD = 420; // characters from which a text is folded
const KNOWN = ["uid", "prompt", "response", "ground_truth", "score", "parts", "error", "finish", "given", "token_record"];
const ORDERS = {
  "as in the file": null,
  "score, lowest first": (a, b) => (scoreOf(a) ?? -Infinity) - (scoreOf(b) ?? -Infinity),
  "score, highest first": (a, b) => (scoreOf(b) ?? -Infinity) - (scoreOf(a) ?? -Infinity),
  "response, longest first": (a, b) => textOf(b.response).length - textOf(a.response).length,
  "response, shortest first": (a, b) => textOf(a.response).length - textOf(b.response).length,
};
const unpacked = new Map();
let openSamples = () => {};

const scoreOf = (row) => (typeof row.score === "number" ? row.score : null);
const entryName = (entry) => (entry.kind === "test" ? `test after step ${whole(entry.step)}` : `step ${whole(entry.step)}`);

// A text, chat messages or whatever else stands there, as one text.
function textOf(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (isChat(value)) return value.map((message) => textOf(message.content)).join("\n");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const isChat = (value) => Array.isArray(value) && value.length > 0 && value.every((m) => m && typeof m === "object" && "role" in m);

function rowsOf(run, entry) {
  const id = `samples-${run}-${entry.kind}-${entry.step}`;
  if (!unpacked.has(id)) unpacked.set(id, unpack(id));
  return unpacked.get(id);
}

function drawSamples(runs) {
  const into = byId("sample-browser");
  const usable = runs.map((_, i) => i).filter((i) => runs[i].samples.length);
  if (!usable.length) {
    into.append(element("p", { class: "soft" }, "There are no samples."));
    return;
  }
  const choice = (names) => element("select", {}, names.map((name) => element("option", { value: name }, name)));
  const field = (type, more) => element("input", { type, ...more });
  const ask = {
    run: element("select", {}, usable.map((i) => element("option", { value: i }, runs[i].name))),
    step: element("select"),
    search: field("search", { placeholder: "words of a prompt or response" }),
    everywhere: field("checkbox"),
    low: field("number", { step: "any" }), high: field("number", { step: "any" }),
    only: choice(["all", "graded", "not graded", "cut by its length", "with token values"]),
    order: choice(Object.keys(ORDERS)),
  };
  const before = element("button", { type: "button", "aria-label": "the step before" }, "‹");
  const after = element("button", { type: "button", "aria-label": "the step after" }, "›");
  const status = element("p", { class: "soft", role: "status" });
  const list = element("div");
  const more = element("button", { type: "button" }, "show more");
  const label = (text, ...inputs) => element("label", {}, text, " ", inputs);
  into.append(
    element("div", { class: "controls" }, runs.length > 1 ? label("Run", ask.run) : null, element("span", {}, label("Samples of", ask.step), " ", before, " ", after),
      element("label", { class: "grow" }, "Search ", ask.search), label("", ask.everywhere, " in every step")),
    element("div", { class: "controls" }, label("Score from", ask.low), label("to", ask.high), label("Show", ask.only), label("Sort by", ask.order)),
    element("p", { class: "hint" }), status, list, more);
  let found = [], shown = 0, wanted = 0;

  const run = () => Number(ask.run.value);
  const entries = () => runs[run()].samples;
  function listSteps() {
    ask.step.replaceChildren(...["step", "test"].map((kind) => {
      const options = entries().map((entry, k) => [entry, k]).filter(([entry]) => entry.kind === kind)
        .map(([entry, k]) => element("option", { value: k }, entryName(entry)));
      return options.length ? element("optgroup", { label: kind === "step" ? "training" : "greedy tests" }, options) : null;
    }).filter(Boolean));
    const last = entries().map((entry) => entry.kind).lastIndexOf("step");
    ask.step.value = last < 0 ? entries().length - 1 : last;
    const leftOut = [runs[run()].left_out, runs[run()].tokens_left_out].filter(Boolean).join("; ");
    into.querySelector(".hint").textContent = leftOut ? `${leftOut}; all of them are in ${runs[run()].path}/samples/.` : "";
  }

  async function look() {
    const mine = ++wanted;
    const chosen = ask.everywhere.checked ? entries() : [entries()[Number(ask.step.value)]];
    status.textContent = "reading …";
    const words = ask.search.value.toLowerCase();
    const [low, high] = [ask.low, ask.high].map((input) => (input.value === "" ? null : Number(input.value)));
    const hits = [];
    let all = 0;
    for (const entry of chosen) {
      const rows = await rowsOf(run(), entry);
      if (mine !== wanted) return; // somebody has asked for something else meanwhile
      all += rows.length;
      rows.forEach((row, k) => { if (fits(row, words, low, high, ask.only.value)) hits.push({ run: run(), row, entry, k }); });
    }
    const order = ORDERS[ask.order.value];
    if (order) hits.sort((a, b) => order(a.row, b.row));
    found = hits;
    shown = 0;
    list.replaceChildren();
    const of = chosen.length === 1 ? entryName(chosen[0]) : `${whole(chosen.length)} steps and tests`;
    const scores = hits.map((hit) => scoreOf(hit.row)).filter((score) => score !== null);
    const mean = scores.length ? `, mean score ${said(scores.reduce((sum, score) => sum + score, 0) / scores.length)}` : "";
    const kept = chosen.length === 1 && chosen[0].kept < chosen[0].of ? ` (of ${whole(chosen[0].of)} in the file)` : "";
    status.textContent = `${whole(hits.length)} of ${whole(all)} samples of ${of}${kept}${mean}`;
    before.disabled = after.disabled = ask.everywhere.checked;
    showMore();
  }

  function showMore() {
    list.append(...found.slice(shown, shown + PAGE).map((hit) => sampleCard(hit, ask.search.value, ask.everywhere.checked)));
    shown = Math.min(shown + PAGE, found.length);
    more.hidden = shown >= found.length;
    more.textContent = `show more (${whole(found.length - shown)} left)`;
  }

  const move = (by) => {
    const options = [...ask.step.options].map((option) => option.value);
    const next = options[options.indexOf(ask.step.value) + by];
    if (next !== undefined) { ask.step.value = next; look(); }
  };
  openSamples = (number, step, kind = "step") => {
    if (!usable.includes(number)) return;
    if (run() !== number) { ask.run.value = number; listSteps(); }
    const near = entries().map((entry, k) => [Math.abs(entry.step - step) + (entry.kind === kind ? 0 : 1e12), k]).sort((a, b) => a[0] - b[0]);
    ask.step.value = near[0][1];
    ask.everywhere.checked = false;
    byId("samples").scrollIntoView();
    look();
  };
  before.addEventListener("click", () => move(-1));
  after.addEventListener("click", () => move(1));
  more.addEventListener("click", showMore);
  ask.run.addEventListener("change", () => { listSteps(); look(); });
  let timer = 0;
  const soon = () => { clearTimeout(timer); timer = setTimeout(look, 150); };
  for (const input of [ask.step, ask.everywhere, ask.only, ask.order]) input.addEventListener("change", look);
  for (const input of [ask.search, ask.low, ask.high]) input.addEventListener("input", soon);
  listSteps();
  return look();
}

function fits(row, words, low, high, only) {
  const score = scoreOf(row);
  if (low !== null && !(score !== null && score >= low)) return false;
  if (high !== null && !(score !== null && score <= high)) return false;
  if (only === "graded" && score === null) return false;
  if (only === "not graded" && score !== null) return false;
  if (only === "cut by its length" && row.finish !== "length") return false;
  if (only === "with token values" && !Number.isInteger(row.token_record)) return false;
  return !words || textOf(row.prompt).toLowerCase().includes(words) || textOf(row.response).toLowerCase().includes(words);
}

function sampleCard({ run, row, entry, k }, words, named) {
  const score = scoreOf(row);
  const parts = row.parts && typeof row.parts === "object" ? Object.entries(row.parts) : [];
  const others = Object.entries(row).filter(([key, value]) => !KNOWN.includes(key) && value !== null);
  const brief = ["string", "number"].includes(typeof row.ground_truth) && /^.{1,40}$/.test(textOf(row.ground_truth));
  const facts = element("div", { class: "facts" },
    score === null ? element("span", { class: "score bad" }, "no score") : element("span", { class: "score" }, `score ${said(score)}`),
    brief ? element("span", {}, "truth ", element("b", {}, textOf(row.ground_truth))) : null,
    parts.map(([name, value]) => element("span", { class: "chip" }, `${name} ${typeof value === "number" ? said(value) : textOf(value)}`)),
    row.given ? element("span", { class: "chip" }, "given, not sampled") : null,
    row.finish === undefined ? null : element("span", { class: row.finish === "stop" ? "soft" : "bad" }, `ended by ${textOf(row.finish)}`),
    element("span", { class: "soft" }, [named ? entryName(entry) : null, row.uid === undefined ? `no. ${k + 1}` : textOf(row.uid)].filter(Boolean).join(" · ")));
  const response = block("Response", row.response, words);
  if (Number.isInteger(row.token_record)) offerTokens(response, `tokens-${run}-${entry.step}`, row.token_record);
  const texts = element("div", { class: "texts" }, block("Prompt", row.prompt, words), response,
    brief || textOf(row.ground_truth) === "" ? null : block("Truth", row.ground_truth, ""),
    row.error ? block("Error", row.error, "", "bad") : null,
    others.length ? block("Further fields", others.map(([key, value]) => `${key}: ${textOf(value)}`).join("\n"), "") : null);
  return element("article", { class: "card sample" }, facts, texts);
}

// A text under its title; a long one is folded.
function block(title, value, words, kind = "") {
  const content = isChat(value)
    ? value.flatMap((message, i) => [i ? "\n" : "", element("span", { class: "role" }, `${textOf(message.role)}: `), ...marked(textOf(message.content), words)])
    : marked(textOf(value), words);
  const text = element("p", { class: `text ${kind}`, dir: "auto" }, content);
  const box = element("div", { class: title === "Further fields" || title === "Error" ? "whole" : null }, element("h4", {}, title), text);
  const plain = textOf(value);
  if (isLong(plain)) box.append(folding(text, `all ${whole(plain.length)} characters`));
  return box;
}

const isLong = (plain) => plain.length > FOLD || plain.split("\n").length > 7;

// Folds the text; the button that unfolds it says `all`.
function folding(text, all) {
  text.classList.add("folded");
  const fold = element("button", { type: "button", class: "fold", "aria-expanded": "false", onclick: () => {
    const folded = text.classList.toggle("folded");
    fold.textContent = folded ? all : "fold";
    fold.setAttribute("aria-expanded", String(!folded));
  } }, all);
  return fold;
}

// The text in pieces, what is searched for in <mark>.
function marked(text, words) {
  if (!words) return [text];
  const pieces = [], low = text.toLowerCase(), wanted = words.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0 && low.length === text.length; at = low.indexOf(wanted, from)) {
    pieces.push(text.slice(from, at), element("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...pieces, text.slice(from)];
}
