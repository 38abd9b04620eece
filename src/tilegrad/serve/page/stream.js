// Talking to the server: JSON, and answers as they are written.
// Invariant: addresses are relative to this page, so it works behind any path; what fails has words.

export class Failed extends Error {
  constructor(status, words) { super(words); this.status = status; }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// With a key of its own the page sends no other credentials: the browser would ask for them.
function credentials(key) { return key ? "omit" : "same-origin"; }

async function failure(response) {
  let words = "";
  try { words = (await response.json()).error.message; } catch { words = response.statusText; }
  return new Failed(response.status, words || `status ${response.status}`);
}

export async function ask(path, key, signal) {
  const response = await fetch(path, { headers: headers(key), credentials: credentials(key), signal, cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function* answer(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    credentials: credentials(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Failed(0, "the connection ended before the answer did");
    rest += value.replaceAll("\r", "");
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") { reader.cancel(); return; }
      if (!data) continue;
      const found = JSON.parse(data);
      if (found.error) throw new Failed(found.error.code || 0, found.error.message || "the server failed");
      yield found;
    }
  }
}
