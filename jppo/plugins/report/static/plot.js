// One chart of curves over the steps, as SVG. What it shows at a step stands above it, so that nothing is hidden.

const HEIGHT = 176, LEFT = 48, RIGHT = 10, TOP = 8, BOTTOM = 20;
const DOTS = 40; // so many points can be told apart
const view = { smooth: 0, log: false, shown: new Set(), at: null, first: 0, last: 1 };

// Round numbers within low and high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => power * m >= rough * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step || 0);
  return found;
}

// The powers of ten within low and high; round numbers where there are not two.
function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / 5));
  const found = [];
  for (let p = first; p <= last; p += every) found.push(10 ** p);
  return found.length > 1 ? found : ticks(low, high, 4).filter((v) => v > 0);
}

// The exponential moving average, corrected for its beginning; a gap stays a gap.
function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

// Where `step` stands in an axis, or is nearest to.
function nearest(axis, step) {
  let low = 0, high = axis.steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (axis.steps[middle] <= step) low = middle; else high = middle - 1;
  }
  if (axis.width === 1 && low + 1 < axis.steps.length && axis.steps[low + 1] - step < step - axis.steps[low]) low++;
  return low;
}

const middle = (axis, i) => axis.steps[i] + (axis.width - 1) / 2;

// The steps that are written under a chart of this width.
const stepTicks = (first, last, width) => ticks(first, last, Math.max(4, Math.floor(width / 80))).filter(Number.isInteger);

// A step under a chart; one at the right edge ends there.
function stepLabel(x, height, step, width) {
  const edge = x > width - 26;
  return svg("text", { x: edge ? width - 2 : x, y: height - 5, "text-anchor": edge ? "end" : "middle" }, whole(step));
}

// The limits of what is drawn: all of it, from 0 where that is near, never a line alone.
function limits(lines, log, fixed) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    for (const values of [line.low ?? line.mean, line.high ?? line.mean]) {
      for (const value of values) {
        if (value === null || (log && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (fixed) return fixed;
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const room = (high - low) * 0.06;
  return [low >= 0 && low < high / 2 ? 0 : low - room, high + room];
}

// A card with a chart. `lines`: {run, label, name, group, colour, axis, mean, low, high, error, dots, dash, odd}; over the
// chart a value has the name of its line, and those of a group stand together.
// `fixed` is the range that is drawn; what lies outside is drawn at its edge. `open(run, step)` is called where somebody
// wants to see a step itself.
function makeChart({ title, about, lines, health, fixed, log, open }) {
  const readout = element("div", { class: "readout" });
  const at = element("span", { class: "at" });
  const plot = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${title}: arrow keys read values` });
  const card = element("article", { class: "card" },
    element("div", { class: "head" }, element("h3", {}, title), at),
    element("div", { class: "metric" }, about), readout, plot);
  let place = null, cross = null;

  const visible = () => lines.filter((line) => view.shown.has(line.run));
  const everyStep = () => [...new Set(visible().flatMap((line) => line.axis.steps))].sort((a, b) => a - b);

  function draw(width) {
    const shown = visible();
    const isLog = view.log || log === true;
    const { first, last } = view;
    const [low, high] = limits(shown, isLog, fixed);
    const scaled = (v) => (isLog ? Math.log10(Math.max(v, low)) : Math.min(Math.max(v, low), high));
    const x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
    const y = (v) => HEIGHT - BOTTOM - ((scaled(v) - scaled(low)) / (scaled(high) - scaled(low))) * (HEIGHT - TOP - BOTTOM);
    place = { x, step: (px) => first + ((px - LEFT) / (width - LEFT - RIGHT)) * (last - first) };
    const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": describe(shown) });
    if (health) picture.append(...band(health, low, high, y, width));
    for (const value of isLog ? logTicks(low, high) : ticks(low, high, 4)) {
      picture.append(
        svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, said(Number(value.toPrecision(6)))));
    }
    for (const step of stepTicks(first, last, width)) picture.append(stepLabel(x(step), HEIGHT, step, width));
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
    for (const line of shown) picture.append(...curve(line, x, y, isLog));
    cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM });
    picture.append(cross);
    plot.replaceChildren(picture);
    read();
  }

  // The values at the step that is pointed at anywhere on the page, or the last ones.
  function read() {
    const shown = visible();
    at.textContent = view.at === null ? "" : `step ${whole(view.at)}`;
    const groups = new Map();
    for (const line of shown) groups.set(line.group, [...(groups.get(line.group) ?? []), valueOf(line)]);
    readout.replaceChildren(...[...groups].map(([group, values]) => element("div", {}, group ? element("span", { class: "soft" }, group) : null, values)));
    if (!cross || !place) return;
    cross.style.visibility = view.at === null ? "hidden" : "visible";
    if (view.at !== null) for (const end of ["x1", "x2"]) cross.setAttribute(end, place.x(view.at));
  }

  function valueOf(line) {
    const i = view.at === null ? line.mean.length - 1 : nearest(line.axis, view.at);
    const covers = line.axis.steps[i] <= view.at && view.at < line.axis.steps[i] + line.axis.width;
    let text = said(line.mean[i]);
    if (line.error && line.error[i] !== null && line.error[i] !== undefined) text += ` ± ${said(Number(line.error[i].toPrecision(2)))}`;
    const range = line.low && line.low[i] !== line.high[i] ? ` ${said(line.low[i])} to ${said(line.high[i])}` : "";
    const where = view.at !== null && !covers ? ` at ${whole(line.axis.steps[i])}` : "";
    return element("span", {}, dot(line.colour), line.name ? `${line.name} ` : null, element("b", {}, text), element("span", { class: "soft" }, range + where));
  }

  const redraw = drawn(plot, draw);
  const point = (event) => {
    if (!place) return;
    const box = plot.getBoundingClientRect();
    const step = Math.round(place.step(event.clientX - box.left));
    pointAt(Math.min(Math.max(step, Math.ceil(view.first)), Math.floor(view.last)));
  };
  const openHere = () => { if (view.at !== null && visible().length) open(visible()[0].run, view.at); };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") pointAt(null); });
  plot.addEventListener("dblclick", openHere);
  plot.addEventListener("keydown", (event) => {
    const all = everyStep();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move && all.length) {
      const now = view.at === null ? all.length - (move > 0) : nearest({ steps: all, width: 1 }, view.at);
      pointAt(all[Math.min(Math.max(now + move, 0), all.length - 1)]);
      event.preventDefault();
    } else if (event.key === "Escape") pointAt(null);
    else if (event.key === "Enter") openHere();
  });
  return { card, redraw, read };
}

// Shading for the range in which a metric is usually found when all is well.
function band([from, to], low, high, y, width) {
  const [bottom, top] = [Math.max(from, low), Math.min(to, high)];
  if (!(top > bottom)) return [];
  return [svg("rect", { class: "health", x: LEFT, width: width - LEFT - RIGHT, y: y(top), height: y(bottom) - y(top) })];
}

// A curve: extremes or standard error behind it, the raw values faintly where it is smoothed, and what is no number.
function curve(line, x, y, isLog) {
  const { axis } = line;
  const ok = (v) => v !== null && v !== undefined && (!isLog || v > 0);
  const px = (i) => x(middle(axis, i)).toFixed(1);
  const path = (values) => {
    let text = "", pen = "M";
    values.forEach((value, i) => {
      if (!ok(value)) { pen = "M"; return; }
      text += `${pen}${px(i)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    return text;
  };
  const area = (low, high) => {
    const at = low.map((v, i) => i).filter((i) => low[i] !== null && ok(high[i])); // a lower end that no log has is at the bottom
    if (at.length < 2) return null;
    const there = at.map((i) => `${px(i)} ${y(high[i]).toFixed(1)}`), back = at.reverse().map((i) => `${px(i)} ${y(low[i]).toFixed(1)}`);
    return svg("path", { class: "envelope", d: `M${there.join("L")}L${back.join("L")}Z`, style: `fill:${line.colour};stroke:${line.colour}` });
  };
  const found = [];
  const stroke = (kind, values) => svg("path", { class: kind, d: path(values), style: `stroke:${line.colour}`, "stroke-dasharray": line.dash });
  if (line.low) found.push(area(line.low, line.high));
  if (line.error) {
    const [low, high] = [-1, 1].map((sign) => line.mean.map((v, i) => (ok(v) && ok(line.error[i]) ? v + sign * line.error[i] : null)));
    found.push(area(low, high));
  }
  if (view.smooth > 0 && !line.dots) found.push(line.low ? null : stroke("raw", line.mean), stroke("curve", smoothed(line.mean, view.smooth)));
  else found.push(stroke("curve", line.mean));
  if ((line.dots && axis.steps.length <= DOTS) || axis.steps.length < 3) {
    line.mean.forEach((v, i) => { if (ok(v)) found.push(svg("circle", { cx: px(i), cy: y(v), r: 3.2, style: `fill:${line.colour}` })); });
  }
  for (const step of line.odd?.steps ?? []) {
    const [cx, base] = [x(step), HEIGHT - BOTTOM];
    found.push(svg("path", { class: "odd", d: `M${cx - 4} ${base}L${cx + 4} ${base}L${cx} ${base - 7}Z` },
      svg("title", {}, `step ${step}: no finite number`)));
  }
  return found.filter(Boolean);
}

// A chart in words, for those who do not see it.
function describe(lines) {
  return lines.map((line) => {
    const values = line.mean.filter((v) => v !== null);
    if (!values.length) return `${line.label}: no finite values`;
    const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    return `${line.label}: from ${said(values[0])} to ${said(values[values.length - 1])}, between ${said(low)} and ${said(high)}`;
  }).join("; ") || "no run is shown";
}
