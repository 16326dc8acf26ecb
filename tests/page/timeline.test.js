// @ts-check
// Tests which log entries a timeline of the dev UI shows.

import assert from "node:assert/strict";
import {test} from "node:test";

import {feed} from "../../toolbox_fastapi/dev_ui/page/timeline.js";

const recorded = () => {
  const rows = [];
  return {rows, set: (key, kind, facts) => rows.push([key, kind, facts])};
};

test("tool calls, model requests, and what happens between them are rows; other entries are not", () => {
  const timeline = recorded();
  const rows = ["tool_started", "tool", "model", "guardrail", "connection", "retrieval", "handover", "told"];
  const taken = [...rows, "memory", "ended", "tool_progress"].map(type =>
    feed(timeline, /** @type {any} */ ({type, invocation: "r", call: 1, name: type}), "r"),
  );

  assert.deepEqual(taken, [...rows.map(() => true), false, false, false]);
  assert.deepEqual(timeline.rows[3], ["r 1", "guardrail", {name: "guardrail"}]);
});

test("a guardrail of an inner invocation is a row inside", () => {
  const timeline = recorded();
  feed(
    timeline,
    /** @type {any} */ ({type: "guardrail", invocation: "inner", call: "guardrail 1", refused: true}),
    "outer",
  );

  assert.deepEqual(timeline.rows, [["inner guardrail 1", "guardrail inner", {refused: true}]]);
});
