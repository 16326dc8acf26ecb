// @ts-check
// Tests the conversion of a form's fields into JSON, in a simulated page.

import assert from "node:assert/strict";
import {test} from "node:test";

import {JSDOM} from "jsdom";

import {kindOf, nameOf, resolveSchema, schemaForm} from "../../toolbox_fastapi/dev_ui/page/forms.js";

const {window} = new JSDOM();
globalThis.document = window.document;

const object = (properties, required = Object.keys(properties)) => ({type: "object", properties, required});

function filled(schema, values) {
  const form = schemaForm(schema);
  for (const field of form.element.querySelectorAll(".field")) {
    const name = field.querySelector("label, legend").textContent;
    const input = field.querySelector("textarea, select, input");
    if (!(name in values)) continue;
    input.value = values[name];
    input.dispatchEvent(new window.Event("change"));
  }
  return form;
}

test("strings and numbers become JSON values", () => {
  const schema = object({dish: {type: "string"}, count: {type: "integer"}, price: {type: "number"}});

  const text = filled(schema, {dish: 'soup "hot"', count: " 3 ", price: "7.50"}).text();

  assert.deepEqual(JSON.parse(text), {dish: 'soup "hot"', count: 3, price: 7.5});
});

test("long numbers keep all their digits", () => {
  assert.equal(filled(object({id: {type: "integer"}}), {id: "9007199254740993"}).text(), '{"id":9007199254740993}');
});

test("text in a number field is sent as text, so that the server can reject it", () => {
  assert.equal(filled(object({count: {type: "integer"}}), {count: "many"}).text(), '{"count":"many"}');
});

test("empty optional fields are omitted", () => {
  assert.equal(schemaForm(object({dish: {type: "string"}, count: {type: "integer"}}, [])).text(), "{}");
});

test("empty required fields that accept null are null", () => {
  const nullable = {anyOf: [{type: "string"}, {type: "null"}]};

  assert.equal(schemaForm(object({note: nullable})).text(), '{"note":null}');
});

test("enums and booleans are choices", () => {
  const schema = object({size: {enum: ["small", "large"]}, hot: {type: "boolean"}});

  const text = filled(schema, {size: '"large"', hot: "true"}).text();

  assert.deepEqual(JSON.parse(text), {size: "large", hot: true});
});

test("lists collect their items", () => {
  const form = schemaForm(object({names: {type: "array", items: {type: "string"}}}));
  const add = form.element.querySelector("button");
  add.click();
  add.click();
  const inputs = form.element.querySelectorAll(".items textarea");
  inputs[0].value = "a";
  inputs[1].value = "b";

  assert.equal(form.text(), '{"names":["a","b"]}');
});

test("references and allOf are followed", () => {
  const {schema, nullable} = resolveSchema(
    {anyOf: [{$ref: "#/$defs/Size"}, {type: "null"}], description: "how big"},
    {Size: {enum: ["s", "l"]}},
  );

  assert.deepEqual(schema, {enum: ["s", "l"], description: "how big"});
  assert.equal(nullable, true);
});

test("a reference to itself does not hang", () => {
  assert.ok(resolveSchema({$ref: "#/$defs/Loop"}, {Loop: {$ref: "#/$defs/Loop"}}));
});

test("kinds and names are readable", () => {
  assert.equal(kindOf({type: "array", items: {type: "integer"}}), "list of integer");
  assert.equal(kindOf({anyOf: [{type: "string"}, {type: "integer"}]}), "string or integer");
  assert.equal(nameOf(object({kind: {const: "cat"}})), "cat");
  assert.equal(nameOf(object({a: {}, b: {}, c: {}, d: {}})), "object (a, b, c, …)");
});

test("the JSON view sends what was typed", () => {
  const form = filled(object({dish: {type: "string"}}), {dish: "soup"});
  form.toggle.click();
  const raw = form.element.querySelector("textarea.code");
  assert.deepEqual(JSON.parse(raw.value), {dish: "soup"});
  raw.value = '{"dish":"cake"}';

  assert.equal(form.text(), '{"dish":"cake"}');
});

test("the JSON view keeps all digits, and shows characters that nobody sees", () => {
  const schema = object({id: {type: "integer"}, dish: {type: "string"}});
  const form = filled(schema, {id: "9007199254740993", dish: "so\u202eup"});
  form.toggle.click();
  assert.equal(form.text(), '{\n  "id": 9007199254740993,\n  "dish": "so\\u202eup"\n}');
});

test("a field for a file takes a URL or a file, and sends it as text", () => {
  const schema = object({page: {type: "string", format: "uri", contentMediaType: "application/pdf"}});

  const form = filled(schema, {page: "https://example.org/a.pdf"});

  assert.equal(form.element.querySelector("input[type=file]").accept, "application/pdf");
  assert.deepEqual(JSON.parse(form.text()), {page: "https://example.org/a.pdf"});
});
