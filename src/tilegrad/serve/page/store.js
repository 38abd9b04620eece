// Conversations and settings, kept in this browser. A chat: {id, title, at, messages: [{role, text,
// thought, stats, error}]}. Invariant: what was shown is kept, or the person is told that it is not.

const CHATS = "tilegrad.chats.1";
const SETTINGS = "tilegrad.settings.1";
const KEY = "tilegrad.key";
const MOST_CHATS = 200;

function read(store, name, other) {
  try {
    const found = JSON.parse(store.getItem(name));
    return found === null || typeof found !== typeof other ? other : found;
  } catch { return other; }
}

export class Store {
  constructor(told) {
    this.told = told;
    const found = read(localStorage, CHATS, []);
    this.chats = Array.isArray(found) ? found.filter(isChat) : [];
    this.settings = read(localStorage, SETTINGS, {});
  }

  save() {
    this.chats.sort((a, b) => b.at - a.at);
    this.put(CHATS, this.chats.filter((chat) => chat.messages.length).slice(0, MOST_CHATS));
  }

  set(name, value) {
    if (value === "" || value === null) delete this.settings[name];
    else this.settings[name] = value;
    this.put(SETTINGS, this.settings);
  }

  put(name, value) {
    try { localStorage.setItem(name, JSON.stringify(value)); } catch {
      this.told("This browser's storage is full: new messages are not kept. Delete some chats.");
    }
  }

  get key() { return sessionStorage.getItem(KEY) || ""; }

  set key(value) { if (value) sessionStorage.setItem(KEY, value); else sessionStorage.removeItem(KEY); }

  fresh() {
    const chat = { id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()), title: "", at: Date.now(), messages: [] };
    this.chats.unshift(chat);
    return chat;
  }

  remove(chat) {
    this.chats = this.chats.filter((other) => other !== chat);
    this.save();
  }
}

function isChat(chat) {
  return chat && typeof chat.id === "string" && Array.isArray(chat.messages) &&
    chat.messages.every((m) => m && typeof m.text === "string" && (m.role === "user" || m.role === "assistant"));
}

export function titled(text) {
  const line = text.trim().split("\n")[0].replace(/[#*`_>]/g, "").trim();
  return line.length > 48 ? `${line.slice(0, 47)}…` : line || "New chat";
}

export function asMarkdown(chat) {
  const parts = chat.messages.map((m) => `## ${m.role === "user" ? "You" : "Answer"}\n\n${m.text}`);
  return `# ${chat.title || "Chat"}\n\n${parts.join("\n\n")}\n`;
}
