// @ts-check
// Tests the layout of the dev UI's bean graph.

import assert from "node:assert/strict";
import {test} from "node:test";

import {arrange, layersOf, pathOf} from "../../toolbox_fastapi/dev_ui/page/layout.js";

const bean = name => ({name});
const link = (from, to) => ({from, to, manner: "holds"});

test("links lead to the right", () => {
  const beans = ["session", "orders", "desk"].map(bean);

  const layer = layersOf(beans, [link("desk", "orders"), link("orders", "session"), link("desk", "session")]);

  assert.deepEqual(Object.fromEntries(layer), {desk: 0, orders: 1, session: 2});
});

test("a cycle still gets columns", () => {
  const beans = ["a", "b"].map(bean);

  const layer = layersOf(beans, [link("a", "b"), link("b", "a")]);

  assert.deepEqual([...layer.values()].sort(), [0, 1]);
});

test("boxes of one column do not overlap", () => {
  const beans = ["root", "one", "two", "three"].map(bean);
  const links = ["one", "two", "three"].map(to => link("root", to));

  const {nodes, height} = arrange(beans, links, () => 120);

  const tops = ["one", "two", "three"].map(name => nodes.get(name).y).sort((one, other) => one - other);
  assert.ok(tops[1] - tops[0] >= 46 && tops[2] - tops[1] >= 46);
  assert.ok(tops[2] + 46 <= height);
});

test("a column starts right of the widest box before it", () => {
  const {nodes} = arrange([bean("wide"), bean("next")], [link("wide", "next")], each =>
    each.name === "wide" ? 250 : 110,
  );

  assert.ok(nodes.get("next").x >= nodes.get("wide").x + 250);
});

test("a link over several columns has a slot in each of them", () => {
  const beans = ["a", "b", "c"].map(bean);
  const links = [link("a", "b"), link("b", "c"), link("a", "c")];

  const {routes} = arrange(beans, links, () => 110);

  const long = routes.find(each => each.link === links[2]);
  assert.equal(long.path.length, 3);
  assert.equal(long.path[1].bean, undefined);
});

test("a link to the left passes below the boxes", () => {
  const path = pathOf([
    {x: 300, y: 10, width: 100, bean: bean("later")},
    {x: 10, y: 10, width: 100, bean: bean("earlier")},
  ]);

  assert.match(path, /^M400,33 C450,72 -40,72 8,33$/);
});
