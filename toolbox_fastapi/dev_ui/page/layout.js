// @ts-check
// Computes the layout of the bean graph: columns, positions and the paths of the links. It does not touch the page.

export const HEIGHT = 46;
const ROW = 64;
const GAP = 72;
const PAD = 14;

// Assigns each bean to a column so that links lead to the right. Links that close a cycle are ignored.
export function layersOf(beans, links) {
  const out = new Map(beans.map(bean => [bean.name, []]));
  for (const link of links) out.get(link.from).push(link.to);
  const state = new Map(),
    order = [];
  const visit = name => {
    state.set(name, "open");
    for (const to of out.get(name)) if (!state.has(to)) visit(to);
    state.set(name, "done");
    order.unshift(name);
  };
  for (const bean of beans) if (!state.has(bean.name)) visit(bean.name);
  const rank = new Map(order.map((name, index) => [name, index]));
  const layer = new Map(order.map(name => [name, 0]));
  for (const name of order)
    for (const to of out.get(name))
      if (rank.get(to) > rank.get(name)) layer.set(to, Math.max(layer.get(to), layer.get(name) + 1));
  return layer;
}

// Places the beans in columns. A link that spans several columns gets a slot in each of them, so that it crosses no bean.
// `widthOf(bean)` returns the width of a bean's box in pixels. Returns the nodes by name, the route of each link, and the size.
export function arrange(beans, links, widthOf) {
  const layer = layersOf(beans, links);
  const columns = [];
  const put = (index, node) => {
    (columns[index] ??= []).push(node);
    return node;
  };
  const nodes = new Map(
    beans.map(bean => [bean.name, put(layer.get(bean.name), {bean, width: widthOf(bean), near: []})]),
  );
  const routes = links.map(link => {
    let from = nodes.get(link.from);
    const to = nodes.get(link.to),
      path = [from];
    const [low, high] = [layer.get(link.from), layer.get(link.to)];
    for (let index = low + 1; index < high; index++) path.push(put(index, {width: 0, near: []}));
    path.push(to);
    for (const each of path.slice(1)) {
      from.near.push(each);
      each.near.push(from);
      from = each;
    }
    return {link, path};
  });
  for (let round = 0; round < 8; round++) {
    for (const column of round % 2 ? columns.toReversed() : columns) {
      const wish = node =>
        node.near.length ? node.near.reduce((sum, each) => sum + (each.y ?? 0), 0) / node.near.length : (node.y ?? 0);
      if (round) column.sort((one, other) => wish(one) - wish(other));
      let y = 0;
      for (const node of column) {
        node.y = y;
        y += node.bean ? ROW : ROW / 2;
      }
      const middle = y / 2;
      for (const node of column) node.y -= middle;
    }
  }
  let x = PAD;
  for (const column of columns) {
    const width = Math.max(...column.map(node => node.width), 0);
    for (const node of column) {
      node.x = x;
      node.column = width;
    }
    x += width + GAP;
  }
  const top = Math.min(...columns.flat().map(node => node.y));
  for (const node of columns.flat()) node.y += PAD - top;
  return {nodes, routes, width: x - GAP + PAD, height: Math.max(...columns.flat().map(node => node.y)) + HEIGHT + PAD};
}

const middle = node => node.y + HEIGHT / 2;

// Returns the SVG path data for the route of a link.
export function pathOf(path) {
  const last = path.length - 1;
  const start = path[0],
    end = path[last];
  if (end.x <= start.x) {
    // a link to the left passes below the boxes
    const y = Math.max(start.y, end.y) + HEIGHT + 16;
    return `M${start.x + start.width},${middle(start)} C${start.x + start.width + 50},${y} ${end.x - 50},${y} ${end.x - 2},${middle(end)}`;
  }
  let line = `M${start.x + start.width},${middle(start)}`,
    point = [start.x + start.width, middle(start)];
  for (const node of path.slice(1)) {
    const to = [node.bean ? node.x - 2 : node.x, middle(node)],
      half = (to[0] - point[0]) / 2;
    line += ` C${point[0] + half},${point[1]} ${to[0] - half},${to[1]} ${to[0]},${to[1]}`;
    point = to;
    if (!node.bean) {
      line += ` h${node.column}`;
      point = [node.x + node.column, to[1]];
    }
  }
  return line;
}
