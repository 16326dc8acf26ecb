// @ts-check
// Shows the model and tool calls of one invocation on a time axis. Each row opens to show its input and output.

import {block, clock, duration, make, pretty, visible} from "./dom.js";

// The entries of the log, as `journal.py` describes them. `at` is in milliseconds, `duration` in seconds.
/** @typedef {{type: "started", invocation: string, at: number, where: string, parent: string, user_message: string, memory_id: string}} StartedEntry */
/** @typedef {{type: "ended", invocation: string, at: number, duration: number, answer: any, failure: any, waits: boolean}} EndedEntry */
/** @typedef {{type: "model_started" | "tool_started", invocation: string, at: number, call: number, name: string, sent?: string, arguments?: string}} CallStartedEntry */
/** @typedef {{type: "model" | "tool", invocation: string, at: number, call: number, duration: number, result: string, is_error: boolean, usage?: any, thread?: string}} CallEndedEntry */
/** @typedef {{type: "guardrail" | "usage" | "connection" | "retrieval" | "handover" | "told", invocation: string, at: number, call: string, name: string, duration: number, result: string, refused: boolean}} MomentEntry */
/** @typedef {{type: "memory", invocation: string, at: number, messages: number}} MemoryEntry */
/** @typedef {StartedEntry | EndedEntry | CallStartedEntry | CallEndedEntry | MomentEntry | MemoryEntry} LogEntry */

function facts(row) {
  const parts = [];
  const add = (title, content) => content && parts.push(make("dt", {}, title), make("dd", {}, content));
  if (row.arguments !== undefined) add("Arguments", block(pretty(row.arguments || "{}"), `Arguments of ${row.name}`));
  if (row.sent !== undefined) add("Sent", block(row.sent, `Sent to ${row.name}`));
  if (row.result !== undefined)
    add(
      row.is_error ? "Error" : row.sent === undefined ? "Result" : "Reply",
      block(pretty(row.result), `${row.sent === undefined ? "Result" : "Reply"} of ${row.name}`),
    );
  add("Started", clock(row.at));
  if (row.duration !== undefined) add("Duration", duration(row.duration));
  add("Thread", row.thread);
  add("Tokens", row.usage && tokens(row.usage));
  return make("dl", {class: "facts"}, parts);
}

export const tokens = usage => `${usage.input_tokens} in, ${usage.output_tokens} out`;

export class Timeline {
  constructor() {
    this.rows = new Map();
    this.list = make("ol", {class: "timeline", "aria-label": "Timeline"});
    this.element = this.list;
    this.began = this.ended = null;
  }

  // Sets the start and the end of the axis, in milliseconds.
  begin(milliseconds) {
    this.began = milliseconds;
  }
  end(milliseconds) {
    this.ended = milliseconds;
    this.place();
  }

  // Marks the rows that are still running as stopped: no more entries will arrive.
  leave() {
    for (const row of this.rows.values())
      if (row.facts.duration === undefined) {
        row.facts.left = true;
        this.show(row);
      }
  }

  // Adds a row or changes it.
  set(key, kind, facts) {
    const row = this.rows.get(key) ?? this.row(key, kind);
    Object.assign(row.facts, facts);
    this.show(row);
    this.place();
  }

  row(key, kind) {
    const bar = make("span", {class: "bar"});
    const parts = {
      name: make(
        "span",
        {class: "name"},
        kind.endsWith(" inner") ? make("span", {class: "unseen"}, "inside: ") : null,
        make("span"),
      ),
      thread: make("span", {class: "thread"}),
      time: make("span", {class: "time"}),
    };
    const body = make("div", {class: "inside"});
    const summary = make(
      "summary",
      {},
      parts.name,
      parts.thread,
      make("span", {class: "track", "aria-hidden": "true"}, bar),
      parts.time,
    );
    const element = make("li", {class: kind}, make("details", {}, summary, body));
    const row = {kind, facts: {}, bar, parts, body, element};
    this.rows.set(key, row);
    this.list.append(element);
    return row;
  }

  show({facts: each, parts, body, element}) {
    parts.name.lastChild.textContent = visible(each.name);
    parts.thread.textContent = each.thread ?? (each.usage ? tokens(each.usage) : "");
    parts.time.textContent = each.left ? "stopped" : each.duration === undefined ? "running" : duration(each.duration);
    if (each.is_error || each.refused)
      parts.time.prepend(make("span", {class: "bad"}, each.refused ? "refused " : "failed "));
    element.classList.toggle("failed", Boolean(each.is_error || each.refused));
    element.classList.toggle("running", each.duration === undefined && !each.left);
    body.replaceChildren(facts(each));
  }

  // Sizes the bars by their time within the invocation.
  place() {
    const rows = [...this.rows.values()];
    if (!rows.length) return;
    const end = ({facts: each}) => each.at + (each.duration === undefined ? 0 : each.duration * 1000);
    const first = Math.min(this.began ?? Infinity, ...rows.map(row => row.facts.at));
    const last = Math.max(this.ended ?? 0, ...rows.map(end), first + 0.001);
    const sorted = rows.toSorted((one, other) => one.facts.at - other.facts.at);
    if (sorted.some((row, index) => row !== rows[index])) this.list.append(...sorted.map(row => row.element));
    for (const row of rows) {
      const left = Math.min(99, ((row.facts.at - first) / (last - first)) * 100);
      const right = row.facts.duration === undefined ? 100 : ((end(row) - first) / (last - first)) * 100;
      row.bar.style.left = `${Math.max(0, left)}%`;
      row.bar.style.width = `${Math.max(1, Math.min(100, right) - Math.max(0, left))}%`;
    }
  }

  get count() {
    return [...this.rows.values()].filter(row => row.kind.startsWith("tool")).length;
  }
}

// Adds a log entry to a timeline; returns false if the entry is not for a timeline. `root` is the timeline's invocation.
/** @param {LogEntry} entry @returns {entry is CallStartedEntry | CallEndedEntry | MomentEntry} */
export function feed(timeline, entry, root) {
  switch (entry.type) {
    case "model_started":
    case "tool_started":
    case "model":
    case "tool":
    case "guardrail":
    case "usage":
    case "connection":
    case "retrieval":
    case "handover":
    case "told": {
      const {type, invocation, call, ...facts} = entry;
      const kind = type.replace("_started", "");
      timeline.set(`${invocation} ${call}`, invocation === root ? kind : `${kind} inner`, facts);
      return true;
    }
    default:
      return false;
  }
}
