// Markdown to a tree, and the tree to DOM nodes.
// Invariant: text of a model becomes text nodes only. No HTML is ever parsed, links go to http, https
// and mailto alone, and nothing is loaded: a picture is a link to it.

const SAFE = /^(https?:\/\/|mailto:)/i;
const MOST_DEPTH = 12;

// ---- blocks: [tag, attributes, children] ----------------------------------------------------

export function parse(text) {
  return blocks(String(text).replace(/\r\n?/g, "\n").split("\n"), 0);
}

const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEAD = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const QUOTE = /^ {0,3}>[ \t]?/;
const ALIGN = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) { at += 1; continue; }
    const step = fenced(lines, at) || heading(line) || rule(line) ||
      (depth < MOST_DEPTH && (quoted(lines, at, depth) || listed(lines, at, depth))) ||
      tabled(lines, at) || paragraph(lines, at);
    found.push(step.node);
    at += step.used;
  }
  return found;
}

function fenced(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open || (open[1][0] === "`" && open[2].includes("`"))) return null;
  const body = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const close = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(lines[end]);
    if (close && close[1][0] === open[1][0] && close[1].length >= open[1].length) break;
    body.push(lines[end]);
  }
  const language = open[2].trim().split(/\s+/)[0] || "";
  const node = ["pre", { language }, [["code", {}, [body.join("\n")]]]];
  return { node, used: Math.min(end + 1, lines.length) - at };
}

function heading(line) {
  const found = HEAD.exec(line);
  return found && { node: [`h${found[1].length}`, {}, inline(found[2] || "")], used: 1 };
}

function rule(line) {
  return RULE.test(line) ? { node: ["hr", {}, []], used: 1 } : null;
}

function quoted(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const body = [];
  let end = at;
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !starts(lines[end]))) {
    body.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return { node: ["blockquote", {}, blocks(body, depth + 1)], used: end - at };
}

function listed(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return null;
  const ordered = /\d/.test(first[2]);
  const same = (mark) => (ordered ? /\d/.test(mark) && mark.slice(-1) === first[2].slice(-1) : mark === first[2]);
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || !same(found[2]) || RULE.test(lines[end])) break;
    const width = Math.min(found[0].length, found[1].length + found[2].length + 4);
    const body = [lines[end].slice(found[0].length)];
    end += 1;
    while (end < lines.length) {
      const line = lines[end];
      const next = lines.slice(end).find((l) => l.trim());
      if (!line.trim()) {
        if (next === undefined || !(indent(next) >= width || (ITEM.exec(next) && same(ITEM.exec(next)[2])))) break;
        if (indent(next) < width) { loose = true; end += 1; continue; }
        loose = true;
        body.push("");
      } else if (indent(line) >= width) body.push(line.slice(width));
      else if (indent(line) >= 2 && ITEM.test(line.trimStart())) body.push(line.trimStart());
      else if (ITEM.test(line) || starts(line) || !lines[end - 1].trim()) break;
      else body.push(line.trimStart());
      end += 1;
    }
    items.push(body);
    while (end < lines.length && !lines[end].trim() && end + 1 < lines.length &&
           ITEM.exec(lines[end + 1]) && same(ITEM.exec(lines[end + 1])[2])) { loose = true; end += 1; }
  }
  const children = items.map((body) => item(body, loose, depth));
  const attributes = ordered && parseInt(first[2], 10) !== 1 ? { start: String(parseInt(first[2], 10)) } : {};
  return { node: [ordered ? "ol" : "ul", attributes, children], used: end - at };
}

function item(body, loose, depth) {
  const task = /^\[([ xX])\][ \t]+/.exec(body[0]);
  if (task) body[0] = body[0].slice(task[0].length);
  const inner = blocks(body, depth + 1);
  const children = loose ? inner : inner.flatMap((node) => (node[0] === "p" ? node[2] : [node]));
  return ["li", {}, task ? [task[1] === " " ? "☐ " : "☑ ", ...children] : children];
}

function tabled(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !ALIGN.test(lines[at + 1]) ||
      !lines[at + 1].includes("-")) return null;
  const heads = cells(lines[at]);
  const aligns = cells(lines[at + 1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : ""));
  if (heads.length !== aligns.length) return null;
  const row = (tag, texts) => ["tr", {}, heads.map((_, i) =>
    [tag, aligns[i] ? { align: aligns[i] } : {}, inline(texts[i] || "")])];
  const body = [];
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) body.push(row("td", cells(lines[end++])));
  return { node: ["table", {}, [["thead", {}, [row("th", heads)]], ["tbody", {}, body]]], used: end - at };
}

function cells(line) {
  const found = [""];
  let code = false;
  const text = line.trim().replace(/^\|/, "");
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === "\\" && text[i + 1] === "|") { found[found.length - 1] += "|"; i += 1; }
    else if (text[i] === "|" && !code) found.push("");
    else { if (text[i] === "`") code = !code; found[found.length - 1] += text[i]; }
  }
  if (found.length > 1 && !found[found.length - 1].trim()) found.pop();
  return found.map((c) => c.trim());
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  return { node: ["p", {}, inline(lines.slice(at, end).map((l) => l.replace(/^ {1,3}/, "")).join("\n"))], used: end - at };
}

function starts(line) {
  return FENCE.test(line) || HEAD.test(line) || RULE.test(line) || QUOTE.test(line) || /^ {0,3}([-*+]|1[.)])[ \t]+\S/.test(line);
}

function indent(line) { return line.length - line.replace(/^[ \t]+/, "").length; }

// ---- words in a line -------------------------------------------------------------------------

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

export function inline(text, depth = 0) {
  const found = [];
  let plain = "";
  const put = (node) => { if (plain) { found.push(plain); plain = ""; } found.push(node); };
  let at = 0;
  while (at < text.length) {
    const c = text[at];
    if (c === "\\" && /[\\`*_{}[\]()#+\-.!|~<>]/.test(text[at + 1] || "")) { plain += text[at + 1]; at += 2; continue; }
    if (c === "\n") {
      const hard = / {2,}$/.test(plain);
      plain = plain.replace(/ +$/, "");
      if (hard) put(["br", {}, []]); else plain += "\n";
      at += 1; continue;
    }
    const step = depth < MOST_DEPTH && (coded(text, at) || linked(text, at, depth) || bare(text, at) || marked(text, at, depth));
    if (step) { put(step.node); at += step.used; } else { plain += c; at += 1; }
  }
  if (plain) found.push(plain);
  return found;
}

function coded(text, at) {
  if (text[at] !== "`") return null;
  const ticks = /^`+/.exec(text.slice(at))[0];
  let end = text.indexOf(ticks, at + ticks.length);
  while (end >= 0 && text[end + ticks.length] === "`") {
    let past = end; while (text[past] === "`") past += 1;
    end = text.indexOf(ticks, past);
  }
  if (end < 0) return { node: ticks, used: ticks.length };
  let body = text.slice(at + ticks.length, end).replace(/\n/g, " ");
  if (/^ .*\S.* $/.test(body)) body = body.slice(1, -1);
  return { node: ["code", {}, [body]], used: end + ticks.length - at };
}

function linked(text, at, depth) {
  const picture = text[at] === "!" && text[at + 1] === "[";
  if (text[at] !== "[" && !picture) return null;
  const found = /^!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^()\s<>]*(?:\([^()\s]*\)[^()\s<>]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(text.slice(at, at + 4000));
  if (!found) return null;
  const words = picture ? [found[1] || "picture"] : inline(found[1], depth + 1);
  return { node: link(found[2], words), used: found[0].length };
}

function bare(text, at) {
  if (text[at] === "<") {
    const found = /^<((?:https?:\/\/|mailto:)[^<>\s]+)>/i.exec(text.slice(at, at + 2100));
    return found && { node: link(found[1], [found[1]]), used: found[0].length };
  }
  if (text[at] !== "h" || (at && /[\w/]/.test(text[at - 1]))) return null;
  const found = /^https?:\/\/[^\s<>"'`]+/.exec(text.slice(at, at + 2100));
  if (!found) return null;
  let address = found[0].replace(/[.,;:!?*_~]+$/, "");
  if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
  return { node: link(address, [address]), used: address.length };
}

function link(address, words) {
  return SAFE.test(address) ? ["a", { href: address }, words] : ["span", {}, words];
}

function marked(text, at, depth) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || /\s/.test(text[at + mark.length] || " ")) continue;
    if (mark[0] === "_" && at && /\w/.test(text[at - 1])) continue;
    if (mark.length === 1 && text[at + 1] === mark) continue;
    let end = at + mark.length;
    while ((end = text.indexOf(mark, end + 1)) >= 0) {
      const inside = /\s/.test(text[end - 1]) || text[end - 1] === "\\";
      const longer = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
      const within = mark[0] === "_" && /\w/.test(text[end + mark.length] || "");
      if (!inside && !longer && !within) break;
    }
    if (end < 0) continue;
    if (mark.length === 2 && text[end + 2] === mark[0]) end += 1;
    return { node: [tag, {}, inline(text.slice(at + mark.length, end), depth + 1)], used: end + mark.length - at };
  }
  return null;
}

// ---- colours of code -------------------------------------------------------------------------

const KEYWORDS = new Set(("abstract and as assert async await bool boolean break case catch char class const continue def default del delete do double elif else enum except export extends extern false finally float fn for foreach from func function global go goto if impl implements import in include instanceof int interface is lambda let long loop match mod module mut namespace new nil none nonlocal not null or override package pass print private protected public pub raise ref return self short signed sizeof static string struct super switch template this throw trait true try type typedef typeof union unsafe unsigned use using var virtual void volatile when where while with yield").split(" "));
const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "ruby", "rb", "yaml", "yml", "toml", "r", "perl", "makefile", "dockerfile", "ini", "conf"]);

export function coloured(code, language) {
  const name = language.toLowerCase();
  if (!name || ["text", "txt", "plain", "markdown", "md"].includes(name) || code.length > 50000) return [code];
  const comment = HASH.has(name) ? "#[^\\n]*" : ["sql", "lua", "haskell", "hs"].includes(name) ? "--[^\\n]*" :
    ["html", "xml", "svg"].includes(name) ? "<!--[\\s\\S]*?(?:-->|$)" : ["json"].includes(name) ? "(?!)" : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)";
  const text = ["python", "py"].includes(name) ? `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|` : "";
  const pattern = new RegExp(`(${comment})|(${text}"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?|\`(?:[^\`\\\\]|\\\\.)*\`?)|(\\b0[xX][\\da-fA-F]+\\b|\\b\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?\\b)|([A-Za-z_]\\w*)(?=(\\s*\\()?)`, "g");
  const found = [];
  let last = 0;
  for (const part of code.matchAll(pattern)) {
    const kind = part[1] ? "comment" : part[2] ? "string" : part[3] ? "number" :
      KEYWORDS.has(part[4]) || (name === "sql" && KEYWORDS.has(part[4].toLowerCase())) ? "keyword" : part[5] ? "call" : "";
    if (!kind) continue;
    if (part.index > last) found.push(code.slice(last, part.index));
    found.push(["span", { kind }, [part[0]]]);
    last = part.index + part[0].length;
  }
  if (last < code.length) found.push(code.slice(last));
  return found;
}

// ---- DOM -------------------------------------------------------------------------------------

const TAGS = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "code", "blockquote", "ul", "ol", "li", "hr", "br",
  "strong", "em", "del", "a", "span", "table", "thead", "tbody", "tr", "th", "td"]);

export function draw(tree, document) {
  const whole = document.createDocumentFragment();
  for (const node of tree) whole.append(drawn(node, document));
  return whole;
}

function drawn(node, document) {
  if (typeof node === "string") return document.createTextNode(node);
  const [tag, attributes, children] = node;
  if (!TAGS.has(tag)) return document.createTextNode("");
  const made = document.createElement(tag);
  if (tag === "a" && SAFE.test(attributes.href)) {
    made.href = attributes.href;
    made.target = "_blank";
    made.rel = "noopener noreferrer nofollow";
  }
  if (attributes.align) made.className = `to-${attributes.align === "right" ? "right" : "center"}`;
  if (attributes.kind) made.className = `code-${attributes.kind}`;
  if (attributes.start) made.start = Number(attributes.start);
  if (tag === "pre") return framed(made, attributes.language, children[0][2][0], document);
  for (const child of children) made.append(drawn(child, document));
  if (tag === "table") {
    const frame = document.createElement("div");
    frame.className = "table";
    frame.append(made);
    return frame;
  }
  return made;
}

function framed(pre, language, code, document) {
  const frame = document.createElement("figure");
  frame.className = "code";
  const head = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "text";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy plain";
  copy.textContent = "Copy";
  head.append(name, copy);
  const body = document.createElement("code");
  for (const part of coloured(code, language)) body.append(drawn(part, document));
  pre.tabIndex = 0;
  pre.append(body);
  frame.append(head, pre);
  return frame;
}
