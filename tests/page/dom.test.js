// @ts-check
// Texts as the page shows them: JSON with all digits, and characters that nobody would see.

import assert from "node:assert/strict";
import {test} from "node:test";

import {JSDOM} from "jsdom";

import {block, escaped, make, pretty, readable, visible} from "../../toolbox_fastapi/dev_ui/page/dom.js";

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

test("every character that nobody would see is shown by its number, wherever it is", () => {
  const unseen = [];
  for (let point = 0; point <= 0xe0fff; point++) {
    const character = String.fromCodePoint(point);
    if (/[\p{Cc}\p{Cf}\p{Cs}\p{Z}\p{DI}\u2800]/u.test(character) && !"\n\t ".includes(character))
      unseen.push(character);
  }
  const shown = unseen.map(each => `U+${each.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
  assert.ok(unseen.length > 6000);
  assert.equal(visible(unseen.join("x")), shown.join("x"));
  assert.equal(visible(unseen.join(" ")), shown.join(" "));
  const json = JSON.stringify(unseen);
  assert.match(escaped(json), /^[ -~]+$/);
  assert.deepEqual(JSON.parse(escaped(json)), unseen);
});

test("fillers, variation selectors, tags and blanks do not hide in words", () => {
  const hidden =
    "\u115f\u1160\u3164\uffa0\u2800\u180b\ufe00\ufe0f\u{e0100}\u{e0041}\u034f\u00ad\u200b\u200d\u00a0\u3000";
  const shown = [...hidden].map(each => `U+${each.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
  assert.equal(visible(`a${hidden}b`), `a${shown.join("")}b`);
});

test("selectors, joiners and tags that make one picture, and joiners that shape letters, stay", () => {
  const seen = ["❤\ufe0f", "1\ufe0f\u20e3", "👩🏽\u200d💻", "🏴\u{e0067}\u{e0062}\u{e0065}\u{e006e}\u{e0067}\u{e007f}"];
  for (const text of [...seen, "می\u200cخواهم", "क्\u200dष"]) {
    assert.equal(visible(text), text);
    assert.equal(escaped(text), text);
  }
  assert.equal(visible("❤\ufe0f\ufe0f"), "❤\ufe0fU+FE0F");
  assert.equal(visible("ن\u200c\u200cم"), "نU+200CU+200Cم");
});

test("an answer keeps the spaces and joiners of its language, also if it arrives in pieces", () => {
  for (const text of ["Bonjour\u202f!", "日本\u3000語", "\ufe0f", "\u200d🔬"]) assert.equal(readable(text), text);
  assert.equal(readable("a\u202eb\u3164\u{e0041}\r\n"), "aU+202EbU+3164U+E0041\n");
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
