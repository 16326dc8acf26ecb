// Drives the client of AG-UI: `node ag_ui_client.js PACKAGE_FOLDER`. See `drive`.

import {createRequire} from "node:module";

import {drive, until} from "./driving.js";

const [folder] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const {HttpAgent, buildResumeArray} = require("@ag-ui/client");

const ROOM = "room";
const PIXEL = {type: "image", source: {type: "data", value: "iVBORw0KGgo=", mimeType: "image/png"}};
const WHERE = {
  name: "where_am_i",
  description: "Find the place.",
  parameters: {type: "object", properties: {exact: {type: "boolean"}}},
};

// A tab with the thread. `client` begins the ids of its messages.
class Page {
  constructor(connection, client = "c") {
    Object.assign(this, {connection, client, ids: 0, outcomes: [], custom: [], subagents: [], errors: []});
    this.tools = [WHERE];
    this.open();
  }

  open(messages = []) {
    this.agent = new HttpAgent({
      url: `${this.connection.url}/agui`,
      threadId: ROOM,
      initialMessages: messages,
      fetch: (...given) => this.connection.fetch(...given),
    });
  }

  async reload() {
    this.open(await this.connection.json(`/agui/${ROOM}/messages`));
  }

  // Runs, and keeps what the client would show as an error.
  async run(options = {}) {
    const seen = {
      onRunFinishedEvent: ({event}) => void this.outcomes.push(event.outcome.type),
      onRunErrorEvent: ({event}) => void this.errors.push(event.message),
      onCustomEvent: ({event}) => void this.custom.push({name: event.name, value: event.value}),
      onEvent: ({event}) => {
        if (event.type.startsWith("SUBAGENT_")) this.subagents.push(event);
      },
    };
    const runId = `${this.client}-run${++this.ids}`;
    await this.agent
      .runAgent({runId, tools: this.tools, ...options}, seen)
      .catch(error => this.errors.push(String(error.message)));
  }

  async says(content, options) {
    this.agent.addMessage({id: `${this.client}${++this.ids}`, role: "user", content});
    await this.run(options);
  }

  get text() {
    return this.agent.messages.map(each => (typeof each.content === "string" ? each.content : "")).join("");
  }

  resume(make) {
    const responses = Object.fromEntries(this.agent.pendingInterrupts.map((each, at) => [each.id, make(each, at)]));
    return {resume: buildResumeArray(this.agent.pendingInterrupts, responses)};
  }

  async answers(make) {
    await this.run(this.resume(make));
  }

  addResults(result = {content: "Rome"}, most = Infinity) {
    const done = new Set(this.agent.messages.filter(each => each.role === "tool").map(each => each.toolCallId));
    const calls = this.agent.messages.flatMap(each => each.toolCalls ?? []).filter(each => !done.has(each.id));
    for (const {id} of calls.slice(0, most)) {
      this.agent.addMessage({id: `r${id}`, role: "tool", toolCallId: id, ...result});
    }
  }

  async runsTools(result, most) {
    this.addResults(result, most);
    await this.run();
  }

  shows() {
    const {messages, pendingInterrupts: pending, state} = this.agent;
    const {outcomes, custom, subagents, errors} = this;
    return {messages, pending, state, outcomes, custom, subagents, errors};
  }
}

const yes = payload => () => ({status: "resolved", payload});
const cancelled = () => ({status: "cancelled"});
const goOn = page => page.connection.json("/go-on", "POST");
const stopAnswer = page => page.connection.json(`/api/chat/${ROOM}/stop`, "POST");

async function startsToSay(page, text) {
  page.saying = page.says(text);
  await until(() => page.text.includes("Hello"), "the beginning of the answer");
}

const GESTURES = {
  says: page => page.says("hi"),
  async twice(page) {
    await page.says("hi");
    await page.says("again");
  },
  "sends an image": page => page.says([{type: "text", text: "Look"}, PIXEL]),

  // --- approvals
  async approves(page) {
    await page.says("hi");
    await page.answers(yes({approved: true}));
  },
  async "approves with true"(page) {
    await page.says("hi");
    await page.answers(yes(true));
  },
  async edits(page) {
    await page.says("hi");
    await page.answers(yes({approved: true, editedArgs: {order: 8}}));
  },
  async rejects(page) {
    await page.says("hi");
    await page.answers(yes({approved: false, reason: "too much"}));
  },
  async cancels(page) {
    await page.says("hi");
    await page.answers(cancelled);
  },
  async "answers two"(page) {
    await page.says("hi");
    await page.answers((_, at) => (at ? cancelled() : yes(true)()));
  },
  async "approves what fails then, and goes on"(page) {
    await page.says("hi");
    await page.answers(yes(true));
    await page.says("again", page.agent.pendingInterrupts.length ? page.resume(cancelled) : {});
  },
  async "approves after a reload"(page) {
    await page.says("hi");
    await page.reload();
    await page.run();
    await page.answers(yes(true));
  },
  async "reloads after an approval"(page) {
    await page.says("hi");
    await page.answers(yes(true));
    await page.reload();
  },
  async "is slower than another tab"(page) {
    await page.says("hi");
    const other = new Page(page.connection, "o");
    await other.reload();
    await other.run();
    await other.answers(yes(true));
    await page.answers(cancelled);
    page.errors.push(...other.errors);
  },
  async "answers what another tab has answered in part"(page) {
    await page.says("hi");
    const other = new Page(page.connection, "o");
    await other.run();
    const [{id}] = other.agent.pendingInterrupts;
    other.agent.pendingInterrupts = other.agent.pendingInterrupts.slice(0, 1);
    await other.run({resume: [{interruptId: id, status: "resolved", payload: true}]});
    await page.answers(cancelled);
    page.errors.push(...other.errors);
  },
  async "writes instead"(page) {
    await page.says("hi");
    await page.says("never mind", page.resume(cancelled));
  },
  async "writes instead and goes on"(page) {
    await page.says("hi");
    await page.says("never mind", page.resume(cancelled));
    await page.says("again");
  },
  async "writes after a reload"(page) {
    await page.says("hi");
    await page.reload();
    await page.says("never mind");
  },
  async "answers a question"(page) {
    await page.says("hi");
    await page.answers(yes("by mail"));
  },

  // --- tools of the page
  async "runs a tool"(page) {
    await page.says("hi");
    await page.runsTools();
  },
  async "runs a tool after a reload"(page) {
    await page.says("hi");
    await page.reload();
    await page.runsTools();
  },
  async "fails to run a tool"(page) {
    await page.says("hi");
    await page.runsTools({content: "", error: "no signal"});
  },
  async "approves and runs a tool"(page) {
    await page.says("hi");
    await page.answers(yes(true));
    await page.runsTools();
  },
  async "runs one of two tools, then the other"(page) {
    await page.says("hi");
    await page.runsTools({content: "Rome"}, 1);
    await page.runsTools({content: "Oslo"});
  },
  async "runs a tool and writes"(page) {
    await page.says("hi");
    page.addResults();
    await page.says("hurry");
  },
  async "writes instead of running a tool"(page) {
    await page.says("hi");
    await page.says("never mind");
  },
  async "offers an unknown tool"(page) {
    page.tools = [{...WHERE, name: "format_disk"}];
    await page.says("hi");
  },

  // --- reload and stop
  async reloads(page) {
    await page.says("hi");
    await page.says("again");
    await page.reload();
  },
  async "reloads while it waits"(page) {
    await page.says("hi");
    await page.reload();
    await page.run();
  },
  async "reloads while it streams"(page) {
    await startsToSay(page, "hi");
    page.agent.abortRun();
    await page.saying;
    await page.reload();
    const running = page.run();
    await until(() => page.text.includes("Hello"), "the beginning of the answer");
    await goOn(page);
    await running;
  },
  async "loses its connection"(page) {
    page.connection.cut = 3;
    await page.says("hi");
    const running = page.run();
    await until(() => page.connection.requests[1]?.status, "the stream");
    await goOn(page);
    await running;
  },
  async "stops an answer after an approval"(page) {
    await page.says("hi");
    const answering = page.answers(yes(true));
    await until(() => page.text.includes("Hello"), "the beginning of the answer");
    await stopAnswer(page);
    await answering;
  },
  async stops(page) {
    await startsToSay(page, "hi");
    await stopAnswer(page);
    await page.saying;
  },
  async "stops and reloads"(page) {
    await GESTURES.stops(page);
    await page.reload();
  },
  async "stops and goes on"(page) {
    await GESTURES.stops(page);
    await goOn(page);
    await page.says("again");
  },
  async "stops what waits"(page) {
    await page.says("hi");
    await stopAnswer(page);
    await page.reload();
  },
  async "answers what was stopped"(page) {
    await page.says("hi");
    await stopAnswer(page);
    await page.answers(yes(true));
  },
};

await drive(GESTURES, connection => new Page(connection));
