// Ask the server; an error has what it says: field, expected, got, hint.

export async function ask(path, body = {}) {
  const reply = await fetch(path, { method: "POST", body: JSON.stringify(body) });
  const found = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(found.error), found);
  return found;
}
