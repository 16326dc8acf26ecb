// @ts-check
// Shows invocations as they happen, newest first.

import {at, block, clock, counted, duration, make} from "./dom.js";
import {stream} from "./events.js";
import {Timeline, feed} from "./timeline.js";

const MAX_RUNS = 200;
const runs = new Map();
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
  state.textContent = runs.size ? `Live, ${counted(runs.size, "invocation")}.` : "Live.";
}

function take(entry) {
  let run = runs.get(entry.run);
  if (!run) {
    if (entry.type !== "started") return; // the server no longer keeps its start
    run = newRun(entry);
    runs.set(entry.run, run);
    place(run, entry.run, runs.get(entry.parent));
    if (runs.size > MAX_RUNS) {
      const [oldest] = runs.keys();
      drop(oldest);
    }
  }
  run.take(entry);
  nothing.hidden = runs.size > 0;
  showState();
  applyFilter();
}

// Puts the newest run first. Inner runs follow their outer run in the order in which they started.
function place(run, id, outer) {
  if (!outer) {
    list.prepend(run.element);
    return;
  }
  let last = outer;
  while (last.inner.length) last = runs.get(last.inner.at(-1));
  outer.inner.push(id);
  last.element.after(run.element);
}

function drop(id) {
  for (const each of runs.get(id).inner) drop(each);
  runs.get(id).element.remove();
  runs.delete(id);
}

function open(run) {
  run.element.hidden = false;
  run.element.firstChild.open = true;
  run.element.querySelector("summary").focus();
}

function applyFilter() {
  const wanted = filter.value.trim().toLowerCase();
  for (const run of runs.values()) run.element.hidden = wanted !== "" && !run.text.toLowerCase().includes(wanted);
}

function newRun(started) {
  const timeline = new Timeline();
  const outer = runs.get(started.parent);
  const inside = started.parent && `in ${outer?.where ?? "another invocation"}`;
  const mark = make("span", {class: "mark"}, "running");
  const took = make("span", {class: "time"}),
    calls = make("span", {class: "calls"});
  const answer = make("div", {class: "answer"}),
    remembered = make("p", {class: "about"});
  const element = make(
    "li",
    {class: "run running"},
    make(
      "details",
      {},
      make(
        "summary",
        {},
        mark,
        make("span", {class: "name"}, started.where, inside && make("span", {class: "about"}, ` ${inside}`)),
        make("span", {class: "said"}, started.user_message ?? ""),
        calls,
        took,
        make("span", {class: "when"}, clock(started.at)),
      ),
      make(
        "div",
        {class: "inside"},
        make(
          "dl",
          {class: "facts"},
          [
            started.user_message && [make("dt", {}, "Asked"), make("dd", {}, block(started.user_message, "Asked"))],
            started.memory_id !== null && [make("dt", {}, "Memory id"), make("dd", {}, started.memory_id)],
            started.parent && [
              make("dt", {}, "Called by"),
              make(
                "dd",
                {},
                outer
                  ? make("button", {type: "button", class: "small quiet", onclick: () => open(outer)}, outer.where)
                  : "another invocation",
              ),
            ],
          ]
            .filter(Boolean)
            .flat(),
        ),
        timeline.element,
        answer,
        remembered,
      ),
    ),
  );
  timeline.begin(started.at);
  const depth = outer ? outer.depth + 1 : started.parent ? 1 : 0;
  element.classList.toggle("inner", depth > 0);
  element.style.setProperty("--depth", depth);
  const run = {
    element,
    depth,
    inner: [],
    where: started.where,
    text: `${started.where} ${inside ?? ""} ${started.user_message ?? ""} ${started.memory_id ?? ""}`,
    take(entry) {
      if (feed(timeline, entry, entry.run)) run.text += ` ${entry.name ?? ""}`;
      calls.textContent = timeline.count ? counted(timeline.count, "tool call") : "";
      if (entry.type === "memory")
        remembered.replaceChildren(`The conversation now has ${counted(entry.messages, "message")}.`);
      if (entry.type !== "ended") return;
      timeline.end(entry.at);
      element.classList.remove("running");
      const stopped = entry.failure?.kind === "CancelledError";
      element.classList.toggle("failed", Boolean(entry.failure) && !stopped);
      mark.textContent = entry.waits ? "waits" : stopped ? "stopped" : entry.failure ? "failed" : "done";
      took.textContent = duration(entry.duration);
      if (stopped) answer.replaceChildren(make("p", {class: "about"}, "Cancelled, or the client disconnected."));
      else if (entry.failure)
        answer.replaceChildren(make("p", {class: "bad"}, `${entry.failure.kind}: ${entry.failure.message}`));
      else if (entry.answer && entry.answer.value !== null)
        answer.replaceChildren(
          block(
            typeof entry.answer.value === "string" ? entry.answer.value : JSON.stringify(entry.answer.value, null, 2),
            "Answer",
          ),
        );
    },
  };
  return run;
}
