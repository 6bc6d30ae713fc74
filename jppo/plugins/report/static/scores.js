// How the scores of a step's samples are spread, step by step: a heat map.

const SHADES = 0.55; // a share's strength is its power: small shares can be seen

function drawScores(runs, levels) {
  const cards = runs.map((run, i) => (run.scores.steps.length ? scoreCard(run, i, levels, runs.length > 1) : null)).filter(Boolean);
  if (!cards.length) byId("score-list").append(element("p", { class: "soft" }, "There are no samples with a score."));
  else byId("score-list").append(element("div", { class: "side" }, cards));
}

function scoreCard(run, number, levels, named) {
  const { steps: at, counts, ungraded, kind } = run.scores;
  const names = levels.values ? levels.values.map(said) : levels.edges.slice(1).map((edge, i) => `${said(levels.edges[i])} to ${said(edge)}`);
  const failed = ungraded.some((count) => count > 0);
  const rows = names.length + (failed ? 1 : 0);
  const readout = element("div", { class: "readout" });
  const plot = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `Scores of ${run.name}: arrow keys read values` });
  let column = at.length - 1;
  const total = (k) => counts[k].reduce((sum, count) => sum + count, ungraded[k]);
  const read = () => {
    const parts = names.map((name, i) => [name, counts[column][i]]).concat([["not graded", ungraded[column]]]).filter(([, count]) => count > 0);
    readout.replaceChildren(element("b", {}, `${kind === "test" ? "test after step" : "step"} ${whole(at[column])}`),
      ...parts.map(([name, count]) => element("span", {}, `${name}: ${whole(count)} `, element("span", { class: "soft" }, percent(count / total(column))))));
  };
  const height = TOP + BOTTOM + Math.max(120, Math.min(rows * 16, 240));
  drawn(plot, (width) => {
    const wide = (width - LEFT - RIGHT) / at.length, tall = (height - TOP - BOTTOM) / rows;
    const y = (row) => height - BOTTOM - (row + 1) * tall;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "shape-rendering": "crispEdges", role: "img", "aria-label": `share of each score over the steps of ${run.name}` });
    at.forEach((_, k) => {
      [...(failed ? [ungraded[k]] : []), ...counts[k]].forEach((count, row) => {
        if (!count) return;
        const colour = failed && row === 0 ? "var(--bad)" : "var(--heat)";
        picture.append(svg("rect", { x: LEFT + k * wide, y: y(row), width: wide, height: tall, style: `fill:${colour};fill-opacity:${((count / total(k)) ** SHADES).toFixed(3)}` }));
      });
    });
    const every = Math.ceil(rows / 8);
    const labels = [...(failed ? ["failed"] : []), ...(levels.values ? names : levels.edges.slice(0, -1).map(said))];
    labels.forEach((label, row) => { if (row % every === 0) picture.append(svg("text", { x: LEFT - 6, y: y(row) + (levels.values ? tall / 2 : tall) + 4, "text-anchor": "end" }, label)); });
    for (const step of stepTicks(at[0], at[at.length - 1], width)) {
      picture.append(stepLabel(LEFT + (nearest({ steps: at, width: 1 }, step) + 0.5) * wide, height, step, width));
    }
    picture.append(svg("rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM, class: "axis", fill: "none" }));
    plot.replaceChildren(picture);
    plot.onpointermove = plot.onpointerdown = (event) => {
      const k = Math.floor((event.clientX - plot.getBoundingClientRect().left - LEFT) / wide);
      column = Math.min(Math.max(k, 0), at.length - 1);
      read();
    };
  });
  const openHere = () => openSamples(number, at[column], kind);
  plot.addEventListener("dblclick", openHere);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter") openHere();
    if (!move) return;
    column = Math.min(Math.max(column + move, 0), at.length - 1);
    read();
    event.preventDefault();
  });
  read();
  const title = named ? [dot(runColour(number)), run.name] : kind === "test" ? "Scores of the tests" : "Scores of the training's samples";
  return element("article", { class: "card" }, element("h3", {}, title), element("div", { class: "metric" }, "the darker, the larger a share of the step's samples"), readout, plot);
}
