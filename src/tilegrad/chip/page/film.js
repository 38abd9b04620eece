// A small product through the mesh: registers of the simulator, a frame each cycle.
import { ask } from "./ask.js";
import { FLOWS } from "./controls.js";
import { make } from "./pictures.js";

const $ = (id) => document.getElementById(id);
const KEYS = {
  ws: ["input, moving right", "weight, stays", "sum, moving down"],
  is: ["weight, moving right", "input, stays", "sum, moving down"],
  os: ["input, moving right", "weight, moving down", "sum, stays"],
};
const PHASES = { load: "what stays comes in", stream: "values stream", drain: "sums leave" };

export class Film {
  constructor(flows) {
    this.cycle = 0;
    this.timer = 0;
    $("film-flow").append(...flows.map((flow) => make("option", { value: flow }, FLOWS[flow])));
    for (const id of ["film-flow", "film-rows", "film-columns", "film-length"]) $(id).onchange = () => this.load();
    $("play").onclick = () => this.play();
    $("back").onclick = () => this.show(this.cycle - 1);
    $("forth").onclick = () => this.show(this.cycle + 1);
    $("clock").oninput = () => this.show(Number($("clock").value));
  }

  async load() {
    const number = (id) => $(id).valueAsNumber;
    try {
      this.film = await ask("/api/film", { dataflow: $("film-flow").value, rows: number("film-rows"), columns: number("film-columns"), length: number("film-length") });
    } catch (error) {
      $("clock-text").textContent = `${error.message}, expected ${error.expected}`;
      return;
    }
    $("clock").max = this.film.frames.length - 1;
    this.show(0);
  }

  play() {
    clearInterval(this.timer);
    const on = $("play").textContent === "play";
    this.timer = on ? setInterval(() => this.show(this.cycle + 1), 600) : 0;
    $("play").textContent = on ? "pause" : "play";
  }

  show(cycle) {
    const { frames } = this.film;
    this.cycle = (cycle + frames.length) % frames.length;
    const frame = frames[this.cycle];
    $("clock").value = this.cycle;
    $("clock-text").textContent = `cycle ${this.cycle + 1} of ${frames.length}: ${PHASES[frame.phase]}`;
    this.draw(frame);
    this.tell(frame);
  }

  draw(frame) {
    const rows = frame.sums.length, columns = frame.sums[0].length, size = 62, wait = 22;
    const left = 3 * wait + 6, top = frame.top.length ? 3 * wait + 2 : 4, svg = $("array");
    const width = left + columns * size + 6, height = top + rows * size + 6;
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(name, value);
    svg.replaceChildren();
    const text = (x, y, words, css, anchor = "middle") => svg.append(make("text", { x, y, class: css, "text-anchor": anchor }, words));
    frame.left.forEach((soon, i) => soon.forEach((value, n) => { if (value !== null) text(left - wait * (n + 0.5) - 2, top + i * size + size / 2 + 4, value, "right"); }));
    frame.top.forEach((soon, j) => soon.forEach((value, n) => { if (value !== null) text(left + j * size + size / 2, top - wait * n - 8, value, "stays"); }));
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
      const x = left + j * size, y = top + i * size, moving = frame.inputs[i][j], still = frame.still[i][j];
      const busy = moving !== 0 && still !== 0 && frame.phase === "stream";
      svg.append(make("rect", { class: "cell" + (busy ? " busy" : ""), x: x + 2, y: y + 2, width: size - 4, height: size - 4, rx: 7 }));
      text(x + 10, y + 20, moving || "·", "right", "start");
      text(x + size - 10, y + 20, still || "·", "stays", "end");
      text(x + size / 2, y + 46, frame.sums[i][j], "sum");
    }
  }

  tell(frame) {
    const { film } = this, keys = KEYS[film.dataflow], out = film.dataflow === "is" ? flip(frame.out) : frame.out;
    const key = make("p");
    key.append(make("span", { class: "key-right" }, "Upper left: "), keys[0] + ". ", make("span", { class: "key-stays" }, "Upper right: "),
      keys[1] + ". ", make("span", { class: "key-sum" }, "Below: "), keys[2] + ". A filled cell multiplied in this cycle.");
    const matrices = make("div", { class: "matrices" });
    for (const [name, rows] of [["inputs", film.inputs], ["weights", film.weights], ["out so far", out.length ? out : [["·"]]]]) {
      const box = make("div", {}, name), table = make("table");
      for (const row of rows) {
        const line = make("tr");
        line.append(...row.map((value) => make("td", {}, value)));
        table.append(line);
      }
      box.append(table);
      matrices.append(box);
    }
    $("legend").replaceChildren(key, matrices);
  }
}

const flip = (rows) => rows.length ? rows[0].map((_, j) => rows.map((row) => row[j])) : [];
