// @ts-check
// Tests the reader of server-sent events.

import assert from "node:assert/strict";
import {test} from "node:test";

import {Problem, readEvents} from "../../toolbox_fastapi/dev_ui/page/events.js";

async function all(...chunks) {
  const values = [];
  for await (const value of readEvents(chunks)) values.push(value);
  return values;
}

test("events are read in order", async () => {
  assert.deepEqual(await all('data: {"n":1}\n\n', 'data: {"n":2}\n\n'), [{n: 1}, {n: 2}]);
});

test("an event may arrive in pieces", async () => {
  const text = 'id: 7\nevent: Entry\ndata: {"text":"two\\nlines"}\n\n';

  for (let cut = 0; cut <= text.length; cut++)
    assert.deepEqual(await all(text.slice(0, cut), text.slice(cut)), [{text: "two\nlines"}]);
});

test("several data lines are one value", async () => {
  assert.deepEqual(await all("data: [1,\ndata: 2]\n\n"), [[1, 2]]);
});

test("comments and empty lines are ignored", async () => {
  assert.deepEqual(await all(": ping\n\n\n", "data: 1\n\n"), [1]);
});

test("the done event ends the stream", async () => {
  assert.deepEqual(await all("data: 1\n\n", "event: done\ndata: null\n\n", "data: 2\n\n"), [1]);
});

test("a failure event is thrown with its detail", async () => {
  const failure = 'event: failure\ndata: {"title":"Bad Gateway","detail":"The model did not answer."}\n\n';

  await assert.rejects(all("data: 1\n\n", failure), error => {
    assert.ok(error instanceof Problem);
    assert.equal(error.message, "The model did not answer.");
    return true;
  });
});

test("an event without its end is dropped", async () => {
  assert.deepEqual(await all("data: 1\n\ndata: 2\n"), [1]);
});
