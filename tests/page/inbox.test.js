// @ts-check
// The inbox: the order of runs, and the body of an answer.

import assert from "node:assert/strict";
import {test} from "node:test";

import {answerFrom, inOrder} from "../../toolbox_fastapi/dev_ui/page/inbox.js";

test("suspended runs come first, then the newest", () => {
  const run = (id, status, updated_at) => ({id, status, updated_at});
  const runs = [
    run("a", "completed", "2026-01-03"),
    run("b", "suspended", "2026-01-01"),
    run("c", "failed", "2026-01-04"),
  ];
  assert.deepEqual(
    inOrder(runs).map(each => each.id),
    ["b", "c", "a"],
  );
});

test("unchanged arguments are not sent back", () => {
  const values = {original: {order: 7}, typed: '{ "order": 7 }', reason: ""};
  assert.deepEqual(answerFrom("approve", values), {kind: "approve"});
});

test("changed arguments replace all arguments", () => {
  const values = {original: {order: 7}, typed: '{"order": 8}', reason: ""};
  assert.deepEqual(answerFrom("approve", values), {kind: "approve", arguments: {order: 8}});
});

test("text that is not JSON is refused", () => {
  assert.throws(() => answerFrom("respond", {original: {}, typed: "{", reason: ""}), /must be JSON/);
});

test("a reason is sent only if there is one", () => {
  assert.deepEqual(answerFrom("reject", {original: {}, typed: "", reason: "no"}), {kind: "reject", reason: "no"});
  assert.deepEqual(answerFrom("fail", {original: {}, typed: "", reason: ""}), {kind: "fail"});
});
