// The tokens of a sample, coloured by one of their recorded quantities around 0. Each number is also written out.

const QUANTITIES = {
  reward: "reward", value: "value", advantage: "advantage",
  log_ratio_engine: "log-ratio to the engine", log_ratio_reference: "log-ratio to the reference",
};
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const records = new Map();
let colouredBy = ""; // in all samples, also in those that are shown later

function recordsOf(id) {
  if (!records.has(id)) records.set(id, byId(id) ? unpack(id) : []);
  return records.get(id);
}

// Adds a choice of the quantity to the block of a response, whose tokens replace its text.
function offerTokens(box, id, index) {
  const plain = [...box.children].slice(1);
  const choice = element("select", {}, element("option", { value: "" }, "none"));
  const view = element("div", {});
  let record;
  const show = () => {
    const on = record && choice.value;
    for (const node of plain) node.hidden = Boolean(on);
    view.replaceChildren(...(on ? tokenView(record, choice.value) : []));
  };
  box.children[0].after(element("label", { class: "colouring" }, "Tokens coloured by ", choice), view);
  const follow = () => {
    if ([...choice.options].some((option) => option.value === colouredBy)) choice.value = colouredBy;
    show();
  };
  choice.follow = follow;
  choice.addEventListener("change", () => {
    colouredBy = choice.value;
    document.querySelectorAll(".colouring select").forEach((other) => other.follow());
  });
  return recordsOf(id).then?.((found) => {
    record = found[index];
    const known = Object.keys(QUANTITIES).filter((name) => record && Array.isArray(record[name]));
    choice.append(...known.map((name) => element("option", { value: name }, QUANTITIES[name])));
    follow();
  });
}

function tokenView(record, name) {
  const numbers = record[name].filter((value) => typeof value === "number");
  const most = numbers.reduce((top, value) => Math.max(top, Math.abs(value)), 0);
  const readout = element("div", { class: "values", role: "status" }, element("span", { class: "soft" }, "Point at a token, tap it, or use the arrow keys: its numbers stand here."));
  const tokens = record.pieces.map((piece, i) => element("span", { class: record.trained[i] === false ? "token untrained" : "token", "data-i": i, style: colour(record[name][i], most) }, shown(piece)));
  const half = record.gone ? tokens.length / 2 : -1;
  const text = element("p", { class: "text tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": `Tokens coloured by ${QUANTITIES[name]}: arrow keys read their numbers` },
    tokens.flatMap((token, i) => (i === half ? [`\n[… ${whole(record.gone)} tokens are left out here …]\n`, token] : [token])));
  let current = -1;
  const read = (i) => {
    tokens[current]?.classList.remove("current");
    current = Math.min(Math.max(i, 0), tokens.length - 1);
    tokens[current].classList.add("current");
    readout.classList.add("read"); // stays in sight below a long text
    readout.replaceChildren(...values(record, current, name));
  };
  text.onpointermove = text.onpointerdown = (event) => {
    const token = event.target.closest(".token");
    if (token) read(Number(token.dataset.i));
  };
  text.onkeydown = (event) => {
    const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined || !tokens.length) return;
    read(to);
    tokens[current].scrollIntoView({ block: "nearest" });
    event.preventDefault();
  };
  const plain = record.pieces.join("");
  const fold = isLong(plain) ? folding(text, `all ${whole(record.pieces.length + record.gone)} tokens`) : null;
  return [scale(numbers, most, record.trained.includes(false)), text, fold, readout].filter(Boolean);
}

// The background of a number: stronger, the farther it is from 0.
function colour(value, most) {
  if (typeof value !== "number" || !most) return null;
  return `background-color: rgb(var(--${value < 0 ? "below" : "above"}) / ${(Math.abs(value) / most).toFixed(3)})`;
}

function scale(numbers, most, untrained) {
  const ends = numbers.length ? `lowest ${said(Math.min(...numbers))}, highest ${said(Math.max(...numbers))}` : "no numbers";
  return element("div", { class: "scale" }, element("span", {}, said(-most)), element("span", { class: "bar" }), element("span", {}, said(most)),
    element("span", { class: "soft" }, ends), untrained ? element("span", { class: "untrained" }, "not trained on") : null);
}

// All numbers of a token, for people who do not see colours, or not well enough.
function values(record, i, name) {
  const place = record.gone && i >= record.pieces.length / 2 ? i + record.gone : i;
  const id = record.tokens ? `, id ${record.tokens[i]}` : "";
  const known = Object.keys(QUANTITIES).filter((key) => Array.isArray(record[key]));
  const number = (value) => (typeof value === "number" ? said(value) : value === null ? "–" : String(value));
  return [
    element("span", {}, `token ${whole(place + 1)} of ${whole(record.pieces.length + record.gone)}${id} `, element("bdi", { class: "mono" }, `“${escaped(record.pieces[i])}”`)),
    ...(record.trained[i] === false ? [element("span", { class: "soft" }, "not trained on: given to the model, or rejected")]
      : known.map((key) => element("span", { class: key === name ? "chosen" : null }, `${QUANTITIES[key]} ${number(record[key][i])}`))),
  ];
}

const escape = (letter) => (letter === "\n" ? "\\n" : letter === "\t" ? "\\t" : letter.codePointAt(0) < 256 ? `\\x${letter.codePointAt(0).toString(16).padStart(2, "0")}` : `\\u{${letter.codePointAt(0).toString(16)}}`);
const escaped = (piece) => piece.replace(UNSEEN, escape);

// The text of a token, with marks for what has no picture: a line break still breaks the line.
function shown(piece) {
  const mark = (text) => element("span", { class: "unseen" }, text);
  if (piece === "") return [mark("·")]; // its character ends in a later token
  return piece.split(/([\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}])/u).filter(Boolean)
    .flatMap((part) => (part === "\n" ? [mark("↵"), "\n"] : part.match(UNSEEN) ? [mark(escape(part))] : [part]));
}
