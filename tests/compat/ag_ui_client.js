// Drives the client of AG-UI: `node ag_ui_client.js PACKAGE_FOLDER URL GESTURE`. Prints what the page shows as JSON.

import {createRequire} from "node:module";

const [folder, url, gesture] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const {HttpAgent, buildResumeArray} = require("@ag-ui/client");

const outcomes = [];
const errors = [];
const seen = {
  onRunFinishedEvent: ({event}) => void outcomes.push(event.outcome.type),
  onRunErrorEvent: ({event}) => void errors.push(event),
  onCustomEvent: ({event}) => void outcomes.push(event.name),
};
const WHERE = {
  name: "where_am_i",
  description: "Find the place.",
  parameters: {type: "object", properties: {exact: {type: "boolean"}}},
};

const agent = new HttpAgent({url: `${url}/agui`, threadId: "room"});
const run = (options = {}) => agent.runAgent({tools: [WHERE], ...options}, seen);

async function answer(make) {
  const responses = Object.fromEntries(agent.pendingInterrupts.map(each => [each.id, make(each)]));
  await run({resume: buildResumeArray(agent.pendingInterrupts, responses)});
}

async function runTools() {
  const done = new Set(agent.messages.filter(each => each.role === "tool").map(each => each.toolCallId));
  const calls = agent.messages.flatMap(each => each.toolCalls ?? []).filter(each => !done.has(each.id));
  for (const {id} of calls) agent.addMessage({id: `r${id}`, role: "tool", toolCallId: id, content: "Rome"});
  await run();
}

agent.addMessage({id: "u1", role: "user", content: "hi"});
if (gesture === "leaves and comes back") {
  const running = run().catch(() => {});
  while (!agent.messages.some(each => each.content?.startsWith("Hello"))) await new Promise(go => setTimeout(go, 10));
  agent.abortRun();
  await running;
  agent.messages = [];
  const again = run();
  while (!agent.messages.length) await new Promise(go => setTimeout(go, 10));
  await fetch(`${url}/go-on`, {method: "POST"});
  await again;
} else {
  await run().catch(error => errors.push(error.message));
}
if (gesture === "approves") await answer(() => ({status: "resolved", payload: {approved: true}}));
if (gesture === "edits") {
  await answer(() => ({status: "resolved", payload: {approved: true, editedArgs: {order: 8}}}));
}
if (gesture === "rejects") await answer(() => ({status: "cancelled"}));
if (gesture === "approves and runs a tool") {
  await answer(() => ({status: "resolved", payload: true}));
  await runTools();
}
if (gesture === "runs a tool") await runTools();

console.log(JSON.stringify({messages: agent.messages, pending: agent.pendingInterrupts, outcomes, errors}));
process.exit(0);
