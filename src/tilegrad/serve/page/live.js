// The live view: what the server does now, asked for once a second while somebody looks.

const EVERY = 1000;
const KEPT = 120;
const SVG = "http://www.w3.org/2000/svg";

const GAUGES = [
  { id: "rate", name: "Tokens a second", value: (l) => l.tokens_per_second, text: (l) => number(l.tokens_per_second), note: (l) => `${count(l.made_tokens)} made since the start` },
  { id: "running", name: "Requests", value: (l) => l.running + l.waiting, text: (l) => String(l.running), note: (l) => `${l.waiting} wait, ${l.most_running} at once at most`, share: (l) => l.running / l.most_running },
  { id: "cache", name: "Cache", value: (l) => 100 * used(l), text: (l) => `${Math.round(100 * used(l))}%`, note: (l) => `${count(l.pages.used)} of ${count(l.pages.all)} pages`, share: used },
  { id: "step", name: "Step", value: (l) => 1000 * l.step_seconds, text: (l) => milliseconds(l.step_seconds), note: roofline, share: (l) => (l.roofline_seconds && l.step_seconds ? Math.min(1, l.roofline_seconds / l.step_seconds) : null) },
];

function used(l) { return l.pages && l.pages.all ? l.pages.used / l.pages.all : 0; }

function roofline(l) {
  if (!l.step_seconds) return "no step yet";
  if (!l.roofline_seconds) return "the memory's limit is not known";
  return `${milliseconds(l.roofline_seconds)} at the memory's speed: ${Math.round((100 * l.roofline_seconds) / l.step_seconds)}% of it`;
}

export function number(value) { return value >= 100 ? Math.round(value).toLocaleString("en") : (value || 0).toFixed(1); }
export function count(value) { return (value || 0).toLocaleString("en"); }
export function milliseconds(seconds) {
  const ms = 1000 * (seconds || 0);
  return ms >= 100 ? `${Math.round(ms)} ms` : ms >= 1 ? `${ms.toFixed(1)} ms` : `${Math.round(1000 * ms)} µs`;
}

function made(tag, words, kind) {
  const node = document.createElement(tag);
  if (words !== undefined) node.textContent = words;
  if (kind) node.className = kind;
  return node;
}

export class Live {
  constructor(root, read) {
    this.root = root;
    this.read = read;
    this.kept = new Map(GAUGES.map((g) => [g.id, []]));
    this.cards = new Map(GAUGES.map((g) => [g.id, card(g)]));
    root.querySelector("#gauges").append(...[...this.cards.values()].map((c) => c.root));
    this.timer = 0;
  }

  show(visible) {
    clearInterval(this.timer);
    if (!visible) return;
    this.turn();
    this.timer = setInterval(() => { if (!document.hidden) this.turn(); }, EVERY);
  }

  async turn() {
    const note = this.root.querySelector("#live-note");
    let live;
    try { live = await this.read(); } catch (error) {
      note.textContent = `No news from the server: ${error.message}`;
      return;
    }
    for (const gauge of GAUGES) {
      const kept = this.kept.get(gauge.id);
      kept.push(gauge.value(live) || 0);
      if (kept.length > KEPT) kept.shift();
      this.cards.get(gauge.id).show(live, kept);
    }
    this.rows(live.requests || []);
    const restarts = live.restarts ? `, the engine was started anew ${live.restarts} times` : "";
    note.textContent = `${live.model} on ${live.device || "an unknown device"}, ${live.dtype || ""}, ${live.determinism || ""}, context ${count(live.context)} tokens; up for ${duration(live.seconds)}${restarts}. ${count(live.prompt_tokens)} prompt tokens read.`;
  }

  rows(requests) {
    const body = this.root.querySelector("#requests tbody");
    const rows = requests.slice(0, 50).map((one) => {
      const row = made("tr");
      const rate = one.made_tokens > 1 && one.seconds ? number(one.made_tokens / one.seconds) : "";
      const texts = [one.id, one.state, count(one.prompt_tokens), count(one.made_tokens), one.seconds.toFixed(1), rate];
      row.append(...texts.map((text, i) => made("td", String(text), i === 1 ? `state ${text === "running" ? "running" : "waiting"}` : "")));
      return row;
    });
    if (!rows.length) {
      const row = made("tr");
      const cell = made("td", "Nothing is asked for right now.", "soft");
      cell.colSpan = 6;
      row.append(cell);
      rows.push(row);
    }
    body.replaceChildren(...rows);
  }
}

function duration(seconds) {
  const s = Math.floor(seconds || 0);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

function card(gauge) {
  const root = made("article", undefined, "card");
  root.id = `gauge-${gauge.id}`;
  const value = made("strong", "–", "value");
  const note = made("p", "", "soft");
  const bar = made("div", undefined, "bar");
  const fill = made("div");
  bar.append(fill);
  bar.hidden = !gauge.share;
  const chart = document.createElementNS(SVG, "svg");
  chart.setAttribute("viewBox", "0 0 120 36");
  chart.setAttribute("preserveAspectRatio", "none");
  chart.setAttribute("aria-hidden", "true");
  const area = document.createElementNS(SVG, "polygon");
  const line = document.createElementNS(SVG, "polyline");
  chart.append(area, line);
  root.append(made("h3", gauge.name), value, chart, bar, note);
  return {
    root,
    show(live, kept) {
      value.textContent = gauge.text(live);
      note.textContent = gauge.note(live);
      if (gauge.share) {
        const share = gauge.share(live);
        bar.hidden = share === null || Number.isNaN(share);
        fill.style.width = `${100 * Math.max(0, Math.min(1, share || 0))}%`;
      }
      const most = Math.max(...kept, 1e-9) * 1.1;
      const start = KEPT - kept.length;
      const points = kept.map((v, i) => `${(start + i).toFixed(1)},${(36 - (34 * v) / most).toFixed(1)}`);
      line.setAttribute("points", points.join(" "));
      area.setAttribute("points", `${start},36 ${points.join(" ")} ${KEPT - 1},36`);
    },
  };
}
