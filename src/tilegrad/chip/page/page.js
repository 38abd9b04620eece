// The chip page: parameters ask for an estimate, and pictures are drawn of the answer.
import { ask } from "./ask.js";
import { Controls } from "./controls.js";
import { draw, make } from "./pictures.js";
import { Film } from "./film.js";

const $ = (id) => document.getElementById(id);
const state = { asking: false, again: false, found: null, told: 0 };  // told: errors so far

const words = (error) => [error.message, error.expected && `expected ${error.expected}`, error.hint].filter(Boolean).join("; ");

// One question at a time: a slider that moves on meanwhile asks again with where it is.
async function update(controls) {
  if (state.asking) { state.again = true; return; }
  state.asking = true;
  do {
    state.again = false;
    const told = state.told;
    try {
      state.found = await ask("/api/estimate", { parameters: controls.values, network: $("network").value });
      if (told === state.told) fine(controls);  // else a file was refused meanwhile
      draw(state.found);
    } catch (error) { trouble(controls, error); }
  } while (state.again);
  state.asking = false;
}

function fine(controls) {
  $("error").hidden = true;
  $("results").classList.remove("stale");
  controls.blame(null);
}

function trouble(controls, error) {
  state.told++;
  $("error").hidden = false;
  $("error").textContent = error.error ? words(error) : "The server does not answer: is `tilegrad chip serve` still running?";
  $("results").classList.add("stale");
  controls.blame(error);
}

async function save(controls) {
  try {
    const { text } = await ask("/api/save", { parameters: controls.values });
    const link = make("a", { download: `${controls.values.name || "npu"}.toml` });
    link.href = URL.createObjectURL(new Blob([text], { type: "application/toml" }));
    link.click();
    URL.revokeObjectURL(link.href);
  } catch (error) { trouble(controls, error); }
}

async function load(controls, file) {
  try {
    const found = await ask("/api/load", { name: file.name, text: await file.text() });
    controls.take(found.parameters);
    $("preset").value = "";
    await update(controls);
  } catch (error) { trouble(controls, error); }
}

function options(select, names) {
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
}

async function begin() {
  const start = await ask("/api/start");
  options($("network"), start.networks);
  options($("preset"), Object.keys(start.presets));
  const controls = new Controls($("controls"), start, () => update(controls));
  $("preset").value = start.first.name in start.presets ? start.first.name : "";
  $("preset").onchange = () => { controls.take(start.presets[$("preset").value]); update(controls); };
  $("network").onchange = () => update(controls);
  $("save").onclick = () => save(controls);
  $("load").onclick = () => $("file").click();
  $("file").onchange = () => {
    const file = $("file").files[0];
    $("file").value = "";  // the same file may be chosen again
    if (file) load(controls, file);
  };
  const film = new Film(start.dataflows);
  new ResizeObserver(() => { if (state.found) draw(state.found); }).observe($("results"));
  controls.take(start.first);
  await Promise.all([update(controls), film.load()]);
  document.body.dataset.ready = "yes";
}

begin().catch((error) => { $("error").hidden = false; $("error").textContent = error.message; });
