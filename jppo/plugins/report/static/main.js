// The page from top to bottom.

function drawTop(doc) {
  const [run] = doc.runs, several = doc.runs.length > 1;
  byId("top").append(element("h1", {}, several ? `${doc.runs.length} runs side by side` : run.name));
  if (several) byId("top").append(runTable(doc.runs));
  else byId("top").append(element("p", { class: "soft" }, ...stateOf(run), run.written && run.step ? ` · last step logged ${run.written}` : null), tiles(run));
}

const stateOf = (run) => {
  const far = run.total === null ? `step ${whole(run.step)}` : `step ${whole(run.step)} of ${whole(run.total)}`;
  const all = run.total !== null && run.step >= run.total;
  return [run.finished ? element("span", { class: "good" }, "finished") : element("span", { class: "bad" }, all ? "no model in hf/" : "not finished"), `, ${far}`];
};

function tiles(run) {
  const tile = (name, value, small) => (value === null ? null : element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, value, small ? element("small", {}, small) : null)));
  const speed = run.seconds > 0 && run.tokens > 0 ? `${said(run.tokens / run.seconds)} a second, all in all` : null;
  return element("dl", { class: "tiles" },
    tile("Best validation score", run.best && said(run.best[1]), run.best && `after step ${whole(run.best[0])}`),
    tile("Last validation score", run.last && said(run.last[1]), run.last && `after step ${whole(run.last[0])}`),
    tile("Steps", whole(run.step), run.total === null ? null : `of ${whole(run.total)}`),
    tile("Time", duration(run.seconds), "of all stages"),
    tile("Tokens", run.tokens > 0 ? short(run.tokens) : null, speed),
    ...Object.entries(run.versions).map(([name, version]) => tile(name, version, "by its log")));
}

const short = (count) => (count >= 1e9 ? `${said(count / 1e9)} B` : count >= 1e6 ? `${said(count / 1e6)} M` : whole(count));

function runTable(runs) {
  const names = ["best validation", "last validation", "time", "tokens"];
  const heads = ["run", "state", ...names].map((name) => element("th", { scope: "col" }, name));
  const score = (one) => (one ? [element("b", {}, said(one[1])), element("span", { class: "soft" }, ` at ${whole(one[0])}`)] : "–");
  const rows = runs.map((run, i) => element("tr", {},
    element("th", { scope: "row" }, dot(runColour(i)), run.name), element("td", {}, ...stateOf(run)),
    [score(run.best), score(run.last), duration(run.seconds), short(run.tokens)].map((value, k) => element("td", { "data-name": names[k] }, value))));
  return element("div", { class: "scroll runs" }, element("table", {}, element("thead", {}, element("tr", {}, heads)), element("tbody", {}, rows)));
}

// What the run warned of with its remedies, metrics that were no numbers, and what of the folder is missing.
function drawWarnings(runs) {
  const found = runs.flatMap((run, i) => {
    const of = runs.length > 1 ? [dot(runColour(i)), `${run.name}: `] : [];
    const warned = run.warnings.map((one) => {
      const when = one.first === null || one.last === null ? "" : one.count === 1 ? `at step ${whole(one.first)}` : `${whole(one.count)} times, from step ${whole(one.first)} to ${whole(one.last)}`;
      return element("div", { class: "alert" }, element("p", {}, of, element("b", {}, one.name), ` ${when}`),
        one.found ? element("p", {}, one.found) : null, one.remedy ? element("p", {}, element("b", {}, "Remedy: "), one.remedy) : null);
    });
    const odd = Object.entries(run.curves.odd).map(([name, { count, steps: at }]) => element("div", { class: "alert" },
      element("p", {}, of, element("b", {}, name), ` was no finite number at ${count === 1 ? "step" : `${whole(count)} steps:`} ${at.slice(0, 10).map(whole).join(", ")}${count > 10 ? " …" : ""}`)));
    const notes = run.notes.map((note) => element("div", { class: "alert quiet" }, of, note));
    return [...warned, ...odd, ...notes];
  });
  if (!found.length) return;
  byId("warnings").hidden = false;
  byId("warning-list").append(...found.slice(0, 6));
  if (found.length > 6) byId("warning-list").append(element("details", {}, element("summary", {}, `${found.length - 6} more`), found.slice(6)));
}

async function main() {
  const doc = await unpack("data");
  drawTop(doc);
  drawWarnings(doc.runs);
  drawCurves(doc.runs);
  drawStages(doc.runs);
  drawScores(doc.runs, doc.levels);
  drawSettings(doc.runs, doc.settings);
  byId("foot").append(`Made by jppo ${doc.jppo}, ${doc.made}, from ${doc.runs.map((run) => run.path).join(", ")}.`);
  await drawSamples(doc.runs);
  // Two frames later it is on the screen.
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.drawn = Math.round(performance.now()); }));
}

main().catch((error) => {
  byId("top").append(element("p", { class: "alert" }, `This page could not be drawn: ${error}`));
  throw error;
});
