// Drives `Chat`, the part of `useChat` without React: `node use_chat.js PACKAGE_FOLDER URL GESTURE`.
// Prints what the page shows as JSON.

import {createRequire} from "node:module";

const [folder, url, gesture] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const {Chat} = await import(require.resolve("@ai-sdk/react"));
const ai = await import(require.resolve("ai"));

const errors = [];
const finished = [];

function makeChat(messages = []) {
  const sendAutomaticallyWhen = given =>
    ai.lastAssistantMessageIsCompleteWithApprovalResponses(given) ||
    ai.lastAssistantMessageIsCompleteWithToolCalls(given);
  return new Chat({
    id: "room",
    messages,
    transport: new ai.DefaultChatTransport({api: `${url}/api/chat`}),
    sendAutomaticallyWhen: gesture === "reads" ? undefined : sendAutomaticallyWhen,
    onError: error => errors.push(error.message),
    onFinish: ({isAbort, isDisconnect, isError, finishReason}) =>
      finished.push({isAbort, isDisconnect, isError, finishReason}),
  });
}

const partsOf = chat => chat.messages.flatMap(message => message.parts);

async function until(condition) {
  while (!condition()) await new Promise(resolve => setTimeout(resolve, 10));
}

async function decide(chat, approved, reason) {
  for (const part of partsOf(chat).filter(each => each.state === "approval-requested")) {
    await chat.addToolApprovalResponse({id: part.approval.id, approved, reason});
  }
  await until(() => chat.status === "ready" && !partsOf(chat).some(each => each.state === "approval-responded"));
}

let chat = makeChat();
switch (gesture) {
  case "says":
  case "fails":
    await chat.sendMessage({text: "hi"});
    break;
  case "twice":
    await chat.sendMessage({text: "hi"});
    await chat.sendMessage({text: "again"});
    break;
  case "sends a file":
    await chat.sendMessage({
      text: "Look",
      files: [{type: "file", mediaType: "image/png", url: "data:image/png;base64,iVBORw0KGgo="}],
    });
    break;
  case "approves":
    await chat.sendMessage({text: "hi"});
    await decide(chat, true);
    break;
  case "rejects":
    await chat.sendMessage({text: "hi"});
    await decide(chat, false, "too much");
    break;
  case "writes instead":
    await chat.sendMessage({text: "hi"});
    await chat.sendMessage({text: "never mind"});
    break;
  case "runs a tool": {
    await chat.sendMessage({text: "hi"});
    const {toolCallId} = partsOf(chat).find(each => each.state === "input-available");
    await chat.addToolOutput({tool: "pick_date", toolCallId, output: "2026-01-01"});
    await until(() => chat.status === "ready" && partsOf(chat).at(-1).type === "text");
    break;
  }
  case "reloads while it waits": {
    await chat.sendMessage({text: "hi"});
    chat = makeChat(chat.messages.slice(0, 1));
    await chat.resumeStream();
    await decide(chat, true);
    break;
  }
  case "leaves and comes back": {
    const sending = chat.sendMessage({text: "hi"});
    await until(() => partsOf(chat).some(each => each.type === "text" && each.text.startsWith("Hello")));
    await chat.stop(); // closes the connection; the run goes on
    await sending;
    chat = makeChat(chat.messages.slice(0, 1));
    const resuming = chat.resumeStream();
    await until(() => partsOf(chat).some(each => each.type === "text" && each.text.startsWith("Hello")));
    await fetch(`${url}/go-on`, {method: "POST"});
    await resuming;
    break;
  }
  case "stops": {
    const sending = chat.sendMessage({text: "hi"});
    await until(() => partsOf(chat).some(each => each.type === "text" && each.text.startsWith("Hello")));
    await fetch(`${url}/api/chat/room/stop`, {method: "POST"});
    await sending;
    await chat.resumeStream(); // nothing runs: 204
    break;
  }
  default:
    throw new Error(`unknown gesture ${gesture}`);
}

console.log(JSON.stringify({messages: chat.messages, status: chat.status, errors, finished}));
