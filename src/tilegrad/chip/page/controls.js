// Sliders, boxes and choices for the fields of the parameter record.
import { make } from "./pictures.js";

const GROUPS = [
  ["Array", ["dataflow", "element", "weights", "rows", "columns", "lanes", "sparse", "stochastic"]],
  ["Memories on the chip", ["banks", "bank_rows", "accumulator_rows"]],
  ["DRAM and clock", ["dma_bytes", "dram_bandwidth", "dram_latency", "clock"]],
  ["Queues", ["queue", "tokens", "program_words"], true],
];
const NAMES = {
  weights: "weights in DRAM", lanes: "vector lanes", sparse: "2:4 unit, pruned weights", stochastic: "stochastic rounding",
  banks: "scratchpad banks", bank_rows: "rows of a bank", accumulator_rows: "accumulator rows", dma_bytes: "DMA bytes a cycle",
  dram_bandwidth: "DRAM, GB/s", dram_latency: "DRAM latency, cycles", clock: "clock, MHz", queue: "instructions a queue",
  tokens: "tokens a channel", program_words: "program words",
};
const PARTS = {
  mac: "multiplication", scratchpad_byte: "scratchpad byte", accumulator_byte: "accumulator byte",
  vector: "lane, a beat", dram_byte: "DRAM byte", idle_cycle: "idle cycle",
};
export const FLOWS = { ws: "weights stay", os: "sums stay", is: "inputs stay" };
const whole = (name) => !["dram_bandwidth", "clock"].includes(name);

export class Controls {
  constructor(box, start, changed) {
    Object.assign(this, { box, start, changed, values: {} });
    box.onsubmit = (event) => event.preventDefault();
  }

  // Show other parameters.
  take(values) {
    this.values = structuredClone(values);
    this.rows = {};
    this.box.replaceChildren(...GROUPS.map(([title, names, closed]) => this.group(title, names.map((name) => this.control(name)), closed)),
      this.group("Energy of an event, pJ", Object.keys(this.values.energy).map((name) => this.energy(name)), true));
  }

  group(title, rows, closed) {
    const set = make("fieldset");
    if (!closed) { set.append(make("legend", {}, title), ...rows); return set; }
    const box = make("details");
    set.append(...rows);
    box.append(make("summary", {}, title), set);
    return box;
  }

  control(name) {
    const value = this.values[name];
    if (typeof value === "boolean") return this.truth(name);
    if (typeof value === "string") return this.choice(name);
    return this.number(name);
  }

  row(name, text, ...parts) {
    const box = make("div", { class: "control" });
    box.append(make("label", { for: parts[0].id }, text), ...parts);
    this.rows[name] = box;
    return box;
  }

  set(name, value) { this.values[name] = value; this.changed(); }

  truth(name) {
    const box = make("input", { type: "checkbox", id: "p-" + name });
    box.checked = this.values[name];
    box.onchange = () => this.set(name, box.checked);
    return this.row(name, NAMES[name], box);
  }

  choice(name) {
    const known = { dataflow: this.start.dataflows, element: Object.keys(this.start.weights),
      weights: this.start.weights[this.values.element] }[name];
    const select = make("select", { id: "p-" + name });
    select.append(...known.map((value) => make("option", { value }, FLOWS[value] || value)));
    select.value = this.values[name];
    select.onchange = () => {
      this.values[name] = select.value;
      if (name === "element") this.take({ ...this.values, weights: select.value });
      this.changed();
    };
    return this.row(name, NAMES[name] || name, select);
  }

  number(name) {
    const [low, high] = this.start.bounds[name];
    const box = make("input", { type: "number", id: "p-" + name, min: low, max: high, step: "any" });
    const steps = this.steps(name);
    const slider = make("input", { type: "range", id: "s-" + name, min: 0, max: steps.length - 1, "aria-label": NAMES[name] || name });
    const near = (value) => steps.reduce((best, step, i) => Math.abs(step - value) < Math.abs(steps[best] - value) ? i : best, 0);
    box.value = this.values[name];
    slider.value = near(this.values[name]);
    slider.oninput = () => { box.value = steps[slider.value]; this.set(name, steps[slider.value]); };
    box.oninput = () => { const value = box.valueAsNumber; slider.value = near(value); this.set(name, Number.isNaN(value) ? null : value); };
    return this.row(name, NAMES[name] || name, box, slider);
  }

  // Where a slider stops: powers of two, or 1, 1.5, 2, 3, 4, 6, 8 ... within the bounds people use.
  steps(name) {
    const [low, high] = this.start.bounds[name], found = [this.values[name]];
    const least = whole(name) ? low : { dram_bandwidth: 0.5, clock: 50 }[name];
    const most = { dram_bandwidth: 8192, clock: 4000, dram_latency: 2048 }[name] || high;
    for (let value = 2 ** Math.floor(Math.log2(least)); value <= most; value *= 2) {
      found.push(value);
      if (!this.start.powers.includes(name) && (value > 1 || !whole(name))) found.push(1.5 * value);
    }
    return [...new Set(found)].filter((value) => value >= least && value <= Math.max(most, this.values[name])).sort((a, b) => a - b);
  }

  energy(name) {
    const box = make("input", { type: "number", id: "e-" + name, min: 0, step: "any" });
    box.value = this.values.energy[name];
    box.oninput = () => { const value = box.valueAsNumber; this.values.energy[name] = Number.isNaN(value) ? null : value; this.changed(); };
    return this.row("energy." + name, PARTS[name] || name, box);
  }

  // Mark the field that an error names, and say what would fit.
  blame(error) {
    for (const row of Object.values(this.rows || {})) {
      row.classList.remove("bad");
      row.querySelector(".wrong")?.remove();
    }
    const row = error && error.field && this.rows && this.rows[error.field];
    if (!row) return;
    row.classList.add("bad");
    row.append(make("p", { class: "wrong" }, [error.expected, error.hint].filter(Boolean).join("; ")));
    const closed = row.closest("details");
    if (closed) closed.open = true;
  }
}
