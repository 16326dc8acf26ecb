// @ts-check
// Texts as the page shows them: JSON with all digits, and characters that nobody would see.

import assert from "node:assert/strict";
import {test} from "node:test";

import {JSDOM} from "jsdom";

import {block, escaped, make, pretty, visible} from "../../toolbox_fastapi/dev_ui/page/dom.js";

const {window} = new JSDOM();
globalThis.document = window.document;

test("JSON is formatted as the browser would, with all digits of its numbers", () => {
  const values = {a: [], b: {}, c: [1, {d: 'x: "y", {z}'}], e: null, f: [[]]};
  assert.equal(pretty(JSON.stringify(values)), JSON.stringify(values, null, 2));
  assert.equal(pretty('{"order":9007199254740993,"price":1.0}'), '{\n  "order": 9007199254740993,\n  "price": 1.0\n}');
  assert.equal(pretty("9007199254740993"), "9007199254740993");
  assert.equal(pretty("not JSON {"), "not JSON {");
});

test("control and direction characters are shown by their number", () => {
  assert.equal(visible("a\u202eb\u0000c\u2066d\u200be\ufefff"), "aU+202EbU+0000cU+2066dU+200BeU+FEFFf");
  assert.equal(visible("\u{e0041}\ud800\u2028\r"), "U+E0041U+D800U+2028U+000D");
  assert.equal(
    visible("one\r\ntwo\tthree 👩\u200d🔬 \u0646\u200c\u0645 é"),
    "one\ntwo\tthree 👩\u200d🔬 \u0646\u200c\u0645 é",
  );
});

test("escaped JSON has the same value", () => {
  const json = JSON.stringify({a: "x\u202ey\u{e0041}z é"});
  assert.equal(escaped(json), '{"a":"x\\u202ey\\udb40\\udc41z é"}');
  assert.deepEqual(JSON.parse(escaped(json)), JSON.parse(json));
});

test("every text on the page is shown so, but not what its user edits", () => {
  assert.equal(make("p", {}, "a\u202eb").textContent, "aU+202Eb");
  assert.equal(block("a\u202eb", "x").textContent, "aU+202Eb");
  assert.equal(make("textarea", {}, "a\u202eb").value, "a\u202eb");
  const long = block("x".repeat(100_000) + "\u202e", "x");
  long.querySelector("button").click();
  assert.ok(long.textContent.endsWith("xU+202E"));
});
