// @ts-check
// Shows invocations as they happen, newest first.

import {at, block, clock, counted, duration, make} from "./dom.js";
import {stream} from "./events.js";
import {Timeline, feed} from "./timeline.js";

const MAX_INVOCATIONS = 200;
/** @type {Map<string, Invocation>} */
const invocations = new Map();
const list = make("ol", {class: "runs", "aria-label": "Invocations"});
const state = make("p", {role: "status", class: "state"}, "Connecting…");
const filter = make("input", {
  id: "filter",
  type: "search",
  placeholder: "service, text or tool",
  autocomplete: "off",
  oninput: applyFilter,
});
const nothing = make("p", {class: "empty"}, "No calls yet. Use the chat or the application.");

// Builds the log. Calls `reconnected` when the connection is back after a failure.
export function makeLog(reconnected) {
  at("log").append(
    make("div", {class: "bar-of-tools"}, make("label", {for: "filter"}, "Show only"), filter, state),
    nothing,
    list,
  );
  follow(reconnected);
}

// Listens while the page is visible: browsers allow few connections per server. Entries that arrive twice change nothing.
async function follow(reconnected) {
  for (let times = 0; ; times++) {
    await visible();
    const aborting = new AbortController();
    const opened = () => {
      showState();
      if (times) reconnected();
    };
    const leave = () => document.hidden && aborting.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      for await (const entry of stream("api/log", {signal: aborting.signal, opened})) take(entry);
    } catch {
      /* shown below */
    }
    document.removeEventListener("visibilitychange", leave);
    if (document.hidden) continue;
    state.textContent = "Disconnected. Reconnecting…";
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}

async function visible() {
  while (document.hidden)
    await new Promise(resolve => document.addEventListener("visibilitychange", resolve, {once: true}));
}

function showState() {
  state.textContent = invocations.size ? `Live, ${counted(invocations.size, "invocation")}.` : "Live.";
}

/** @param {import("./timeline.js").LogEntry} entry */
function take(entry) {
  let invocation = invocations.get(entry.invocation);
  if (!invocation) {
    if (entry.type !== "started") return; // the server no longer keeps its start
    invocation = new Invocation(entry, invocations.get(entry.parent));
    invocations.set(entry.invocation, invocation);
    place(invocation, entry.invocation);
    if (invocations.size > MAX_INVOCATIONS) {
      const [oldest] = invocations.keys();
      drop(oldest);
    }
  }
  invocation.take(entry);
  nothing.hidden = invocations.size > 0;
  showState();
  applyFilter();
}

// Puts the newest invocation first. Inner ones follow their outer one in the order in which they started.
function place(invocation, id) {
  if (!invocation.outer) {
    list.prepend(invocation.element);
    return;
  }
  let last = invocation.outer;
  while (last.inner.length) last = invocations.get(last.inner.at(-1));
  invocation.outer.inner.push(id);
  last.element.after(invocation.element);
}

function drop(id) {
  for (const each of invocations.get(id).inner) drop(each);
  invocations.get(id).element.remove();
  invocations.delete(id);
}

function applyFilter() {
  const wanted = filter.value.trim().toLowerCase();
  for (const each of invocations.values())
    each.element.hidden = wanted !== "" && !each.text.toLowerCase().includes(wanted);
}

// One call of a service method, from its first entry to its end.
class Invocation {
  /** @param {import("./timeline.js").StartedEntry} started @param {Invocation} [outer] */
  constructor(started, outer) {
    const inside = started.parent && `in ${outer?.where ?? "another invocation"}`;
    this.outer = outer;
    this.where = started.where;
    /** @type {number} */
    this.depth = outer ? outer.depth + 1 : started.parent ? 1 : 0;
    /** @type {string[]} the ids of the invocations that this one made */
    this.inner = [];
    // What the filter searches.
    this.text = `${started.where} ${inside ?? ""} ${started.user_message ?? ""} ${started.memory_id ?? ""}`;
    this.timeline = new Timeline();
    this.timeline.begin(started.at);
    this.mark = make("span", {class: "mark"}, "running");
    this.took = make("span", {class: "time"});
    this.calls = make("span", {class: "calls"});
    this.answer = make("div", {class: "answer"});
    this.remembered = make("p", {class: "about"});
    this.element = this.makeElement(started, inside);
    this.element.classList.toggle("inner", this.depth > 0);
    this.element.style.setProperty("--depth", this.depth);
  }

  makeElement(started, inside) {
    const summary = make(
      "summary",
      {},
      this.mark,
      make("span", {class: "name"}, started.where, inside && make("span", {class: "about"}, ` ${inside}`)),
      make("span", {class: "said"}, started.user_message ?? ""),
      this.calls,
      this.took,
      make("span", {class: "when"}, clock(started.at)),
    );
    const facts = [
      started.user_message && [make("dt", {}, "Asked"), make("dd", {}, block(started.user_message, "Asked"))],
      started.memory_id !== null && [make("dt", {}, "Memory id"), make("dd", {}, started.memory_id)],
      started.parent && [make("dt", {}, "Called by"), make("dd", {}, this.caller())],
    ];
    const inner = make(
      "div",
      {class: "inside"},
      make("dl", {class: "facts"}, facts.filter(Boolean).flat()),
      this.timeline.element,
      this.answer,
      this.remembered,
    );
    return make("li", {class: "run running"}, make("details", {}, summary, inner));
  }

  caller() {
    if (!this.outer) return "another invocation";
    return make("button", {type: "button", class: "small quiet", onclick: () => this.outer.open()}, this.outer.where);
  }

  open() {
    this.element.hidden = false;
    this.element.firstChild.open = true;
    this.element.querySelector("summary").focus();
  }

  /** @param {import("./timeline.js").LogEntry} entry */
  take(entry) {
    if (feed(this.timeline, entry, entry.invocation)) {
      if ("name" in entry) this.text += ` ${entry.name}`;
      this.calls.textContent = this.timeline.count ? counted(this.timeline.count, "tool call") : "";
    } else if (entry.type === "memory")
      this.remembered.replaceChildren(`The conversation now has ${counted(entry.messages, "message")}.`);
    else if (entry.type === "ended") this.end(entry);
  }

  /** @param {import("./timeline.js").EndedEntry} entry */
  end(entry) {
    this.timeline.end(entry.at);
    this.element.classList.remove("running");
    const stopped = entry.failure?.kind === "CancelledError";
    this.element.classList.toggle("failed", Boolean(entry.failure) && !stopped);
    this.mark.textContent = entry.waits ? "waits" : stopped ? "stopped" : entry.failure ? "failed" : "done";
    this.took.textContent = duration(entry.duration);
    if (stopped) this.answer.replaceChildren(make("p", {class: "about"}, "Cancelled, or the client disconnected."));
    else if (entry.failure)
      this.answer.replaceChildren(make("p", {class: "bad"}, `${entry.failure.kind}: ${entry.failure.message}`));
    else if (entry.answer && entry.answer.value !== null) this.answer.replaceChildren(shown(entry.answer.value));
  }
}

const shown = value => block(typeof value === "string" ? value : JSON.stringify(value, null, 2), "Answer");
