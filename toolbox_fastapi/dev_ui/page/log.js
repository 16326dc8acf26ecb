// The live log: invocations as they happen, the newest first.

import {at, block, clock, counted, duration, make} from "./dom.js";
import {stream} from "./events.js";
import {Timeline, feed} from "./timeline.js";

const MOST = 200;
const runs = new Map();
const list = make("ol", {class: "runs", "aria-label": "Invocations"});
const state = make("p", {role: "status", class: "state"}, "Connecting…");
const filter = make("input", {id: "filter", type: "search", placeholder: "service, text, tool …", autocomplete: "off", oninput: sift});
const nothing = make("p", {class: "empty"}, "Nothing has been called yet. Ask a service here, or use the application.");

export function makeLog() {
  at("log").append(make("div", {class: "bar-of-tools"}, make("label", {for: "filter"}, "Show only"), filter, state), nothing, list);
  follow();
}

// While the page is seen: a browser has few connections for one server. What is told again changes nothing.
async function follow() {
  for (;;) {
    await seen();
    const aborting = new AbortController();
    const leave = () => document.hidden && aborting.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      for await (const entry of stream("api/log", {signal: aborting.signal, opened: live})) take(entry);
    } catch { /* told below */ }
    document.removeEventListener("visibilitychange", leave);
    if (document.hidden) continue;
    state.textContent = "Not connected; trying again…";
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}

async function seen() {
  while (document.hidden) await new Promise(resolve => document.addEventListener("visibilitychange", resolve, {once: true}));
}

function live() { state.textContent = runs.size ? `Live, ${counted(runs.size, "invocation")}.` : "Live."; }

function take(entry) {
  let run = runs.get(entry.run);
  if (!run) {
    if (entry.type !== "started") return;  // its beginning is no longer kept
    run = newRun(entry);
    runs.set(entry.run, run);
    list.prepend(run.element);
    if (runs.size > MOST) { const [oldest] = runs.keys(); runs.get(oldest).element.remove(); runs.delete(oldest); }
  }
  run.take(entry);
  nothing.hidden = runs.size > 0;
  live();
  sift();
}

function sift() {
  const wanted = filter.value.trim().toLowerCase();
  for (const run of runs.values()) run.element.hidden = wanted !== "" && !run.text.toLowerCase().includes(wanted);
}

function newRun(started) {
  const timeline = new Timeline();
  const mark = make("span", {class: "mark"}, "running");
  const took = make("span", {class: "time"}), calls = make("span", {class: "calls"});
  const answer = make("div", {class: "answer"}), remembered = make("p", {class: "about"});
  const element = make("li", {class: "run running"}, make("details", {},
    make("summary", {}, mark, make("span", {class: "name"}, started.where),
      make("span", {class: "said"}, started.user_message ?? ""), calls, took, make("span", {class: "when"}, clock(started.at))),
    make("div", {class: "inside"},
      make("dl", {class: "facts"}, [
        started.user_message && [make("dt", {}, "Asked"), make("dd", {}, block(started.user_message, "Asked"))],
        started.memory_id !== null && [make("dt", {}, "Memory id"), make("dd", {}, started.memory_id)],
        started.parent && [make("dt", {}, "Called by"), make("dd", {}, runs.get(started.parent)?.where ?? "another invocation")],
      ].filter(Boolean).flat()),
      timeline.element, answer, remembered)));
  timeline.begin(started.at);
  const run = {element, where: started.where, text: `${started.where} ${started.user_message ?? ""} ${started.memory_id ?? ""}`, take(entry) {
    if (feed(timeline, entry, entry.run)) run.text += ` ${entry.name ?? ""}`;
    calls.textContent = timeline.count ? counted(timeline.count, "tool call") : "";
    if (entry.type === "memory") remembered.replaceChildren(`The conversation has ${counted(entry.messages, "message")} now.`);
    if (entry.type !== "ended") return;
    timeline.end(entry.at);
    element.classList.remove("running");
    element.classList.toggle("failed", Boolean(entry.failure));
    mark.textContent = entry.failure ? "failed" : "done";
    took.textContent = duration(entry.duration);
    if (entry.failure) answer.replaceChildren(make("p", {class: "bad"}, `${entry.failure.kind}: ${entry.failure.message}`));
    else if (entry.answer && entry.answer.value !== null)
      answer.replaceChildren(block(typeof entry.answer.value === "string" ? entry.answer.value : JSON.stringify(entry.answer.value, null, 2), "Answer"));
  }};
  return run;
}
