// The curves: first those that say whether a training goes well, then every metric by its group.

// `health` is where a metric usually lies when all is well; `fixed` what is drawn.
const MAIN = [
  { title: "Validation score", metrics: ["val/score"], dots: true },
  { title: "Training reward", metrics: ["critic/score/mean"] },
  { title: "KL of the updates", metrics: ["actor/ppo_kl"], health: [0.001, 0.1] },
  { title: "Clip fraction", metrics: ["actor/pg_clipfrac"], health: [0.1, 0.3] },
  { title: "Entropy", metrics: ["actor/entropy"] },
  { title: "Probability ratio, extremes", metrics: ["actor/ratio_max", "actor/ratio_min"], health: [0.8, 1.2] },
  { title: "Explained variance of the values", metrics: ["critic/vf_explained_var"], fixed: [-1, 1] },
  { title: "KL to the reference", metrics: ["actor/reward_kl_penalty", "actor/kl_loss"] },
  { title: "Response length", metrics: ["response_length/mean"] },
  { title: "Log-prob gap to the sampler", metrics: ["rollout/logp_gap_mean", "rollout/logp_gap_max"], log: true },
  { title: "Gradient norm, actor", metrics: ["actor/grad_norm"] },
  { title: "Gradient norm, critic", metrics: ["critic/grad_norm"] },
  { title: "Learning rates", metrics: ["actor/lr", "critic/lr"] },
  { title: "Tokens a second", metrics: ["perf/throughput"] },
  { title: "Loss", metrics: ["sft/loss"] },
  { title: "Gradient norm", metrics: ["sft/grad_norm"] },
  { title: "Learning rate", metrics: ["sft/lr"] },
  { title: "Loss of pairs", metrics: ["rm/loss", "rm/val_loss"] },
  { title: "Accuracy on pairs", metrics: ["rm/accuracy", "rm/val_accuracy"] },
];
const DASHES = [null, "5 3", "2 3"];
const ERROR = /^[_/](se|sem|stderr|std_err|std_error|standard_error)$/;
const charts = [];

// The lines of a card: each metric of each run that has it.
function linesOf(runs, metrics, more = {}) {
  const several = runs.length > 1;
  const present = metrics.filter((name) => runs.some((run) => run.curves.series[name]));
  const tails = present.map((name) => name.split("/").slice(1).join("/") || name);
  const short = new Set(tails).size === present.length ? tails : present;
  return present.flatMap((name, m) => runs.flatMap((run, i) => {
    const series = run.curves.series[name];
    if (!series) return [];
    const error = Object.keys(run.curves.series).find((n) => n.startsWith(name) && ERROR.test(n.slice(name.length)));
    return [{
      ...more, run: i, axis: run.curves.axes[series.axis], mean: series.mean, low: series.low, high: series.high,
      colour: several || m === 0 ? runColour(i) : runColour(m), dash: several ? DASHES[m] : null,
      label: `${run.name} ${name}`, group: several && present.length > 1 ? short[m] : null,
      name: several ? (present.length > 1 ? null : run.name) : present.length > 1 ? short[m] : null,
      odd: run.curves.odd[name], error: error && run.curves.series[error].mean.length === series.mean.length ? run.curves.series[error].mean : null,
    }];
  }));
}

function addChart(runs, into, { title, metrics, health, dots, ...more }) {
  const lines = linesOf(runs, metrics, { dots });
  if (!lines.length) return;
  const range = health ? ` · usual range ${health[0]} to ${health[1]}` : more.fixed ? ` · drawn from ${more.fixed[0]} to ${more.fixed[1]}` : "";
  const error = lines.some((line) => line.error) ? " · ± and band: standard error" : "";
  const named = metrics.filter((name) => runs.some((run) => run.curves.series[name])).join(", ");
  const chart = makeChart({ title, about: title === named ? "" : named + range + error, lines, health, open: openSamples, ...more });
  chart.names = `${title} ${named}`.toLowerCase();
  charts.push(chart);
  into.append(chart.card);
}

// Moves the crosshair of every chart to a step; null takes it away.
function pointAt(step) {
  if (step === view.at) return;
  view.at = step;
  for (const chart of charts) chart.read();
}

function drawCurves(runs) {
  runs.forEach((_, i) => view.shown.add(i));
  const ends = runs.flatMap((run) => run.curves.axes).flatMap((axis) => [axis.steps[0], middle(axis, axis.steps.length - 1)]);
  if (ends.length) [view.first, view.last] = [Math.min(...ends), Math.max(...ends)];
  if (view.first === view.last) view.last += 1;
  for (const wanted of MAIN) addChart(runs, byId("main-curves"), wanted);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.series)))].sort();
  const folds = [...grouped(names)].map(([group, members]) => addGroup(runs, group, members));
  byId("more-curves").append(...folds);
  if (!names.length) byId("main-curves").append(element("p", { class: "soft" }, "There are no metrics."));
  const buckets = Math.max(1, ...runs.flatMap((run) => run.curves.axes.map((axis) => axis.width)));
  byId("curve-hint").textContent = !names.length ? "" : "Point at a chart, or use the arrow keys on it, to read every chart at that step; a double click or Enter leads to the step's samples."
    + (buckets > 1 ? ` A curve is the mean of up to ${buckets} steps, its shade the least and the greatest of them.` : "");
  listenToControls(runs, folds);
}

// The names by what stands before their first slash; those without one come last.
function grouped(names) {
  const groups = new Map();
  for (const name of [...names.filter((n) => n.includes("/")), ...names.filter((n) => !n.includes("/"))]) {
    const group = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  return groups;
}

function addGroup(runs, group, members) {
  const cards = element("div", { class: "cards" });
  const fold = element("details", {}, element("summary", {}, group, " ", element("span", { class: "soft" }, `${members.length} metrics`)), cards);
  for (const name of members) addChart(runs, cards, { title: name, metrics: [name], dots: name.startsWith("val/") });
  return fold;
}

function listenToControls(runs, folds) {
  const redraw = () => charts.forEach((chart) => chart.redraw());
  byId("smooth").addEventListener("input", (event) => {
    view.smooth = Number(event.target.value);
    byId("smooth-said").textContent = view.smooth ? view.smooth.toFixed(2) : "off";
    redraw();
  });
  byId("log").addEventListener("change", (event) => { view.log = event.target.checked; redraw(); });
  byId("curve-filter").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const chart of charts) chart.card.hidden = !chart.names.includes(wanted);
    for (const fold of folds) {
      const any = [...fold.querySelectorAll(".card")].some((card) => !card.hidden);
      fold.hidden = !any;
      fold.open = wanted !== "" && any;
    }
  });
  if (runs.length < 2) return;
  byId("legend").append(...runs.map((run, i) => element("label", {},
    element("input", { type: "checkbox", checked: true, onchange: (event) => {
      if (event.target.checked) view.shown.add(i); else view.shown.delete(i);
      redraw();
    } }), " ", dot(runColour(i)), run.name)));
}
