// What all parts of the page use. Every text goes in as a text node or an attribute, never as HTML.

// An element with attributes, listeners (on…) and children; children that are no nodes become text.
function element(name, attributes = {}, ...children) {
  return build(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function build(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);

// JSON that was deflated and written in base64; "" is nothing.
async function unpack(id) {
  const packed = byId(id).textContent;
  if (!packed) return [];
  const letters = atob(packed);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// A number for people: four digits, and a power of ten where it is very large or small.
function said(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

const whole = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
const percent = (share) => (share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);

function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const runColour = (i) => `var(--run-${i % 8})`;
const dot = (colour) => element("span", { class: "dot", style: `background:${colour}` });
const steps = (first, width) => (width > 1 ? `steps ${whole(first)}–${whole(first + width - 1)}` : `step ${whole(first)}`);

// Calls `draw` with the node's width when it is first seen, and again when the width changes or `redraw` is called.
function drawn(node, draw) {
  let width = 0, seen = false, stale = true;
  const now = () => {
    const found = Math.floor(node.clientWidth);
    if (!seen || !found || (found === width && !stale)) return;
    width = found;
    stale = false;
    draw(width);
  };
  new ResizeObserver(now).observe(node);
  new IntersectionObserver(([entry]) => { seen = entry.isIntersecting; now(); }, { rootMargin: "300px" }).observe(node);
  addEventListener("beforeprint", () => { seen = true; now(); });
  return () => { stale = true; now(); };
}
