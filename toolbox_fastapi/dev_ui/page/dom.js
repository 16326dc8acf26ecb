// @ts-check
// Creates elements and formats values. Text is always set as text, never as markup.

/** @param {string} id @returns {any} the element with this id */
export const at = id => document.getElementById(id);

// Characters that nobody sees: controls, spaces that look like others, fillers, selectors, and what reorders text. Line
// breaks and tabs stay, and so do selectors and joiners that make a picture, and joiners between letters that they shape.
const NO_SHAPE = "[\\u{16fe4}\\p{C}\\p{Z}\\p{DI}\\u2800\\u{1d159}]";
const SHAPED = "Arab Syrc Nkoo Mong Deva Beng Guru Gujr Orya Taml Telu Knda Mlym Sinh Khmr Mymr Tibt"
  .split(" ")
  .map(script => `\\p{scx=${script}}`)
  .join("");
const SEEN = `\\p{RGI_Emoji}|(?<=[${SHAPED}])[\\u200c\\u200d](?=[${SHAPED}])`;
const UNSEEN = new RegExp(`(${SEEN})|(?![\\n\\t ])${NO_SHAPE}`, "gv");
// A text that arrives in pieces: a piece does not show if a joiner or selector belongs to a picture.
const UNSEEN_IN_PROSE = new RegExp(`(?![\\n\\t\\p{Zs}]|\\u200c|\\u200d|\\ufe0e|\\ufe0f)${NO_SHAPE}`, "gv");
const hex = number => number.toString(16).padStart(4, "0");
const numbered = found => `U+${hex(found.codePointAt(0)).toUpperCase()}`;

// Returns a text in which such characters are shown as `U+202E`: a person must see what a tool gets.
export const visible = text => text.replaceAll("\r\n", "\n").replace(UNSEEN, (found, seen) => seen ?? numbered(found));

// Returns an answer for a reader, who decides nothing by it: its spaces, joiners and emoji stay.
export const readable = text => text.replaceAll("\r\n", "\n").replace(UNSEEN_IN_PROSE, numbered);

// Returns the same JSON with such characters as escapes, so that it can be shown, edited and sent.
export const escaped = json =>
  json.replace(
    UNSEEN,
    (found, seen) => seen ?? [...Array(found.length).keys()].map(at => `\\u${hex(found.charCodeAt(at))}`).join(""),
  );

// Creates an element. `on…` properties add event listeners, true and false set and omit an attribute, others are attributes.
/** @returns {any} */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  const shown = children.flat().filter(child => child !== null && child !== undefined && child !== false);
  // The text of a text area is what its user edits and sends.
  element.append(...shown.map(child => (typeof child === "string" && tag !== "textarea" ? visible(child) : child)));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

// Creates an SVG element.
/** @returns {any} */
export function draw(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

let lastId = 0;
export const newId = prefix => `${prefix}-${++lastId}`;

export function duration(seconds) {
  if (seconds < 0.001) return `${Math.max(1, Math.round(seconds * 1e6))} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export const clock = milliseconds =>
  new Date(milliseconds).toLocaleTimeString([], {hour12: false}) +
  "." +
  String(Math.floor(milliseconds % 1000)).padStart(3, "0");

export const when = text => new Date(text).toLocaleString([], {hour12: false});

export const counted = (count, one, several = `${one}s`) => `${count} ${count === 1 ? one : several}`;

// Formats JSON text, token by token, because parsed numbers lose digits; returns any other text unchanged.
export function pretty(text) {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g);
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  const opens = token => token === "{" || token === "[";
  const closes = token => token === "}" || token === "]";
  const write = (token, index) => {
    if (token === ":") return ": ";
    if (token === ",") return `,${line()}`;
    if (opens(token) && !closes(tokens[index + 1])) {
      depth++;
      return `${token}${line()}`;
    }
    if (closes(token) && !opens(tokens[index - 1])) {
      depth--;
      return `${line()}${token}`;
    }
    return token;
  };
  return tokens.map(write).join("");
}

// Shows a text that may be long and scrolls with the keyboard. A very long one is cut until the user asks for all of it.
const LONGEST = 100_000;

export function block(text, label) {
  const whole = make("pre", {tabindex: "0", role: "group", "aria-label": label}, text.slice(0, LONGEST));
  if (text.length <= LONGEST) return whole;
  const more = make(
    "button",
    {
      type: "button",
      class: "small quiet",
      onclick() {
        whole.textContent = visible(text);
        more.remove();
        whole.focus();
      },
    },
    `Show all ${text.length.toLocaleString("en")} characters`,
  );
  return make("div", {class: "long"}, whole, more);
}

// Shows an image, a document or a recording, with a link that saves it. Files of other servers are not loaded.
export function mediaOf({kind, name, url}) {
  if (!url.startsWith("data:"))
    return make(
      "p",
      {},
      /^https?:\/\//i.test(url) ? make("a", {href: url, target: "_blank", rel: "noreferrer"}, url) : url,
    );
  const save = make("a", {href: url, download: name}, `Download ${name}`);
  if (kind === "image") return make("figure", {}, make("img", {src: url, alt: name}), make("figcaption", {}, save));
  if (kind === "audio")
    return make(
      "figure",
      {},
      make("audio", {controls: true, src: url, "aria-label": name}),
      make("figcaption", {}, save),
    );
  return make("p", {}, save);
}

// Disables a button without taking the focus from it.
export const setDisabled = (button, off) => button.setAttribute("aria-disabled", String(off));

// Shows an error at the top of the page; null removes it.
export function showError(message) {
  at("alert").textContent = visible(message ?? "");
  at("alert").hidden = !message;
}
