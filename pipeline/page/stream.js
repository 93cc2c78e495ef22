// One question to the gateway, and its answer as it comes.

// A refusal as the gateway words it; `status` 0: no answer at all.
class Refusal extends Error {
  constructor(status, code, message, requestId) {
    super(message);
    Object.assign(this, { status, code, requestId });
  }
}

async function refusalOf(reply) {
  const requestId = reply.headers.get("x-request-id") ?? "";
  const body = await reply.json().catch(() => null);
  const error = body?.error ?? {};
  return new Refusal(reply.status, error.code ?? "", error.message ?? reply.statusText, requestId);
}

// Yields {comment} and {data}, in the order they stand in the stream.
async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const frames = held.split("\n\n");
    held = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith(": ")) yield { comment: frame.slice(2) };
      else if (frame.startsWith("data: ")) yield { data: frame.slice(6) };
    }
  }
}

// `onExplained(told)`, `onDelta(delta)`, `onUsage(usage)` are called as things come; throws Refusal.
async function ask({ body, key, signal, onExplained, onDelta, onUsage }) {
  const headers = { "Content-Type": "application/json", "X-Mediagate-Explain": "1" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch("v1/chat/completions", { method: "POST", headers, body, signal });
  if (!reply.ok) throw await refusalOf(reply);
  const requestId = reply.headers.get("x-request-id") ?? "";
  let ended = false;
  for await (const { comment, data } of serverSentEvents(reply.body)) {
    if (comment?.startsWith("mediagate ")) onExplained(JSON.parse(comment.slice("mediagate ".length)));
    if (data === undefined) continue;
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const event = JSON.parse(data);
    if (event.error) throw new Refusal(reply.status, event.error.code, event.error.message, requestId);
    if (event.choices?.length) onDelta(event.choices[0].delta);
    if (event.usage) onUsage(event.usage);
  }
  if (!ended) throw new Refusal(0, "", "The answer broke off.", requestId);
}

const base64Of = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

// The request's body as a Blob: a clip's base64 is never part of one long string.
async function bodyOf(model, prompt, media) {
  const parts = [];
  for (const medium of media) {
    if (parts.length) parts.push(",");
    const name = `${medium.kind}_url`;
    if (medium.url) {
      parts.push(JSON.stringify({ type: name, [name]: { url: medium.url } }));
      continue;
    }
    const base64 = await base64Of(medium.file);
    parts.push(`{"type":"${name}","${name}":{"url":"data:application/octet-stream;base64,`, base64, '"}}');
  }
  if (prompt || !parts.length) {
    if (parts.length) parts.push(",");
    parts.push(JSON.stringify({ type: "text", text: prompt }));
  }
  const settings = JSON.stringify({ model, stream: true, stream_options: { include_usage: true } });
  return new Blob([settings.slice(0, -1), ',"messages":[{"role":"user","content":[', ...parts, "]}]}"]);
}
