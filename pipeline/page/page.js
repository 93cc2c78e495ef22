// The page itself: what was dropped, what is asked, what comes back.

const find = (id) => document.getElementById(id);
const KEY_NAME = "mediagate-key";
const media = [];
let running = null; // the AbortController of the question that is being answered

// ---- what is sent

const KINDS = [
  ["image", /\.(jpe?g|png|webp|gif|bmp|tiff?|jp2)$/i],
  ["video", /\.(mp4|m4v|mov|mkv|webm|avi|mpe?g|ts)$/i],
  ["audio", /\.(wav|mp3|m4a|aac|flac|ogg|opus|amr)$/i],
];

function kindOf(type, name) {
  const known = type.split("/")[0];
  if (KINDS.some(([kind]) => kind === known)) return known;
  return KINDS.find(([, pattern]) => pattern.test(name))?.[0] ?? null;
}

function add(files) {
  clearTrouble();
  for (const file of files) {
    const kind = kindOf(file.type, file.name);
    if (!kind) {
      showTrouble("This is no picture, clip or sound", file.name);
      continue;
    }
    media.push({ kind, name: file.name || `pasted ${kind}`, file, address: URL.createObjectURL(file) });
  }
  drawMedia();
}

function addUrl(url) {
  clearTrouble();
  const path = new URL(url).pathname;
  media.push({ kind: kindOf("", path) ?? "image", name: url, url, address: "" });
  drawMedia();
}

function remove(medium) {
  media.splice(media.indexOf(medium), 1);
  if (medium.address) URL.revokeObjectURL(medium.address);
  drawMedia();
  find("files").focus();
}

function drawMedia() {
  const rows = media.map((medium) => {
    const drop = element("button", "remove", "×");
    drop.type = "button";
    drop.setAttribute("aria-label", `Leave out ${medium.name}`);
    drop.onclick = () => remove(medium);
    const size = medium.file ? sizeOf(medium.file.size) : "by URL";
    return element("li", "", thumb(medium), element("span", "name", medium.name), element("span", "hint", size), drop);
  });
  find("media").replaceChildren(...rows);
}

// ---- trouble

function showTrouble(title, text, code = "", requestId = "") {
  find("trouble-title").replaceChildren(title, ...(code ? [" ", element("code", "", code)] : []));
  find("trouble-text").textContent = text;
  find("trouble-id").textContent = requestId ? `Request ${requestId}` : "";
  find("trouble").hidden = false;
}

function clearTrouble() {
  find("trouble").hidden = true;
}

function showRefusal(error) {
  if (error.status === 401) askForKey();
  const titles = { 0: "No answer", 401: "A key is needed", 429: "The gateway is busy", 503: "Nobody can answer now" };
  const title = titles[error.status] ?? (error.status === 200 ? "The answer broke off" : `Refused with ${error.status}`);
  showTrouble(title, error.message, error.code, error.requestId);
}

function askForKey() {
  find("key-field").hidden = false;
  find("key").focus();
  find("key").select();
}

// ---- asking

async function send() {
  if (running) return;
  clearTrouble();
  const sent = [...media];
  const answer = find("answer");
  const begun = performance.now();
  running = new AbortController();
  busy(true);
  answer.replaceChildren();
  find("thought").hidden = true;
  find("thought").textContent = "";
  find("counts").textContent = "";
  const { signal } = running;
  try {
    const body = await bodyOf(find("model").value, find("prompt").value.trim(), sent);
    let tokens = 0;
    await ask({
      body,
      key: find("key").value,
      signal,
      onExplained: (told) => showExplained(told, sent),
      onDelta: (delta) => write(answer, delta),
      onUsage: (usage) => (tokens = usage.completion_tokens),
    });
    const seconds = (performance.now() - begun) / 1000;
    find("counts").textContent = `${number.format(tokens)} tokens in ${seconds.toFixed(2)} s`;
    sessionStorage.setItem(KEY_NAME, find("key").value);
  } catch (error) {
    if (error instanceof Refusal) showRefusal(error);
    else if (error.name === "AbortError") find("counts").textContent = "Stopped.";
    else showTrouble("No answer", String(error.message ?? error));
  } finally {
    running = null;
    busy(false);
    if (!answer.hasChildNodes()) answer.append(element("p", "empty", "Nothing was said."));
  }
}

function write(answer, delta) {
  if (delta.reasoning_content) {
    find("thought").hidden = false;
    find("thought").append(delta.reasoning_content);
  }
  if (delta.content) answer.append(delta.content);
}

function busy(is) {
  find("answer").setAttribute("aria-busy", String(is));
  find("ask").disabled = is;
  find("stop").hidden = !is;
}

// ---- what is served

async function showModels() {
  const state = find("state");
  const reply = await fetch("v1/models").catch(() => null);
  const models = reply?.ok ? (await reply.json()).data : [];
  find("model").replaceChildren(...models.map(optionOf));
  find("ask").disabled = !models.length;
  if (models.length) {
    state.textContent = models.length === 1 ? "One model is served" : `${models.length} models are served`;
    return;
  }
  state.textContent = "No model is served yet";
  setTimeout(showModels, 2000);
}

function optionOf(model) {
  const kinds = Object.keys(model.multimodal?.limits ?? {});
  const words = { image: "pictures", video: "clips", audio: "sounds" };
  const takes = kinds.length ? kinds.map((kind) => words[kind]).join(", ") : "text";
  const option = element("option", "", `${model.id} — ${takes}`);
  option.value = model.id;
  return option;
}

// ---- hands

function isUrl(text) {
  return /^https?:\/\/\S+$/i.test(text);
}

const drop = find("drop");
for (const name of ["dragenter", "dragover"]) {
  addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
}
addEventListener("dragleave", (event) => event.relatedTarget || drop.classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  const text = event.dataTransfer.getData("text/uri-list").split("\n")[0].trim();
  if (event.dataTransfer.files.length) add(event.dataTransfer.files);
  else if (isUrl(text)) addUrl(text);
});
addEventListener("paste", (event) => {
  const text = event.clipboardData.getData("text").trim();
  const isWriting = event.target.closest?.("textarea, input:not([type=file])");
  if (event.clipboardData.files.length) add(event.clipboardData.files);
  else if (!isWriting && isUrl(text)) addUrl(text);
  else return;
  event.preventDefault();
});
find("files").onchange = ({ target }) => {
  add(target.files);
  target.value = "";
};
find("form").onsubmit = (event) => {
  event.preventDefault();
  send();
};
find("stop").onclick = () => running?.abort();
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("form").requestSubmit();
});

if (/Mac|iP(hone|ad)/.test(navigator.platform)) find("ask-keys").textContent = "⌘ ↵";
find("key").value = sessionStorage.getItem(KEY_NAME) ?? "";
find("key-field").hidden = !find("key").value;
showModels();
