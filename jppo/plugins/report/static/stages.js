// Where the time went: stacked bars over the steps, and a table of totals.

const STAGES = ["start", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "testing", "save", "other"];

// A stage's colour is the same in every report; a stage that the page does not know takes one in turn.
const stageColour = (name, i) => `var(--stage-${STAGES.includes(name) ? STAGES.indexOf(name) : 1 + (i % 11)})`;

const seconds = (value) => (value >= 1000 ? whole(value) : value.toFixed(1));

function drawStages(runs) {
  const into = byId("time-list");
  const names = [...new Set(runs.flatMap((run) => run.stages.names))];
  if (!names.length) {
    into.append(element("p", { class: "soft" }, "There are no times."));
    return;
  }
  names.sort((a, b) => (STAGES.indexOf(a) + 99) % 99 - (STAGES.indexOf(b) + 99) % 99);
  const sums = runs.map((run) => run.stages.steps.map((_, k) => Object.values(run.stages.bars).reduce((all, bar) => all + bar[k], 0)));
  const highest = Math.max(...sums.flat(), 1e-9);
  const charts = runs.map((run, i) => stageChart(run, i, names, highest, runs.length > 1));
  into.append(element("div", { class: runs.length > 1 ? null : "times" }, element("div", { class: "side" }, charts.filter(Boolean)), stageTable(runs, names)));
}

function stageChart(run, number, names, highest, named) {
  const { steps: firsts, width: wide, bars } = run.stages;
  if (!firsts.length) return null;
  const order = names.filter((name) => bars[name]);
  const readout = element("div", { class: "readout" });
  const plot = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `Seconds a step of ${run.name}: arrow keys read values` });
  let at = firsts.length - 1;
  const read = () => {
    const parts = order.filter((name) => bars[name][at] > 0);
    const all = parts.reduce((sum, name) => sum + bars[name][at], 0);
    readout.replaceChildren(element("span", {}, `${steps(firsts[at], wide)}: `, element("b", {}, `${said(all)} s`), wide > 1 ? " a step" : null),
      ...parts.map((name) => element("span", {}, element("span", { class: "swatch", style: `background:${stageColour(name, names.indexOf(name))}` }), `${name} ${said(bars[name][at])}`)));
  };
  const span = firsts[firsts.length - 1] + wide - firsts[0];
  drawn(plot, (width) => {
    const height = named || width < 600 ? 200 : 340; // beside the table, or above it
    const x = (step) => LEFT + ((step - firsts[0]) / span) * (width - LEFT - RIGHT);
    const y = (v) => height - BOTTOM - (v / highest) * (height - TOP - BOTTOM);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `seconds a step of ${run.name}, by stage` });
    for (const value of ticks(0, highest, 4)) {
      picture.append(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, `${said(value)} s`));
    }
    firsts.forEach((first, k) => {
      let base = 0;
      const full = x(first + wide) - x(first), gap = full > 4 ? 1 : 0;
      for (const name of order) {
        const value = bars[name][k];
        if (!(value > 0)) continue;
        picture.append(svg("rect", { x: x(first), width: Math.max(full - gap, 0.5), y: y(base + value), height: y(base) - y(base + value), style: `fill:${stageColour(name, names.indexOf(name))}` }));
        base += value;
      }
    });
    for (const step of stepTicks(firsts[0], firsts[0] + span - 1, width)) {
      picture.append(stepLabel(x(step + wide / 2), height, step, width));
    }
    plot.replaceChildren(picture);
    plot.onpointermove = plot.onpointerdown = (event) => {
      const step = firsts[0] + ((event.clientX - plot.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT)) * span;
      at = nearest({ steps: firsts, width: 2 }, step);
      read();
    };
  });
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    at = Math.min(Math.max(at + move, 0), firsts.length - 1);
    read();
    event.preventDefault();
  });
  read();
  const title = named ? [dot(runColour(number)), run.name] : "Seconds a step";
  return element("article", { class: "card" }, element("h3", {}, title), readout, plot);
}

function stageTable(runs, names) {
  const all = runs.map((run) => Object.values(run.stages.totals).reduce((sum, value) => sum + value, 0));
  const head = runs.map((run, i) => element("th", { colspan: 2, scope: "col" }, runs.length > 1 ? [dot(runColour(i)), run.name] : "seconds, share"));
  const rows = names.map((name, i) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: "swatch", style: `background:${stageColour(name, i)}` }), name),
    runs.flatMap((run, r) => {
      const value = run.stages.totals[name];
      return value === undefined ? [element("td", {}, "–"), element("td")] : [element("td", {}, seconds(value)), element("td", { class: "soft" }, percent(value / (all[r] || 1)))];
    })));
  rows.push(element("tr", {}, element("th", { scope: "row" }, "together"), all.flatMap((sum) => [element("td", {}, element("b", {}, seconds(sum))), element("td", { class: "soft" }, duration(sum))])));
  return element("div", { class: "scroll card" }, element("table", {},
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "stage"), head)), element("tbody", {}, rows)));
}
