// @ts-check
// Shows the runs: those that wait for a person first, with a form for each pending call, then the others.

import {at, block, counted, escaped, make, setDisabled, showError, when} from "./dom.js";
import {get, post} from "./events.js";

// Suspended runs come first, each group with the newest run first.
export function inOrder(runs) {
  const rank = run => (run.status === "suspended" ? 0 : 1);
  return [...runs].sort((a, b) => rank(a) - rank(b) || b.updated_at.localeCompare(a.updated_at));
}

// Returns JSON without the spaces between its tokens.
const compact = json => json.replace(/("(?:[^"\\]|\\.)*")|\s+/g, "$1");

// Returns the body of an answer. `original` and `typed` are JSON texts, and are sent as texts, because a browser rounds
// integers above 2^53. Throws an Error for arguments or a value that is not JSON.
export function answerFrom(kind, {original, typed, reason, remember = false}) {
  const checked = what => {
    try {
      JSON.parse(typed);
      return typed;
    } catch {
      throw new Error(`${what} must be JSON.`);
    }
  };
  if (kind === "approve") {
    const changed = compact(typed) === compact(original) ? {} : {text: checked("The arguments")};
    return {kind, ...changed, ...(remember ? {remember: "conversation"} : {})};
  }
  if (kind === "respond") return {kind, text: checked("The result")};
  if (kind === "retry") return {kind};
  return reason ? {kind, reason} : {kind};
}

const ACTIONS = {
  approval: [
    ["approve", "Approve"],
    ["reject", "Reject"],
  ],
  deferred: [
    ["respond", "Send the result"],
    ["fail", "Fail"],
  ],
  unknown_outcome: [
    ["respond", "Send the result"],
    ["retry", "Run again"],
    ["fail", "Fail"],
  ],
};

let showing = 0;

export async function showInbox(_, wanted) {
  const number = ++showing;
  let runs;
  try {
    runs = inOrder(await get("api/runs"));
  } catch (error) {
    showError(`Cannot load the runs: ${/** @type {Error} */ (error).message}`);
    return;
  }
  if (number !== showing) return;
  const current = runs.find(each => each.id === wanted) ?? runs[0];
  const waiting = runs.filter(each => each.status === "suspended").length;
  at("inbox").replaceChildren(
    make(
      "section",
      {},
      make("h2", {}, `${waiting} waiting, ${counted(runs.length, "run")}`),
      make("button", {type: "button", class: "small quiet", onclick: () => showInbox(_, wanted)}, "Refresh"),
      make(
        "ul",
        {},
        runs.map(run =>
          make(
            "li",
            {},
            make(
              "a",
              {
                href: `#inbox/${encodeURIComponent(run.id)}`,
                "aria-current": run.id === current.id ? "page" : null,
              },
              make("span", {class: "name"}, `${run.service.split(":").pop()}.${run.method}`),
              make("span", {class: "about"}, `${run.status} · ${when(run.updated_at)}`),
            ),
          ),
        ),
      ),
    ),
  );
  if (current) at("run").replaceChildren(detailsOf(current));
  else at("run").replaceChildren(make("p", {class: "empty"}, "No runs. A call that waits for a person appears here."));
}

function detailsOf(run) {
  const outcome = make("div", {class: "outcome", role: "status"});
  const cancel = make(
    "button",
    {type: "button", class: "small quiet", onclick: () => send({run_id: run.id, cancel: true}, cancel)},
    "Cancel the run",
  );

  async function send(body, button) {
    showError(null);
    setDisabled(button, true);
    try {
      const reply = await post("api/runs", body);
      if (reply.type === "failure")
        outcome.replaceChildren(make("p", {class: "bad"}, `${reply.kind}: ${reply.message}`));
      else if ("content" in reply)
        outcome.replaceChildren(make("h3", {}, "Completed"), block(textOf(reply.content), "Answer"));
      if (reply.type !== "failure") {
        const shown = [...outcome.childNodes];
        await showInbox(null, run.id);
        document.querySelector("#run .outcome")?.replaceChildren(...shown);
      }
    } catch (error) {
      outcome.replaceChildren(make("p", {class: "bad"}, /** @type {Error} */ (error).message));
    } finally {
      setDisabled(button, false);
    }
  }

  return make(
    "div",
    {class: "bench"},
    make("h2", {}, `${run.service.split(":").pop()}.${run.method}`),
    make("p", {class: "about"}, stateOf(run)),
    make("p", {class: "about"}, startOf(run)),
    run.pending.map(call =>
      pendingForm(call, canRemember(run, call), (answer, button) => send({run_id: run.id, answers: answer}, button)),
    ),
    run.status === "suspended" || run.status === "running" ? make("p", {class: "buttons"}, cancel) : null,
    outcome,
    run.history.length
      ? make(
          "section",
          {},
          make("h3", {}, "History"),
          make("ol", {"aria-label": "History"}, run.history.map(historyItem)),
        )
      : null,
  );
}

// Says how far a run is.
export function stateOf(run) {
  const attempt = run.attempts > 1 ? `, attempt ${run.attempts}` : "";
  return `Run ${run.id}, ${run.status}${attempt}${run.error ? `: ${run.error}` : ""}.`;
}

// Says who asked for a run, and in which conversation.
export function startOf(run) {
  const conversation = run.memory_id === null ? "" : `, in the conversation ${escaped(run.memory_id)}`;
  return `Started by ${run.started_by === null ? "an anonymous caller" : escaped(run.started_by)}${conversation}.`;
}

// Says until when a call waits for an answer.
export function expiryOf(call) {
  return call.expires_at ? `, until ${when(call.expires_at)}` : "";
}

// Says if the approval of a call can count for further calls of the conversation.
export function canRemember(run, call) {
  return call.may_remember && run.memory_id !== null && run.started_by !== null;
}

const textOf = value => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

function historyItem(entry) {
  const call = entry.tool_name ? ` ${entry.tool_name}` : "";
  const who = entry.by ? ` by ${entry.by}` : "";
  const why = entry.reason ? `: ${entry.reason}` : "";
  const remembered = entry.remembered ? ", remembered" : "";
  return make("li", {}, `${when(entry.at)} · ${entry.answer}${call}${who}${remembered}${why}`);
}

function pendingForm(call, asksToRemember, send) {
  const asksForResult = call.kind !== "approval";
  const label = asksForResult ? "Result, as JSON" : "Arguments";
  const original = escaped(call.text);
  const server = call.attributes.mcp_server ? `, on the MCP server ${call.attributes.mcp_server}` : "";
  const typed = make(
    "textarea",
    {id: `value of ${call.id}`, rows: "4", spellcheck: "false", class: "code"},
    asksForResult ? "null" : original,
  );
  const reason = make("input", {id: `reason of ${call.id}`, autocomplete: "off"});
  const remember = make("input", {type: "checkbox", id: `remember ${call.id}`});
  const trouble = make("p", {class: "bad", role: "alert", hidden: true});
  const buttons = ACTIONS[call.kind].map(([kind, title]) =>
    make(
      "button",
      {
        type: "button",
        class: kind === "approve" || kind === "respond" ? null : "quiet",
        onclick(event) {
          try {
            const values = {original, typed: typed.value, reason: reason.value.trim(), remember: remember.checked};
            trouble.hidden = true;
            send({[call.id]: answerFrom(kind, values)}, event.currentTarget);
          } catch (error) {
            trouble.textContent = /** @type {Error} */ (error).message;
            trouble.hidden = false;
          }
        },
      },
      title,
    ),
  );
  return make(
    "section",
    {class: "compose", "aria-label": `${call.tool_name} ${call.id}`},
    make("h3", {}, call.tool_name),
    make(
      "p",
      {class: "about"},
      `${call.kind.replace("_", " ")} at ${call.id}${server}${expiryOf(call)}${call.reason ? `: ${call.reason}` : ""}`,
    ),
    // The text area has escapes, which few people can read.
    asksForResult || original !== call.text ? block(call.text, `Arguments of ${call.tool_name}`) : null,
    make("div", {class: "field"}, make("label", {for: typed.id}, label), typed),
    make("div", {class: "field"}, make("label", {for: reason.id}, "Reason (for the model)"), reason),
    asksToRemember
      ? make("label", {for: remember.id}, remember, ` Approve further calls of ${call.tool_name} in this conversation`)
      : null,
    make("div", {class: "buttons"}, buttons),
    trouble,
  );
}
