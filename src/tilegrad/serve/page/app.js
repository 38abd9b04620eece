// The page: conversations, the message field, settings, and which view is shown.
// Invariant: only one answer is written at a time; whatever ends it (its end, Stop, an error, another
// chat) leaves the chat as it is shown.

import { draw, parse } from "./markdown.js";
import { asMarkdown, Store, titled } from "./store.js";
import { answer, ask, Failed } from "./stream.js";
import { Live, number } from "./live.js";

const $ = (id) => document.getElementById(id);
const store = new Store(notice);
const live = new Live($("live"), () => ask("v1/live", store.key));
let chat = store.chats[0] || store.fresh();
let model = "";
let writing = null; // {stop: AbortController, message, chat}

// ---- words from us ---------------------------------------------------------------------------

function notice(text, wantsKey = false) {
  const box = $("notice");
  box.replaceChildren(element("span", "", text));
  if (wantsKey) box.append(button("Enter key", "plain", () => openSettings("set-key")));
  box.append(button("Close", "plain", () => { box.hidden = true; }));
  box.hidden = false;
}

function element(tag, kind, text) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = text;
  return node;
}

function button(text, kind, work) {
  const node = element("button", kind, text);
  node.type = "button";
  node.addEventListener("click", work);
  return node;
}

function trouble(error) {
  if (error.status === 401) return notice("The server asks for an API key.", true);
  notice(error instanceof Failed ? error.message : "The server cannot be reached.");
}

// ---- the server ------------------------------------------------------------------------------

async function greet() {
  try {
    const found = await ask("v1/models", store.key);
    model = found.data[0].id;
    $("model").textContent = model;
    document.title = `${model} · tilegrad`;
    const room = found.data[0].max_model_len;
    $("about").textContent = `${model} answers on this server${room ? `; a chat may have ${room.toLocaleString("en")} tokens` : ""}.`;
    state("ready");
  } catch (error) {
    state("away");
    $("model").textContent = "no server";
    trouble(error);
    setTimeout(() => { if (!model && error.status !== 401) greet(); }, 3000);
  }
}

function state(word) {
  $("state").className = `dot ${word}`;
  $("state").title = { ready: "ready", away: "not reached", busy: "writing" }[word];
}

// ---- drawing ---------------------------------------------------------------------------------

function drawAll() {
  $("empty").hidden = chat.messages.length > 0;
  $("messages").replaceChildren(...chat.messages.map(drawMessage));
  drawChats();
  toEnd(true);
}

function drawChats() {
  const rows = store.chats.filter((c) => c.messages.length || c === chat).map((one) => {
    const row = element("div", one === chat ? "chat current" : "chat");
    const open = button(one.title || "New chat", "plain name", () => choose(one));
    if (one === chat) open.setAttribute("aria-current", "true");
    const away = button("×", "plain away", () => remove(one));
    away.setAttribute("aria-label", `Delete ${one.title || "chat"}`);
    row.append(open, away);
    return row;
  });
  $("chats").replaceChildren(...rows);
}

function drawMessage(message) {
  const row = element("li", `message ${message.role}`);
  const body = element("div", "body");
  row.append(element("span", "unseen", message.role === "user" ? "You:" : "Answer:"), body, actions(message, row));
  fill(body, message);
  message.row = undefined;
  Object.defineProperty(message, "row", { value: row, enumerable: false, writable: true, configurable: true });
  return row;
}

function fill(body, message) {
  if (message.role === "user") { body.textContent = message.text; return; }
  const parts = [];
  if (message.thought) {
    const box = element("details", "thought");
    box.open = !message.text;
    box.append(element("summary", "", message.text ? "Thought" : "Thinking…"), draw(parse(message.thought), document));
    parts.push(box);
  }
  const writes = writing && writing.message === message;
  if (writes && !message.text && !message.thought) {
    const wait = element("span", "wait");
    wait.append(element("i"), element("i"), element("i"));
    wait.setAttribute("aria-label", "waiting for the first word");
    parts.push(wait);
  }
  parts.push(draw(parse(message.text), document));
  if (message.error) parts.push(element("p", "error", message.error));
  body.replaceChildren(...parts);
  body.classList.toggle("writing", Boolean(writes));
}

function actions(message, row) {
  const line = element("div", "actions");
  const copy = button("Copy", "plain", () => copied(copy, message.text));
  line.append(copy);
  if (message.role === "user") line.append(button("Edit", "plain", () => edit(message, row)));
  else line.append(button("Retry", "plain", () => retry(message)));
  if (message.stats) line.append(element("span", "soft stats", message.stats));
  return line;
}

async function copied(where, text) {
  try { await navigator.clipboard.writeText(text); } catch {
    const field = element("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const before = where.textContent;
  where.textContent = "Copied";
  setTimeout(() => { where.textContent = before; }, 1200);
}

function atEnd() { const box = $("scroll"); return box.scrollHeight - box.scrollTop - box.clientHeight < 60; }

function toEnd(always) {
  if (always || atEnd()) $("scroll").scrollTop = $("scroll").scrollHeight;
  $("down").hidden = atEnd();
}

// ---- chats -----------------------------------------------------------------------------------

function choose(one) {
  stop();
  chat = one;
  drawAll();
  drawer(false);
  view("chat");
  $("words").focus();
}

function fresh() {
  if (chat.messages.length) choose(store.fresh());
  else { drawer(false); view("chat"); $("words").focus(); }
}

function remove(one) {
  if (!confirm(`Delete "${one.title || "this chat"}"?`)) return;
  if (one === chat) stop();
  store.remove(one);
  if (one === chat) chat = store.chats[0] || store.fresh();
  drawAll();
}

function exported() {
  if (!chat.messages.length) return notice("There is nothing to export yet.");
  for (const [kind, text] of [["md", asMarkdown(chat)], ["json", JSON.stringify(chat, null, 1)]]) {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind === "md" ? "text/markdown" : "application/json" }));
    link.download = `${(chat.title || "chat").replace(/[^\w -]+/g, "").trim().slice(0, 40) || "chat"}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  return undefined;
}

// ---- writing ---------------------------------------------------------------------------------

function send(text) {
  if (!text.trim() || writing) return;
  $("notice").hidden = true;
  chat.messages.push({ role: "user", text });
  if (!chat.title) chat.title = titled(text);
  write();
}

function retry(message) {
  stop();
  chat.messages.length = chat.messages.indexOf(message);
  write();
}

function edit(message, row) {
  const field = element("textarea", "edit");
  field.value = message.text;
  field.setAttribute("aria-label", "Edit the message");
  const done = () => {
    if (!field.value.trim()) return;
    stop();
    chat.messages.length = chat.messages.indexOf(message);
    send(field.value);
  };
  const line = element("div", "row");
  line.append(button("Cancel", "plain", drawAll), button("Send", "main", done));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); drawAll(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
  });
  row.replaceChildren(field, line);
  row.classList.add("editing");
  field.focus();
  grow(field);
}

function request() {
  const found = { model, messages: chat.messages.map((m) => ({ role: m.role, content: m.text })) };
  if (store.settings.system) found.messages.unshift({ role: "system", content: store.settings.system });
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if (typeof store.settings[name] === "number") found[name] = store.settings[name];
  }
  return found;
}

async function write() {
  const message = { role: "assistant", text: "", thought: "" };
  const body = request();
  const mine = writing = { stop: new AbortController(), message, chat };
  chat.messages.push(message);
  chat.at = Date.now();
  drawAll();
  compose();
  const begun = performance.now();
  let first = 0;
  let usage = null;
  let pieces = 0;
  try {
    for await (const event of answer(body, store.key, mine.stop.signal)) {
      if (event.usage) usage = event.usage;
      const delta = event.choices && event.choices[0] && event.choices[0].delta;
      if (!delta) continue;
      const text = delta.content || "";
      const thought = delta.reasoning_content || delta.reasoning || "";
      if (!text && !thought) continue;
      pieces += 1;
      if (!first) first = performance.now();
      message.text += text;
      message.thought += thought;
      later(mine);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      message.error = error instanceof Failed ? error.message : "The server cannot be reached.";
      if (error.status === 401) trouble(error);
    }
  }
  if (!message.thought) delete message.thought;
  message.stats = stats(begun, first, usage ? usage.completion_tokens : pieces);
  if (writing === mine) writing = null;
  if (!message.text && !message.thought && !message.error) message.error = "Stopped before the first word.";
  store.save();
  if (mine.chat === chat && message.row) {
    const end = atEnd();
    message.row.replaceWith(drawMessage(message));
    if (end) toEnd(true);
  }
  drawChats();
  compose();
}

function stats(begun, first, tokens) {
  if (!first || !tokens) return "";
  const rest = (performance.now() - first) / 1000;
  const rate = tokens > 1 && rest > 0 ? `${number((tokens - 1) / rest)} tokens/s, ` : "";
  return `${rate}${tokens} tokens, first after ${((first - begun) / 1000).toFixed(2)} s`;
}

let due = 0;
function later(mine) {
  if (due) return;
  due = requestAnimationFrame(() => {
    due = 0;
    if (writing !== mine || mine.chat !== chat || !mine.message.row) return;
    const end = atEnd();
    fill(mine.message.row.querySelector(".body"), mine.message);
    toEnd(end);
  });
}

function stop() { if (writing) writing.stop.abort(); }

// ---- the message field -----------------------------------------------------------------------

function compose() {
  $("send").textContent = writing ? "Stop" : "Send";
  $("send").classList.toggle("stop", Boolean(writing));
  $("send").disabled = !writing && !$("words").value.trim();
  state(writing ? "busy" : model ? "ready" : "away");
}

function grow(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 260)}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (writing) { stop(); return; }
  const text = $("words").value;
  $("words").value = "";
  grow($("words"));
  send(text);
});
$("words").addEventListener("input", () => { grow($("words")); compose(); });
$("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!writing) $("composer").requestSubmit();
  }
  if (event.key === "ArrowUp" && !$("words").value && !writing) {
    const last = chat.messages.findLast((m) => m.role === "user");
    if (last && last.row) { event.preventDefault(); edit(last, last.row); }
  }
});
$("messages").addEventListener("click", (event) => {
  const copy = event.target.closest("button.copy");
  if (copy) copied(copy, copy.closest("figure").querySelector("code").textContent);
});
$("scroll").addEventListener("scroll", () => { $("down").hidden = atEnd(); }, { passive: true });
$("down").addEventListener("click", () => toEnd(true));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && writing && !$("settings").open) stop();
  else if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); fresh(); }
  else if (event.key === "/" && document.activeElement === document.body) { event.preventDefault(); $("words").focus(); }
});

// ---- settings --------------------------------------------------------------------------------

const NUMBERS = { temperature: [0, 2], top_p: [0.01, 1], max_tokens: [1, 1 << 30] };

function openSettings(focus) {
  for (const name of ["system", "theme", ...Object.keys(NUMBERS)]) $(`set-${name}`).value = store.settings[name] ?? "";
  $("set-key").value = store.key;
  drawer(false);
  $("settings").showModal();
  if (focus) $(focus).focus();
}

function closeSettings() {
  store.set("system", $("set-system").value.trim());
  store.set("theme", $("set-theme").value);
  for (const [name, [low, high]] of Object.entries(NUMBERS)) {
    const value = $(`set-${name}`).valueAsNumber;
    store.set(name, Number.isNaN(value) ? "" : Math.min(high, Math.max(low, name === "max_tokens" ? Math.round(value) : value)));
  }
  const before = store.key;
  store.key = $("set-key").value.trim();
  theme();
  if (before !== store.key || !model) { model = ""; $("notice").hidden = true; greet(); }
}

function theme() {
  const chosen = store.settings.theme;
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}

$("open-settings").addEventListener("click", () => openSettings());
$("settings").addEventListener("close", closeSettings);
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
$("clear-all").addEventListener("click", () => {
  if (!confirm("Delete all chats in this browser?")) return;
  stop();
  store.chats = [];
  chat = store.fresh();
  store.save();
  $("settings").close();
  drawAll();
});
$("new").addEventListener("click", fresh);
$("export").addEventListener("click", exported);

// ---- views -----------------------------------------------------------------------------------

function view(name) {
  for (const other of ["chat", "live"]) {
    $(other).hidden = other !== name;
    $(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    $(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  live.show(name === "live");
}

for (const name of ["chat", "live"]) {
  $(`tab-${name}`).addEventListener("click", () => view(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "chat" ? "live" : "chat";
    view(other);
    $(`tab-${other}`).focus();
  });
}

function drawer(open) {
  document.body.classList.toggle("open", open);
  $("shade").hidden = !open;
  $("menu").setAttribute("aria-expanded", String(open));
}

$("menu").addEventListener("click", () => drawer(!document.body.classList.contains("open")));
$("shade").addEventListener("click", () => drawer(false));

theme();
drawAll();
compose();
greet();
$("words").focus();
