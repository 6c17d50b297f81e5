// Elements from data. Text only ever becomes text: nothing here, nor anywhere else, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `attributes` are attributes, `on...` listeners, `style` an object of properties; children are nodes or text. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function show(root, ...children) {
  root.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

/** A select with these options, [value, text] each. Keeps what is chosen when options change. */
export function fillSelect(select, options) {
  const told = JSON.stringify(options);
  if (select.dataset.told === told) return;
  const before = select.value;
  select.dataset.told = told;
  show(
    select,
    options.map(([value, text]) => h("option", { value }, text)),
  );
  if (options.some(([value]) => value === before)) select.value = before;
}

/** What stands where there is nothing to show yet: what is missing, and what to do about it. */
export function notice(kind, title, ...advice) {
  return h(
    "div",
    { class: `notice ${kind}`, role: kind === "error" ? "alert" : "note" },
    h("strong", {}, title),
    advice.map((line) => h("p", {}, line)),
  );
}

export function code(text) {
  return h("code", {}, text);
}

/** Calls `work` now and then again, `everyMs` after it ended, while anybody looks. Returns what stops it. */
export function poll(everyMs, work) {
  let stopped = false;
  let timer = 0;
  async function turn() {
    if (!document.hidden) await work();
    if (!stopped) timer = setTimeout(turn, everyMs);
  }
  turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}

/** A table; the names of columns of numbers end in "#". `body` are rows, or the element that gets them. */
export function table(columns, body, attributes = {}) {
  const heads = columns.map((name) =>
    h("th", { scope: "col", class: name.endsWith("#") ? "number" : "" }, name.replace("#", "")),
  );
  const rows = body instanceof Element ? body : h("tbody", {}, body);
  return h("div", { class: "scroll" }, h("table", attributes, h("thead", {}, h("tr", {}, heads)), rows));
}

export function cell(...content) {
  return h("td", {}, content);
}

export function number(content) {
  return h("td", { class: "number" }, content);
}
