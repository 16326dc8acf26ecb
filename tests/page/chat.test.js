// @ts-check
// Tests which memory id a conversation begins with, and how it is sent.

import assert from "node:assert/strict";
import {test} from "node:test";

import {firstMemoryId, memoryJson} from "../../toolbox_fastapi/dev_ui/page/chat.js";

const integer = {type: "integer"};
const string = {type: "string"};

test("the first memory id has the type of the parameter", () => {
  assert.equal(memoryJson(integer, firstMemoryId(integer)), "1");
  assert.equal(memoryJson(string, firstMemoryId(string)), '"dev-1"');
});

test("text for an integer id is sent as text, so that the server can reject it", () => {
  assert.equal(memoryJson(integer, "dev-1"), '"dev-1"');
  assert.equal(memoryJson(integer, ""), '""');
});
