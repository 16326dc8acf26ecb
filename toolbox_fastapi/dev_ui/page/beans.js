// The beans as a graph: who holds, looks up or calls whom; below it the same as a table, for reading.

import {at, counted, draw, make, newId} from "./dom.js";

const HEIGHT = 46, ROW = 64, GAP = 72, PAD = 14;
const SCOPES = ["application", "request", "call", "dependent"];
const MANNERS = {holds: "holds it", "looks up": "looks it up when it needs it", calls: "lets a model call its tools"};

export function showBeans(program, wanted) {
  const {beans} = program;
  if (!at("beans").children.length) at("beans").append(legend(), graph(beans), table(beans));
  if (wanted) choose(wanted);
}

function legend() {
  return make("div", {class: "legend"},
    SCOPES.map(scope => make("span", {class: `scope ${scope}`}, make("i", {"aria-hidden": "true"}), scope)),
    Object.entries(MANNERS).map(([manner, text]) => make("span", {class: `manner ${manner.replace(" ", "-")}`}, make("i", {"aria-hidden": "true"}), text)));
}

// --- where everything is put

// How wide a text is drawn, in the page's own font.
const pen = document.createElement("canvas").getContext("2d");
function drawn(text, font) {
  pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

const TYPE = "600 13px", KIND = "11px", LEFT = 21, RIGHT = 12, WIDEST = 250;
const MAKERS = new Set(["AI service", "REST client", "class", "instance", "seed"]);
const kindOf = bean => `${bean.scope} · ${MAKERS.has(bean.made_by) ? bean.made_by : "producer"}`;
const widthOf = bean => Math.min(WIDEST, Math.max(110, LEFT + RIGHT + Math.ceil(Math.max(drawn(bean.type, TYPE), drawn(kindOf(bean), KIND)))));

function cut(text, width) {
  const room = width - LEFT - RIGHT;
  if (drawn(text, TYPE) <= room + 1) return text;
  while (text && drawn(`${text}…`, TYPE) > room) text = text.slice(0, -1);
  return `${text}…`;
}

// Layers from left to right, so that links lead to the right; those that would close a circle do not count.
function layersOf(beans, links) {
  const out = new Map(beans.map(bean => [bean.name, []]));
  for (const link of links) out.get(link.from).push(link.to);
  const state = new Map(), order = [];
  const visit = name => {
    state.set(name, "open");
    for (const to of out.get(name)) if (!state.has(to)) visit(to);
    state.set(name, "done");
    order.unshift(name);
  };
  for (const bean of beans) if (!state.has(bean.name)) visit(bean.name);
  const rank = new Map(order.map((name, index) => [name, index]));
  const layer = new Map(order.map(name => [name, 0]));
  for (const name of order) for (const to of out.get(name))
    if (rank.get(to) > rank.get(name)) layer.set(to, Math.max(layer.get(to), layer.get(name) + 1));
  return layer;
}

// Nodes in columns; a link over several columns passes through places of its own, so that it crosses no bean.
function arrange(beans, links) {
  const layer = layersOf(beans, links);
  const columns = [];
  const put = (index, node) => { (columns[index] ??= []).push(node); return node; };
  const nodes = new Map(beans.map(bean => [bean.name, put(layer.get(bean.name), {bean, width: widthOf(bean), near: []})]));
  const routes = links.map(link => {
    let from = nodes.get(link.from);
    const to = nodes.get(link.to), path = [from];
    const [low, high] = [layer.get(link.from), layer.get(link.to)];
    for (let index = low + 1; index < high; index++) path.push(put(index, {width: 0, near: []}));
    path.push(to);
    for (const each of path.slice(1)) { from.near.push(each); each.near.push(from); from = each; }
    return {link, path};
  });
  for (let round = 0; round < 8; round++) {
    for (const column of round % 2 ? columns.toReversed() : columns) {
      const wish = node => node.near.length ? node.near.reduce((sum, each) => sum + (each.y ?? 0), 0) / node.near.length : node.y ?? 0;
      if (round) column.sort((one, other) => wish(one) - wish(other));
      let y = 0;
      for (const node of column) { node.y = y; y += node.bean ? ROW : ROW / 2; }
      const middle = y / 2;
      for (const node of column) node.y -= middle;
    }
  }
  let x = PAD;
  for (const column of columns) {
    const width = Math.max(...column.map(node => node.width), 0);
    for (const node of column) { node.x = x; node.column = width; }
    x += width + GAP;
  }
  const top = Math.min(...columns.flat().map(node => node.y));
  for (const node of columns.flat()) node.y += PAD - top;
  return {nodes, routes, width: x - GAP + PAD, height: Math.max(...columns.flat().map(node => node.y)) + HEIGHT + PAD};
}

// --- drawing

const middle = node => node.y + HEIGHT / 2;

function lineOf(path) {
  const last = path.length - 1;
  const start = path[0], end = path[last];
  if (end.x <= start.x) {  // a link back, around below
    const y = Math.max(start.y, end.y) + HEIGHT + 16;
    return `M${start.x + start.width},${middle(start)} C${start.x + start.width + 50},${y} ${end.x - 50},${y} ${end.x - 2},${middle(end)}`;
  }
  let line = `M${start.x + start.width},${middle(start)}`, at = [start.x + start.width, middle(start)];
  for (const node of path.slice(1)) {
    const to = [node.bean ? node.x - 2 : node.x, middle(node)], half = (to[0] - at[0]) / 2;
    line += ` C${at[0] + half},${at[1]} ${to[0] - half},${to[1]} ${to[0]},${to[1]}`;
    at = to;
    if (!node.bean) { line += ` h${node.column}`; at = [node.x + node.column, to[1]]; }
  }
  return line;
}

function boxOf({bean, x, y, width}) {
  const names = bean.links.map(link => `${link.manner} ${link.to}`).join(", ");
  return draw("g", {class: `bean ${bean.scope}`, transform: `translate(${x},${y})`, tabindex: "0", role: "button", "data-bean": bean.name,
    "aria-label": `${bean.type}, ${bean.scope}, ${bean.made_by}${names ? `; ${names}` : ""}`, "aria-pressed": "false",
    onclick: () => choose(bean.name), onkeydown(event) { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(bean.name); } }},
    draw("title", {}, bean.type),
    draw("rect", {class: "box", width, height: HEIGHT, rx: 9}),
    draw("rect", {class: "stripe", width: 5, height: HEIGHT - 18, x: 8, y: 9, rx: 2.5}),
    draw("text", {class: "type", x: LEFT, y: 20}, cut(bean.type, width)),
    draw("text", {class: "kind", x: LEFT, y: 36}, kindOf(bean)));
}

function graph(beans) {
  const known = new Set(beans.map(bean => bean.name));
  const links = beans.flatMap(bean => bean.links.filter(link => known.has(link.to)).map(link => ({from: bean.name, ...link})));
  const linked = new Set(links.flatMap(link => [link.from, link.to]));
  const shown = beans.filter(bean => linked.has(bean.name));
  const alone = beans.filter(bean => !linked.has(bean.name));
  const rest = alone.length ? make("p", {class: "alone"}, "Bound to nothing: ", alone.map(bean => make("span", {class: `chip scope ${bean.scope}`}, make("i", {"aria-hidden": "true"}), bean.type))) : null;
  if (!shown.length) return make("div", {}, make("p", {class: "empty"}, "No bean is bound to another."), rest);
  const {nodes, routes, width, height} = arrange(shown, links);
  const arrow = newId("arrow");
  const marker = draw("marker", {id: arrow, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse"}, draw("path", {d: "M0,0 L8,4 L0,8 z"}));
  const lines = routes.map(({link, path}) => draw("path", {class: `link ${link.manner.replace(" ", "-")}`, d: lineOf(path), "marker-end": `url(#${arrow})`,
    "data-from": link.from, "data-to": link.to}, draw("title", {}, `${link.from} ${link.manner} ${link.to}`)));
  const image = draw("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": counted(shown.length, "bean")},
    draw("defs", {}, marker), lines, [...nodes.values()].map(boxOf));
  // It shrinks with the window while it can be read, then it is scrolled.
  image.style.minWidth = `${Math.round(width * 0.72)}px`;
  return make("div", {}, make("div", {class: "graph", tabindex: "0", role: "region", "aria-label": "Graph of the beans"}, image), rest);
}

let chosen = null;

// Brings out one bean with what it is bound to, here and in the table; once more, and all are equal again.
function choose(name) {
  chosen = chosen === name ? null : name;
  const near = new Set([chosen]);
  for (const line of document.querySelectorAll("#beans .link")) {
    const touches = line.dataset.from === chosen || line.dataset.to === chosen;
    line.classList.toggle("lit", touches);
    line.classList.toggle("dim", chosen !== null && !touches);
    if (touches) near.add(line.dataset.from).add(line.dataset.to);
  }
  for (const box of document.querySelectorAll("#beans .bean")) {
    box.classList.toggle("lit", box.dataset.bean === chosen);
    box.classList.toggle("dim", chosen !== null && !near.has(box.dataset.bean));
    box.setAttribute("aria-pressed", String(box.dataset.bean === chosen));
  }
  for (const row of document.querySelectorAll("#beans tr[data-bean]")) row.classList.toggle("lit", row.dataset.bean === chosen);
}

function table(beans) {
  const types = new Map(beans.map(bean => [bean.name, bean.type]));
  const head = ["Bean", "Type", "Scope", "Made by", "Bound to", "Tools"].map(text => make("th", {scope: "col"}, text));
  const rows = beans.map(bean => make("tr", {"data-bean": bean.name},
    make("th", {scope: "row"}, make("code", {}, bean.name)), make("td", {}, bean.type),
    make("td", {}, make("span", {class: `scope ${bean.scope}`}, make("i", {"aria-hidden": "true"}), bean.scope)), make("td", {}, bean.made_by),
    make("td", {}, bean.links.map(link => make("div", {}, make("span", {class: "about"}, `${link.manner} `), types.get(link.to) ?? link.to))),
    make("td", {}, bean.tools.map(tool => make("div", {}, make("code", {}, tool))))));
  return make("div", {class: "table", tabindex: "0", role: "region", "aria-label": "Beans, as a table"},
    make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
}
