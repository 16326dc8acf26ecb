// @ts-check
// Shows the beans as a graph of their dependencies, and as a table below it.
// Not here: where each bean is placed (layout.js).

import {at, counted, draw, make, newId} from "./dom.js";
import {HEIGHT, arrange, pathOf} from "./layout.js";

const SCOPES = ["application", "request", "call", "dependent"];
const LINK_KINDS = {
  holds: "holds it",
  "looks up": "looks it up when needed",
  calls: "offers its tools to a model",
  searches: "asks it for passages",
};

export function showBeans(program, wanted) {
  const {beans, left_out: absent} = program;
  if (!at("beans").children.length) at("beans").append(legend(), graph(beans), table(beans), ...leftOut(absent));
  if (wanted) choose(wanted);
}

function legend() {
  return make(
    "div",
    {class: "legend"},
    SCOPES.map(scope => make("span", {class: `scope ${scope}`}, make("i", {"aria-hidden": "true"}), scope)),
    Object.entries(LINK_KINDS).map(([manner, text]) =>
      make("span", {class: `manner ${manner.replace(" ", "-")}`}, make("i", {"aria-hidden": "true"}), text),
    ),
  );
}

// --- sizes

// Measures the width of a text in the page's font, in pixels.
const measuring = document.createElement("canvas").getContext("2d");
function textWidth(text, font) {
  measuring.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return measuring.measureText(text).width;
}

const TYPE = "600 13px",
  KIND = "11px",
  LEFT = 21,
  RIGHT = 12,
  WIDEST = 250;
const PRODUCER = /^(call|coroutine|generator|async generator) /;
const kindOf = bean => `${bean.scope} · ${PRODUCER.test(bean.made_by) ? "producer" : bean.made_by.split(" of ")[0]}`;
const widthOf = bean =>
  Math.min(
    WIDEST,
    Math.max(110, LEFT + RIGHT + Math.ceil(Math.max(textWidth(bean.type, TYPE), textWidth(kindOf(bean), KIND)))),
  );

function cut(text, width) {
  const room = width - LEFT - RIGHT;
  if (textWidth(text, TYPE) <= room + 1) return text;
  while (text && textWidth(`${text}…`, TYPE) > room) text = text.slice(0, -1);
  return `${text}…`;
}

// --- drawing

function boxOf({bean, x, y, width}) {
  const names = bean.links.map(link => `${link.manner} ${link.to}`).join(", ");
  return draw(
    "g",
    {
      class: `bean ${bean.scope}`,
      transform: `translate(${x},${y})`,
      tabindex: "0",
      role: "button",
      "data-bean": bean.name,
      "aria-label": `${bean.type}, ${bean.scope}, ${bean.made_by}${names ? `; ${names}` : ""}`,
      "aria-pressed": "false",
      onclick: () => choose(bean.name),
      onkeydown(event) {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          choose(bean.name);
        }
      },
    },
    draw("title", {}, bean.type),
    draw("rect", {class: "box", width, height: HEIGHT, rx: 9}),
    draw("rect", {class: "stripe", width: 5, height: HEIGHT - 18, x: 8, y: 9, rx: 2.5}),
    draw("text", {class: "type", x: LEFT, y: 20}, cut(bean.type, width)),
    draw("text", {class: "kind", x: LEFT, y: 36}, kindOf(bean)),
  );
}

function graph(beans) {
  const known = new Set(beans.map(bean => bean.name));
  const links = beans.flatMap(bean =>
    bean.links.filter(link => known.has(link.to)).map(link => ({from: bean.name, ...link})),
  );
  const linked = new Set(links.flatMap(link => [link.from, link.to]));
  const shown = beans.filter(bean => linked.has(bean.name));
  const alone = beans.filter(bean => !linked.has(bean.name));
  const rest = alone.length
    ? make(
        "p",
        {class: "alone"},
        "No dependencies: ",
        alone.map(bean =>
          make("span", {class: `chip scope ${bean.scope}`}, make("i", {"aria-hidden": "true"}), bean.type),
        ),
      )
    : null;
  if (!shown.length) return make("div", {}, make("p", {class: "empty"}, "No bean depends on another."), rest);
  const {nodes, routes, width, height} = arrange(shown, links, widthOf);
  const arrow = newId("arrow");
  const marker = draw(
    "marker",
    {id: arrow, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse"},
    draw("path", {d: "M0,0 L8,4 L0,8 z"}),
  );
  const lines = routes.map(({link, path}) =>
    draw(
      "path",
      {
        class: `link ${link.manner.replace(" ", "-")}`,
        d: pathOf(path),
        "marker-end": `url(#${arrow})`,
        "data-from": link.from,
        "data-to": link.to,
      },
      draw("title", {}, `${link.from} ${link.manner} ${link.to}`),
    ),
  );
  const image = draw(
    "svg",
    {width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": counted(shown.length, "bean")},
    draw("defs", {}, marker),
    lines,
    [...nodes.values()].map(boxOf),
  );
  // The graph shrinks with the window to 72%, then it scrolls.
  image.style.minWidth = `${Math.round(width * 0.72)}px`;
  return make(
    "div",
    {},
    make("div", {class: "graph", tabindex: "0", role: "region", "aria-label": "Graph of the beans"}, image),
    rest,
  );
}

let chosen = null;

// Highlights one bean and its dependencies in the graph and in the table. Selecting it again removes the highlight.
function choose(name) {
  chosen = chosen === name ? null : name;
  const near = new Set([chosen]);
  for (const line of /** @type {NodeListOf<SVGElement>} */ (document.querySelectorAll("#beans .link"))) {
    const touches = line.dataset.from === chosen || line.dataset.to === chosen;
    line.classList.toggle("lit", touches);
    line.classList.toggle("dim", chosen !== null && !touches);
    if (touches) near.add(line.dataset.from).add(line.dataset.to);
  }
  for (const box of /** @type {NodeListOf<SVGElement>} */ (document.querySelectorAll("#beans .bean"))) {
    box.classList.toggle("lit", box.dataset.bean === chosen);
    box.classList.toggle("dim", chosen !== null && !near.has(box.dataset.bean));
    box.setAttribute("aria-pressed", String(box.dataset.bean === chosen));
  }
  for (const row of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("#beans tr[data-bean]")))
    row.classList.toggle("lit", row.dataset.bean === chosen);
}

function table(beans) {
  const types = new Map(beans.map(bean => [bean.name, bean.type]));
  const head = ["Bean", "Type", "Scope", "Created by", "Depends on", "Tools"].map(text =>
    make("th", {scope: "col"}, text),
  );
  const rows = beans.map(bean =>
    make(
      "tr",
      {"data-bean": bean.name},
      make("th", {scope: "row"}, make("code", {}, bean.name)),
      make("td", {}, bean.type),
      make("td", {}, make("span", {class: `scope ${bean.scope}`}, make("i", {"aria-hidden": "true"}), bean.scope)),
      make("td", {}, bean.made_by),
      make(
        "td",
        {},
        bean.links.map(link =>
          make("div", {}, make("span", {class: "about"}, `${link.manner} `), types.get(link.to) ?? link.to),
        ),
      ),
      make(
        "td",
        {},
        bean.tools.map(tool => make("div", {}, make("code", {}, tool))),
      ),
    ),
  );
  return make(
    "div",
    {class: "table", tabindex: "0", role: "region", "aria-label": "Table of the beans"},
    make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)),
  );
}

// Shows what conditions left out, and why.
function leftOut(absent) {
  if (!absent.length) return [];
  return [
    make("h2", {}, "Left out"),
    make(
      "ul",
      {class: "left-out"},
      absent.map(each => make("li", {}, make("code", {}, each.name), `: ${each.why}`)),
    ),
  ];
}
