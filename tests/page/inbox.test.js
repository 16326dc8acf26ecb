// @ts-check
// The inbox: the order of runs, and the body of an answer.

import assert from "node:assert/strict";
import {test} from "node:test";

import {answerFrom, canRemember, expiryOf, inOrder, startOf, stateOf} from "../../toolbox_fastapi/dev_ui/page/inbox.js";

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

test("a run says who started it, and in which conversation", () => {
  assert.equal(startOf({started_by: "ann", memory_id: "7"}), "Started by ann, in the conversation 7.");
  assert.equal(startOf({started_by: null, memory_id: null}), "Started by an anonymous caller.");
  assert.equal(startOf({started_by: "a\u202eb", memory_id: null}), "Started by a\\u202eb.");
});

test("a run says which attempt it is and why the last one failed", () => {
  assert.equal(stateOf({id: "7", status: "running", attempts: 1, error: null}), "Run 7, running.");
  const tried = {id: "7", status: "running", attempts: 2, error: "ModelError: down"};
  assert.equal(stateOf(tried), "Run 7, running, attempt 2: ModelError: down.");
});

test("a pending call says until when it waits", () => {
  assert.equal(expiryOf({expires_at: null}), "");
  assert.match(expiryOf({expires_at: "2026-01-02T03:04:05+00:00"}), /^, until .*2026/);
});

test("unchanged arguments are not sent back", () => {
  const values = {original: '{\n  "order": 7,\n  "note": "a  \\"b"\n}', reason: ""};
  assert.deepEqual(answerFrom("approve", {...values, typed: '{ "order":7, "note": "a  \\"b" }'}), {kind: "approve"});
  const typed = '{"order": 7, "note": "a \\"b"}';
  assert.deepEqual(answerFrom("approve", {...values, typed}), {kind: "approve", text: typed});
});

test("changed arguments replace all arguments", () => {
  const values = {original: '{"order": 7}', typed: '{"order": 8}', reason: ""};
  assert.deepEqual(answerFrom("approve", values), {kind: "approve", text: '{"order": 8}'});
});

test("an approval is remembered only if the person asks for it", () => {
  const values = {original: '{"order": 7}', typed: '{"order": 7}', reason: "", remember: true};
  assert.deepEqual(answerFrom("approve", values), {kind: "approve", remember: "conversation"});
  const typed = '{"order": 8}';
  assert.deepEqual(answerFrom("approve", {...values, typed}), {kind: "approve", text: typed, remember: "conversation"});
  assert.deepEqual(answerFrom("reject", values), {kind: "reject"});
});

test("only a known user's conversation remembers an approval", () => {
  const run = {memory_id: "room", started_by: "ann"};
  assert.equal(canRemember(run, {may_remember: true}), true);
  assert.equal(canRemember(run, {may_remember: false}), false);
  assert.equal(canRemember({...run, memory_id: null}, {may_remember: true}), false);
  assert.equal(canRemember({...run, started_by: null}, {may_remember: true}), false);
});

test("large numbers keep all their digits", () => {
  const values = {original: '{"order": 9007199254740993}', reason: ""};
  const typed = '{"order": 9007199254740995}';
  assert.deepEqual(answerFrom("approve", {...values, typed: values.original}), {kind: "approve"});
  assert.deepEqual(answerFrom("approve", {...values, typed}), {kind: "approve", text: typed});
  assert.deepEqual(answerFrom("respond", {...values, typed: "9007199254740993"}), {
    kind: "respond",
    text: "9007199254740993",
  });
});

test("text that is not JSON is refused", () => {
  assert.throws(() => answerFrom("respond", {original: "{}", typed: "{", reason: ""}), /must be JSON/);
});

test("a reason is sent only if there is one", () => {
  assert.deepEqual(answerFrom("reject", {original: "{}", typed: "", reason: "no"}), {kind: "reject", reason: "no"});
  assert.deepEqual(answerFrom("fail", {original: "{}", typed: "", reason: ""}), {kind: "fail"});
});
