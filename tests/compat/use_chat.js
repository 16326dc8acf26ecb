// Drives `useChat` in React, in a window of jsdom: `node use_chat.js PACKAGE_FOLDER`. See `drive`.

import {createRequire} from "node:module";

import {drive, until} from "./driving.js";

const [folder] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const {JSDOM} = require("jsdom");
const {window} = new JSDOM("<main></main>", {url: "http://page/"});
Object.assign(globalThis, {window, document: window.document});
const {createElement, StrictMode, useEffect} = require("react");
const {createRoot} = require("react-dom/client");
const {Chat, useChat} = await import(require.resolve("@ai-sdk/react"));
const ai = await import(require.resolve("ai"));

const ROOM = "room";
const PIXEL = {type: "file", mediaType: "image/png", url: "data:image/png;base64,iVBORw0KGgo="};
const BOTH = given =>
  ai.lastAssistantMessageIsCompleteWithApprovalResponses(given) ||
  ai.lastAssistantMessageIsCompleteWithToolCalls(given);
const WITH_LAST_ONLY = ({id, messages, trigger, messageId, body}) => ({
  body: {id, message: messages.at(-1), trigger, messageId, ...body},
});

function Messages({page, options}) {
  const chat = useChat(options.isOwnChat ? {chat: (page.ownChat ??= new Chat(options))} : options);
  page.chat = chat;
  useEffect(() => void (page.isShown = true));
  return chat.messages.map(each => createElement("section", {key: each.id}, JSON.stringify(each.parts)));
}

// A tab with the chat. `client` begins the ids of its messages.
class Page {
  constructor(connection, client = "c") {
    Object.assign(this, {connection, client, options: {}, ids: 0, errors: [], finished: []});
  }

  async open(messages = [], options = {}) {
    this.root?.unmount();
    this.root = createRoot(window.document.querySelector("main").appendChild(window.document.createElement("div")));
    this.options = {...this.options, ...options};
    const {onlyLast, ...others} = this.options;
    const transport = new ai.DefaultChatTransport({
      api: `${this.connection.url}/api/chat`,
      fetch: (...given) => this.connection.fetch(...given),
      ...(onlyLast ? {prepareSendMessagesRequest: WITH_LAST_ONLY} : {}),
    });
    const chat = {
      id: ROOM,
      messages,
      transport,
      sendAutomaticallyWhen: BOTH,
      generateId: () => `${this.client}${++this.ids}`,
      onError: error => this.errors.push(error.message),
      onFinish: ({isAbort, isDisconnect, isError, finishReason}) =>
        this.finished.push({isAbort, isDisconnect, isError, finishReason}),
      ...others,
    };
    this.isShown = false;
    this.root.render(createElement(StrictMode, null, createElement(Messages, {page: this, options: chat})));
    await until(() => this.isShown);
    return this;
  }

  // Loads the page again, as a server renders it: with the history, and with `resume`.
  async reload(options = {}) {
    await this.open(await this.connection.json(`/api/chat/${ROOM}/messages`), {resume: true, ...options});
    const stream = `/api/chat/${ROOM}/stream`;
    const found = () => this.connection.requests.findLast(each => each.path === stream);
    await until(() => found()?.status !== undefined, "the stream");
    return this;
  }

  get parts() {
    return this.chat.messages.flatMap(each => each.parts);
  }

  get text() {
    return this.parts.map(each => each.text ?? "").join("");
  }

  async says(text, options) {
    await this.chat.sendMessage({text, ...options});
    await this.rests();
  }

  // Waits until nothing is under way, and nothing that the page decided is left to send.
  async rests() {
    let quiet = 0;
    await until(() => {
      quiet = this.chat.status === "ready" || this.chat.status === "error" ? quiet + 1 : 0;
      return quiet > 5;
    }, "rest");
  }

  inState(state) {
    return this.parts.filter(each => each.state === state);
  }

  async decides(approved, reason, parts = this.inState("approval-requested")) {
    for (const {approval} of parts) await this.chat.addToolApprovalResponse({id: approval.id, approved, reason});
    await until(() => this.chat.status !== "ready" || !this.inState("approval-responded").length, "an answer");
    await this.rests();
  }

  // Sends the output of its own tools, or an error.
  async runsTools(given = {output: "2026-01-01"}) {
    for (const {type, toolCallId} of this.inState("input-available")) {
      const failed = given.errorText === undefined ? {} : {state: "output-error"};
      await this.chat.addToolOutput({tool: type.slice(5), toolCallId, ...failed, ...given});
    }
    await until(() => this.chat.status !== "ready", "the request with the output");
    await this.rests();
  }

  shows() {
    return {
      messages: this.chat.messages,
      status: this.chat.status,
      errors: this.errors,
      finished: this.finished,
    };
  }
}

const startsToSay = text => async page => {
  page.sending = page.chat.sendMessage({text});
  await until(() => page.text.includes("Hello"), "the beginning of the answer");
};
const goOn = page => page.connection.json("/go-on", "POST");
const stopAnswer = page => page.connection.json(`/api/chat/${ROOM}/stop`, "POST");
const idOf = (page, index) => page.chat.messages.at(index).id;

const GESTURES = {
  says: page => page.says("hi"),
  async twice(page) {
    await page.says("hi");
    await page.says("again");
  },
  "sends a file": page => page.says("Look", {files: [PIXEL]}),
  async "sends the last message only"(page) {
    await page.open([], {onlyLast: true});
    await page.says("hi");
    await page.decides(true);
    await page.says("again");
    await page.says("changed", {messageId: idOf(page, 2)});
    await page.chat.regenerate();
    await page.rests();
  },

  // --- edit, answer again
  async edits(page) {
    await page.says("hi");
    await page.says("again");
    await page.says("changed", {messageId: idOf(page, 0)});
  },
  async "edits after a reload"(page) {
    await page.says("hi");
    await page.says("again");
    await page.reload();
    await page.says("changed", {messageId: idOf(page, 2)});
  },
  async "edits while a call waits"(page) {
    await page.says("hi");
    await page.says("changed", {messageId: idOf(page, 0)});
  },
  async regenerates(page) {
    await page.says("hi");
    await page.says("again");
    await page.chat.regenerate();
    await page.rests();
  },
  async "regenerates an earlier answer"(page) {
    await page.says("hi");
    await page.says("again");
    await page.chat.regenerate({messageId: idOf(page, 1)});
    await page.rests();
  },
  async "regenerates a question"(page) {
    await page.says("hi");
    await page.says("again");
    await page.chat.regenerate({messageId: idOf(page, 2)});
    await page.rests();
  },
  async "regenerates while a call waits"(page) {
    await page.says("hi");
    await page.chat.regenerate();
    await page.rests();
  },
  async "regenerates what failed"(page) {
    await page.says("hi");
    await page.says("again");
    await page.chat.regenerate();
    await page.rests();
  },

  // --- approvals
  async approves(page) {
    await page.says("hi");
    await page.decides(true);
  },
  async rejects(page) {
    await page.says("hi");
    await page.decides(false, "too much");
  },
  async "approves what fails then, and goes on"(page) {
    await page.says("hi");
    await page.decides(true);
    await page.says("again");
  },
  async "writes while it streams"(page) {
    await startsToSay("hi")(page);
    const second = page.chat.sendMessage({text: "again"});
    await until(() => page.connection.requests.length === 2, "the second message");
    await goOn(page);
    await Promise.all([page.sending, second]);
    await page.rests();
  },
  async "approves after a reload"(page) {
    await page.says("hi");
    await page.reload();
    await page.rests();
    await page.decides(true);
  },
  async "rejects after a reload"(page) {
    await page.says("hi");
    await page.reload();
    await page.rests();
    await page.decides(false, "too much");
  },
  async "reloads after an approval"(page) {
    await page.says("hi");
    await page.decides(true);
    await page.reload();
    await page.rests();
  },
  async "is slower than another tab"(page) {
    await page.says("hi");
    const other = await new Page(page.connection, "o").reload();
    await other.rests();
    await other.decides(true);
    await page.decides(false);
  },
  async "answers one of two"(page) {
    await page.says("hi");
    const [one] = page.inState("approval-requested");
    await page.chat.addToolApprovalResponse({id: one.approval.id, approved: true});
    await page.chat.sendMessage();
    await page.rests();
    await page.decides(false);
  },
  async "answers two"(page) {
    await page.says("hi");
    const [one, two] = page.inState("approval-requested");
    await page.chat.addToolApprovalResponse({id: one.approval.id, approved: true});
    await page.decides(false, "no", [two]);
  },
  async "answers one while another tab answers the other"(page) {
    await page.says("hi");
    const other = await new Page(page.connection, "o").open(structuredClone(page.chat.messages));
    const [one, two] = page.inState("approval-requested");
    await other.chat.addToolApprovalResponse({id: one.approval.id, approved: true});
    await other.chat.sendMessage();
    await other.rests();
    await page.chat.addToolApprovalResponse({id: two.approval.id, approved: true});
    await page.chat.sendMessage();
    await page.rests();
  },
  async "is told something before it approves"(page) {
    await page.says("hi");
    await page.connection.json("/tell", "POST");
    await page.decides(true);
  },
  async "writes instead"(page) {
    await page.says("hi");
    await page.says("never mind");
  },
  async "writes instead and approves too late"(page) {
    await page.says("hi");
    await page.says("never mind");
    const [{approval}] = page.inState("approval-requested");
    await page.chat.addToolApprovalResponse({id: approval.id, approved: true});
    await page.says("again");
  },

  async "writes instead and regenerates"(page) {
    await page.says("hi");
    await page.says("never mind");
    await page.chat.regenerate();
    await page.rests();
  },
  async "writes instead and edits that"(page) {
    await page.says("hi");
    await page.says("never mind");
    await page.says("changed", {messageId: idOf(page, 2)});
  },
  async "writes instead and edits the question"(page) {
    await page.says("hi");
    await page.says("never mind");
    await page.says("changed", {messageId: idOf(page, 0)});
  },
  async "approves an earlier answer"(page) {
    await page.says("hi");
    await page.says("again");
    const [{approval}] = page.inState("approval-requested");
    await page.chat.addToolApprovalResponse({id: approval.id, approved: true});
    await page.chat.sendMessage();
    await page.rests();
  },
  async "edits what is before a call that waits"(page) {
    await page.says("hi");
    await page.says("again");
    await page.says("changed", {messageId: idOf(page, 0)});
  },

  // --- tools of the page
  async "runs a tool"(page) {
    await page.says("hi");
    await page.runsTools();
  },
  async "runs a tool when it is called"(page) {
    await page.open([], {
      onToolCall: ({toolCall: {toolName, toolCallId}}) => {
        if (toolName === "pick_date") page.chat.addToolOutput({tool: toolName, toolCallId, output: "2026-01-01"});
      },
    });
    await page.says("hi");
    await until(() => page.text.includes("."), "an answer");
    await page.rests();
  },
  async "runs a tool after a reload"(page) {
    await page.says("hi");
    await page.reload();
    await page.rests();
    await page.runsTools();
  },
  async "fails to run a tool"(page) {
    await page.says("hi");
    await page.runsTools({errorText: "no calendar"});
  },
  async "approves and runs a tool"(page) {
    await page.says("hi");
    for (const {toolCallId} of page.inState("input-available")) {
      await page.chat.addToolOutput({tool: "pick_date", toolCallId, output: "2026-01-01"});
    }
    await page.decides(true);
  },

  // --- reload and stop
  async reloads(page) {
    await page.says("hi");
    await page.says("again");
    await page.reload();
    await page.rests();
  },
  async "reloads while it waits"(page) {
    await page.says("hi");
    await page.reload();
    await page.rests();
  },
  async "reloads while it streams"(page) {
    await startsToSay("hi")(page);
    await page.reload();
    await until(() => page.text.includes("Hello"), "the beginning of the answer");
    await goOn(page);
    await page.rests();
  },
  async "loses its connection"(page) {
    await page.open([], {isOwnChat: true});
    page.connection.cut = 4;
    await page.says("hi");
    const resuming = page.chat.resumeStream();
    await until(
      () => page.connection.requests.at(-1).method === "GET" && page.connection.requests.at(-1).status,
      "a stream",
    );
    await goOn(page);
    await resuming;
    await page.rests();
  },
  async "stops an answer after an approval"(page) {
    await page.says("hi");
    const [{approval}] = page.inState("approval-requested");
    await page.chat.addToolApprovalResponse({id: approval.id, approved: true});
    await until(() => page.text.includes("Hello"), "the beginning of the answer");
    await stopAnswer(page);
    await page.rests();
  },
  async stops(page) {
    await startsToSay("hi")(page);
    await stopAnswer(page);
    await page.sending;
    await page.rests();
  },
  async "stops and reloads"(page) {
    await GESTURES.stops(page);
    await page.reload();
    await page.rests();
  },
  async "stops and regenerates"(page) {
    await GESTURES.stops(page);
    await goOn(page);
    await page.chat.regenerate();
    await page.rests();
  },
  async "stops and edits"(page) {
    await GESTURES.stops(page);
    await goOn(page);
    await page.says("changed", {messageId: idOf(page, 0)});
  },
  async "stops what waits and regenerates"(page) {
    await page.says("hi");
    await stopAnswer(page);
    await page.chat.regenerate();
    await page.rests();
  },
  async "stops and goes on"(page) {
    await GESTURES.stops(page);
    await goOn(page);
    await page.chat.sendMessage({text: "again"});
    await page.rests();
  },
  async "stops what waits"(page) {
    await page.says("hi");
    await stopAnswer(page);
    await page.reload();
    await page.rests();
  },
  async "answers what was stopped"(page) {
    await page.says("hi");
    await stopAnswer(page);
    await page.decides(true);
  },
};

await drive(GESTURES, connection => new Page(connection).open());
