// Pictures of an estimate, as SVG made by hand at the size they are shown.

const SVG = new Set(["svg", "g", "rect", "line", "path", "circle", "text", "title"]);
const QUEUES = { load: "c1", execute: "c0", store: "c2" };
const PARTS = { multipliers: "c0", scratchpad: "c3", accumulators: "c2", "vector unit": "c4", control: "c5", DRAM: "c1", idle: "c5" };
const $ = (id) => document.getElementById(id);

export function make(name, attributes = {}, text = "") {
  const node = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  return node;
}

export function short(value) {
  if (!(Math.abs(value) > 0)) return "0";
  const scales = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];
  for (const [scale, mark] of scales) if (Math.abs(value) >= 0.9995 * scale) return Number((value / scale).toPrecision(3)) + " " + mark;
  return value.toExponential(1) + " ";
}

const sum = (values) => Object.values(values).reduce((a, b) => a + b, 0);
const percent = (share) => (100 * share).toFixed(share < 0.1 ? 1 : 0) + "%";

// An empty picture as wide as its place.
function blank(id, height) {
  const svg = $(id), width = Math.max(svg.parentElement.clientWidth - 32, 240);
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(name, value);
  svg.replaceChildren();
  return [svg, width];
}

const text = (svg, x, y, words, css = "", anchor = "start") => svg.append(make("text", { x, y, class: css, "text-anchor": anchor }, words));

function hint(node, words) { node.append(make("title", {}, words)); return node; }

function legend(svg, x, y, rows) {
  for (const [words, css] of rows) {
    svg.append(make("rect", { class: css, x, y: y - 9, width: 10, height: 10, rx: 2 }));
    text(svg, x + 15, y, words);
    x += 26 + 6.6 * words.length;
  }
}

export function draw(found) {
  totals(found);
  roofline(found);
  floorplan(found);
  energy(found.energy);
  cycles(found);
  table(found);
}

function totals(found) {
  const joules = sum(found.energy) * 1e-12, area = sum(found.areas);
  const rows = [
    [short(found.seconds) + "s",
      found.doubled ? "one run, two weights a step" : "one run"],
    [short(found.units / found.seconds), found.unit + "s a second"],
    [short(found.cycles), "cycles"],
    [percent(found.utilisation), "of the peak MACs"],
    [short(joules / found.units) + "J", "for each " + found.unit],
    [short(found.watts) + "W", "mean power"],
    [area.toPrecision(3) + " mm²", "area"],
  ];
  $("totals").replaceChildren(...rows.map(([value, name]) => {
    const box = make("div", { class: "total" });
    box.append(make("b", {}, value), make("span", {}, name));
    return box;
  }));
}

function roofline(found) {
  const [svg, width] = blank("roofline", 330), left = 50, right = width - 12, top = 34, bottom = 280;
  const time = found.cycles, clock = found.cycles / found.seconds;
  const points = found.products.map((p) => ({ ...p, x: p.macs / p.dram_bytes, y: p.macs * clock / p.cycles, share: p.count * p.cycles / time }));
  const ridge = found.peak / found.bandwidth, low = Math.min(...points.map((p) => p.x), ridge / 3), high = Math.max(...points.map((p) => p.x), ridge * 3);
  const x0 = Math.floor(Math.log10(low)), x1 = Math.ceil(Math.log10(high));
  const y1 = Math.log10(found.peak) + 0.25, y0 = Math.min(Math.floor(Math.log10(Math.min(...points.map((p) => p.y)))), Math.floor(y1) - 2);
  const X = (v) => left + (right - left) * (Math.log10(v) - x0) / (x1 - x0);
  const Y = (v) => bottom - (bottom - top) * (Math.log10(v) - y0) / (y1 - y0);
  for (let e = x0; e <= x1; e++) {
    svg.append(make("line", { class: "grid", x1: X(10 ** e), x2: X(10 ** e), y1: top, y2: bottom }));
    text(svg, X(10 ** e), bottom + 17, short(10 ** e).trim(), "", "middle");
  }
  for (let e = Math.ceil(y0); e <= y1; e++) {
    svg.append(make("line", { class: "grid", x1: left, x2: right, y1: Y(10 ** e), y2: Y(10 ** e) }));
    text(svg, left - 6, Y(10 ** e) + 4, short(10 ** e), "", "end");
  }
  const start = Math.max(10 ** x0, 10 ** y0 / found.bandwidth);
  svg.append(make("path", { class: "roof", d: `M${X(start)},${Y(start * found.bandwidth)} L${X(ridge)},${Y(found.peak)} L${right},${Y(found.peak)}` }));
  for (const p of points.sort((a, b) => b.share - a.share)) {
    const dot = make("circle", { class: "dot " + QUEUES[p.bound], cx: X(p.x), cy: Y(p.y), r: 3.5 + 16 * Math.sqrt(p.share) });
    svg.append(hint(dot, `${p.name}, ${p.count} times: ${short(p.y)}MAC/s at ${short(p.x)}MAC a byte, ${percent(p.share)} of the time, ${p.bound}`));
  }
  text(svg, (left + right) / 2, bottom + 37, "MAC for each byte of DRAM", "", "middle");
  text(svg, right, Y(found.peak) - 6, `${short(found.peak)}MAC/s`, "strong", "end");
  const middle = Math.sqrt(start * ridge);
  text(svg, X(middle) - 8, Y(middle * found.bandwidth) - 4, `${short(found.bandwidth)}B/s`, "strong", "end");
  text(svg, left, 16, "bound by");
  legend(svg, left + 60, 16, Object.entries(QUEUES));
}

function floorplan(found) {
  const blocks = Object.entries(found.areas).sort((a, b) => b[1] - a[1]), total = sum(found.areas);
  const beside = $("floorplan").parentElement.clientWidth > 432;
  const [svg, width] = blank("floorplan", beside ? 330 : 250 + 19 * blocks.length);
  const side = beside ? Math.min(310, width - 195) : Math.min(width - 2, 210);
  cut(blocks, { x: 2, y: 2, w: side, h: side }, (name, area, r) => {
    svg.append(hint(make("rect", { class: PARTS[name] + " gap", x: r.x, y: r.y, width: r.w, height: r.h, rx: 4 }), `${name}: ${area.toPrecision(3)} mm²`));
    inside(svg, name, r, found);
    if (r.w > 6.4 * name.length + 14 && r.h > 22) {
      svg.append(make("rect", { class: PARTS[name], x: r.x + 5, y: r.y + 5, width: 6.6 * name.length + 6, height: 16, rx: 3 }));
      text(svg, r.x + 8, r.y + 17, name, "on");
    }
  });
  blocks.forEach(([name, area], i) => {
    const x = beside ? side + 20 : 2, y = beside ? 16 + 23 * i : side + 22 + 19 * i;
    svg.append(make("rect", { class: PARTS[name], x, y: y - 9, width: 10, height: 10, rx: 2 }));
    text(svg, x + 16, y, name, "strong");
    text(svg, width - 2, y, beside ? area.toPrecision(2) : `${area.toPrecision(2)} mm², ${percent(area / total)}`, "", "end");
  });
  text(svg, beside ? side + 20 : 2, beside ? 30 + 23 * blocks.length : side + 26 + 19 * blocks.length, `a square of ${Math.sqrt(total).toPrecision(3)} mm a side`);
}

// What a block is made of: multipliers in rows and columns, banks, two copies of the sums.
function inside(svg, name, r, found) {
  const lines = (across, down) => {
    for (let i = 1; i < across; i++) svg.append(make("line", { class: "cut", x1: r.x + r.w * i / across, x2: r.x + r.w * i / across, y1: r.y + 2, y2: r.y + r.h - 2 }));
    for (let i = 1; i < down; i++) svg.append(make("line", { class: "cut", x1: r.x + 2, x2: r.x + r.w - 2, y1: r.y + r.h * i / down, y2: r.y + r.h * i / down }));
  };
  if (name === "multipliers" && r.w > 3 * found.columns && r.h > 3 * found.rows) lines(found.columns, found.rows);
  if (name === "scratchpad") lines(r.w >= r.h ? found.banks : 1, r.w >= r.h ? 1 : found.banks);
  if (name === "accumulators") lines(r.w >= r.h ? 2 : 1, r.w >= r.h ? 1 : 2);
}

// Cut a rectangle along its longer side into two groups of about the same area, and again.
function cut(blocks, r, put) {
  if (blocks.length === 1) { put(blocks[0][0], blocks[0][1], r); return; }
  const total = blocks.reduce((all, block) => all + block[1], 0);
  let taken = 0, count = 0;
  while (count < blocks.length - 1 && (count === 0 || taken + blocks[count][1] / 2 < total / 2)) taken += blocks[count++][1];
  const share = taken / total, wide = r.w >= r.h;
  cut(blocks.slice(0, count), { ...r, ...(wide ? { w: r.w * share } : { h: r.h * share }) }, put);
  cut(blocks.slice(count), wide ? { ...r, x: r.x + r.w * share, w: r.w * (1 - share) } : { ...r, y: r.y + r.h * share, h: r.h * (1 - share) }, put);
}

function energy(parts) {
  const rows = Object.entries(parts).sort((a, b) => b[1] - a[1]), total = sum(parts), most = rows[0][1];
  const [svg, width] = blank("energy", 20 + 36 * rows.length), room = width - 100 - 118;
  rows.forEach(([name, value], i) => {
    const y = 10 + i * 36, long = Math.max(room * value / most, 1.5);
    text(svg, 92, y + 16, name, "strong", "end");
    svg.append(make("rect", { class: PARTS[name], x: 100, y, width: long, height: 23, rx: 4 }));
    text(svg, 107 + long, y + 16, `${short(value * 1e-12)}J, ${percent(value / total)}`);
  });
}

function cycles(found) {
  const [svg, width] = blank("cycles", 204), left = 46, right = width - 6, top = 30, bottom = 142;
  const all = found.products.map((p) => ({ ...p, all: p.count * p.cycles }));
  const most = Math.max(...all.map((p) => p.all)), step = (right - left) / all.length;
  for (const [share, words] of [[1, short(most)], [0.5, short(most / 2)], [0, "0"]]) {
    const y = bottom - (bottom - top) * share;
    svg.append(make("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
    text(svg, left - 6, y + 4, words, "", "end");
  }
  all.forEach((p, i) => {
    const height = Math.max((bottom - top) * p.all / most, 1);
    const bar = make("rect", { class: QUEUES[p.bound], x: left + i * step + Math.min(step / 8, 2), y: bottom - height, width: Math.max(step - Math.min(step / 4, 4), 1), height, rx: 2 });
    svg.append(hint(bar, `${p.name}, ${p.count} times: ${short(p.all)}cycles, ${percent(p.all / found.cycles)}, ${p.bound}`));
  });
  legend(svg, left, 16, Object.entries(QUEUES));
  text(svg, left, bottom + 18, `${all.length} products that differ, the first on the left`);
  const busy = Object.keys(QUEUES).map((name) => `${name} ${percent(all.reduce((a, p) => a + p.count * p.queues[name], 0) / found.cycles)}`);
  text(svg, left, bottom + 38, "of all cycles busy:");
  text(svg, left, bottom + 54, busy.join(", "), "strong");
}

function table(found) {
  const head = ["product", "times", "cycles each", "of the time", "busiest", "MAC a byte", "of the peak"];
  const rows = found.products.map((p) => [p.name, p.count, short(p.cycles), percent(p.count * p.cycles / found.cycles), p.bound,
    short(p.macs / p.dram_bytes), percent(p.macs / p.cycles * (found.cycles / found.seconds) / found.peak)]);
  const node = make("table"), line = (cells, kind) => { const row = make("tr"); row.append(...cells.map((cell) => make(kind, {}, String(cell)))); return row; };
  node.append(line(head, "th"), ...rows.map((row) => line(row, "td")));
  $("products").replaceChildren(node);
}
