// @ts-check
// The conversations: their addresses, and what is said about them.

import assert from "node:assert/strict";
import {test} from "node:test";

import {aboutOf, addressOf, answerOf, placeIn, reasonFor} from "../../toolbox_fastapi/dev_ui/page/conversations.js";

test("an address names a service and a memory id of any characters", () => {
  for (const memory_id of ["7", "a/b#c", "", '"], ["', "\u202e"]) {
    const [view, wanted] = addressOf({service: "shop.Desk", memory_id}).slice(1).split("/");
    assert.equal(view, "conversations");
    assert.deepEqual(placeIn(decodeURIComponent(wanted)), {service: "shop.Desk", memory_id});
  }
});

test("an address without a conversation names none", () => {
  for (const wanted of [undefined, "", "7", "null", "[]", '["shop.Desk"]', '["shop.Desk", 7]', "{"])
    assert.equal(placeIn(wanted), null);
});

test("a list without conversations says why", () => {
  assert.match(reasonFor({unavailable: "Use SQL.", services: ["Desk"]}), /^There is no list. Use SQL.$/);
  assert.match(reasonFor({unavailable: null, services: ["Desk"]}), /^No conversations\./);
  assert.match(reasonFor({unavailable: null, services: []}), /^No service of this program keeps conversations\./);
});

test("a conversation says whose it is and what it used", () => {
  const info = {service: "shop.Desk", memory_id: "7", created_at: "2026-01-02T03:04:05+00:00"};
  const about = aboutOf({...info, owner: "ann", usage: {input_tokens: 5, output_tokens: 6}});
  assert.match(about, /^shop\.Desk, memory id 7 · owner ann · begun .*2026.* · 5 in, 6 out tokens$/);
  assert.match(
    aboutOf({...info, owner: null, usage: {input_tokens: 0, output_tokens: 0}}),
    /7 · no owner · begun [^·]+$/,
  );
  assert.match(aboutOf({...info, owner: "ann", in_charge: "Billing.chat", usage: {}}), / · Billing\.chat in charge · /);
});

test("an answer says who gave it, from which sources", () => {
  const usage = {input_tokens: 5, output_tokens: 6};
  assert.equal(answerOf({answered_by: null, sources: [], usage: null}), "");
  assert.equal(
    answerOf({answered_by: "Billing.chat", sources: ["Terms terms.md", "a\u202eb"], usage}),
    "by Billing.chat · sources: [1] Terms terms.md, [2] aU+202Eb · 5 in, 6 out tokens",
  );
});
