// What the gateway did, drawn: one entry for each medium, then where the time went.

const STAGES = {
  admit: ["t-gate", "a place, and the body’s way in"],
  prompt: ["t-words", "template and tokens"],
  fetch: ["t-media", "bytes into shared memory"],
  inspect: ["t-media", "base64, hash, header"],
  wait: ["t-gate", "for room and a process"],
  decode: ["t-pixels", "file to pixels, or samples"],
  preprocess: ["t-pixels", "to the encoder’s tensors"],
  send: ["t-engine", "tensors to the engine"],
  engine: ["t-engine", "to its first word"],
};

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const times = (...sides) => sides.join(" × ");

function sizeOf(bytes) {
  const units = ["bytes", "kB", "MB", "GB"];
  let at = 0;
  while (bytes >= 1000 && at < units.length - 1) {
    bytes /= 1000;
    at += 1;
  }
  return `${at ? bytes.toPrecision(3) : bytes} ${units[at]}`;
}

function milliseconds(value) {
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value)} ms`;
}

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const GLYPHS = { image: "▦", video: "▷", audio: "♪" };

// What stands before a medium's name: the picture itself, or a sign for what cannot be shown so small.
function thumb(medium) {
  const sign = element("span", "thumb", GLYPHS[medium.kind]);
  sign.setAttribute("aria-hidden", "true");
  if (medium.kind !== "image" || !medium.address) return sign;
  const picture = element("img", "thumb");
  picture.alt = "";
  picture.onerror = () => picture.replaceWith(sign);
  picture.src = medium.address;
  return picture;
}

function preview(medium) {
  const { address } = medium;
  const shown = element({ image: "img", video: "video", audio: "audio" }[medium.kind]);
  shown.src = address;
  if (medium.kind === "image") shown.alt = medium.name;
  else shown.controls = true;
  return shown;
}

// The wire's grid of patches: [time, rows, columns], or [rows, columns]; null for a family that has none.
function gridOf(told) {
  const name = Object.keys(told.values).find((key) => key.includes("grid"));
  if (!name) return null;
  const values = told.values[name];
  return values.length === 2 || values.length === 3 ? values : null;
}

// Lines around the cells that become one token each.
function tokenLines(told) {
  const grid = gridOf(told);
  if (!grid || told.modality === "audio") return null;
  const [rows, columns] = grid.slice(-2);
  const steps = grid.length === 3 ? grid[0] : 1;
  const merge = Math.round(Math.sqrt((steps * rows * columns) / told.tokens)) || 1;
  const [across, down] = [columns / merge, rows / merge];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${across} ${down}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(svg.namespaceURI, "path");
  let drawn = "";
  for (let x = 1; x < across; x += 1) drawn += `M${x} 0V${down}`;
  for (let y = 1; y < down; y += 1) drawn += `M0 ${y}H${across}`;
  path.setAttribute("d", drawn);
  svg.append(path);
  return svg;
}

function sizesLine(told) {
  const line = element("p", "sizes");
  if (told.modality === "audio") {
    line.append(`${number.format(told.frames / told.rate)} s`, element("span", "from", `at ${number.format(told.rate)} Hz`));
    return line;
  }
  const [height, width] = told.size;
  const [toHeight, toWidth] = told.resized;
  line.append(
    element("span", "from", times(width, height)),
    element("span", "to", element("span", "unseen", "becomes"), "→"),
    element("span", "", times(toWidth, toHeight)),
  );
  return line;
}

function factsOf(told) {
  const facts = [["File", `${told.format || told.modality}, ${sizeOf(told.bytes)}`]];
  if (told.modality === "video") {
    facts.push(["Frames", `${told.used_frames} of ${told.frames}, ${number.format(told.rate)} a second`]);
  }
  const grid = gridOf(told);
  if (grid) facts.push(["Grid", `${times(...grid)} patches`]);
  facts.push(["Tensor", times(...told.shape)]);
  const end = told.begin + told.length - 1;
  facts.push(["Tokens", `${number.format(told.tokens)}, at ${number.format(told.begin)} to ${number.format(end)} of the prompt`]);
  facts.push(["BLAKE3", told.hash]);
  return facts;
}

function itemEntry(told, medium) {
  const entry = element("article", "item");
  if (medium?.address) {
    const seen = element("div", "seen", preview(medium));
    const lines = tokenLines(told);
    if (lines) seen.append(lines);
    entry.append(seen);
  }
  entry.append(sizesLine(told));
  const list = element("dl", "facts");
  for (const [name, value] of factsOf(told)) {
    list.append(element("dt", "", name), element("dd", name === "BLAKE3" ? "hash" : "", value));
  }
  entry.append(list);
  return entry;
}

function stageRows(stages) {
  const bar = [];
  const rows = [];
  for (const [name, ms] of Object.entries(stages)) {
    const [tone, meaning] = STAGES[name] ?? ["t-gate", ""];
    const piece = element("i", tone);
    piece.style.flexGrow = String(Math.max(ms, 0.001));
    bar.push(piece);
    const head = element("th", tone, name);
    head.scope = "row";
    rows.push(element("tr", "", head, element("td", "", meaning), element("td", "", milliseconds(ms))));
  }
  return [bar, rows];
}

// `media`: what was sent, in the order of the told items.
function showExplained(told, media) {
  const find = (id) => document.getElementById(id);
  find("did-empty").hidden = true;
  find("items").replaceChildren(...told.media.map((one, at) => itemEntry(one, media[at])));
  const [bar, rows] = stageRows(told.stages_ms);
  find("bar").replaceChildren(...bar);
  find("stages").replaceChildren(...rows);
  find("total").textContent = milliseconds(told.total_ms);
  const byWorker = media.length && !told.media.length ? " Its worker processes the media itself." : "";
  const tensors = told.tensor_bytes ? `, and ${sizeOf(told.tensor_bytes)} of tensors` : "";
  find("prompt-note").textContent = `The engine got a prompt of ${number.format(told.prompt_tokens)} tokens${tensors}.${byWorker}`;
  find("times").hidden = false;
}
