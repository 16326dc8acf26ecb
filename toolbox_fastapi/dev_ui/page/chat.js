// @ts-check
// Calls service methods: one conversation per method; each turn shows the answer as it arrives and a timeline.

import {at, block, showError, counted, duration, make, pretty, readable, setDisabled, visible} from "./dom.js";
import {stream} from "./events.js";
import {isNumber, schemaForm} from "./forms.js";
import {Timeline, feed, tokens} from "./timeline.js";

const conversations = new Map();

export function showChat(program, wanted) {
  const methods = program.services.flatMap(service => service.methods.map(method => ({...method, service})));
  if (!methods.length) {
    at("methods").replaceChildren();
    at("chat").replaceChildren(make("p", {class: "empty"}, "This container has no AI services."));
    return;
  }
  const current = methods.find(each => each.id === wanted) ?? methods[0];
  at("methods").replaceChildren(
    ...program.services.map(service =>
      make(
        "section",
        {},
        make("h2", {}, service.name),
        make("p", {class: "about"}, service.model),
        make(
          "ul",
          {},
          service.methods.map(method =>
            make(
              "li",
              {},
              make(
                "a",
                {
                  href: `#chat/${encodeURIComponent(method.id)}`,
                  "aria-current": method.id === current.id ? "page" : null,
                },
                make("span", {class: "name"}, method.name),
                make("span", {class: "about"}, method.streams ? "streams" : method.returns),
              ),
            ),
          ),
        ),
      ),
    ),
  );
  if (!conversations.has(current.id)) conversations.set(current.id, newConversation(current));
  at("chat").replaceChildren(conversations.get(current.id));
}

function newConversation(method) {
  const {memory_parameter: memory, user_parameter: user} = method;
  const schema = {...method.schema, properties: {...method.schema.properties}};
  delete schema.properties[memory];
  const form = schemaForm(schema, {large: user ?? Object.keys(schema.properties)[0]});
  const turns = make("ol", {class: "turns", "aria-label": "Conversation"});
  const memorySchema = method.schema.properties[memory];
  const memoryInput =
    memory &&
    make("input", {
      id: `memory ${method.id}`,
      value: firstMemoryId(memorySchema),
      autocomplete: "off",
      spellcheck: "false",
    });
  const send = make("button", {type: "submit"}, "Send");
  const stop = make(
    "button",
    {type: "button", class: "quiet", "aria-disabled": "true", onclick: () => asking?.abort()},
    "Stop",
  );
  const state = make("p", {role: "status", class: "state"});
  /** @type {AbortController | null} */
  let asking = null;
  const element = make("form", {
    class: "talk",
    "aria-label": method.id,
    onsubmit(event) {
      event.preventDefault();
      ask();
    },
    onkeydown(event) {
      if (event.key === "Enter" && !event.shiftKey && event.target.tagName === "TEXTAREA" && !event.isComposing) {
        event.preventDefault();
        element.requestSubmit();
      }
      if (event.key === "Escape") asking?.abort();
    },
  });

  async function ask() {
    if (asking) return;
    showError(null);
    const typed = form.text();
    const body = memory ? withMemory(typed, memory, memoryJson(memorySchema, memoryInput.value)) : typed;
    const turn = newTurn(typed);
    turns.append(turn.element);
    turn.element.scrollIntoView({block: "nearest"});
    const aborting = (asking = new AbortController());
    setDisabled(send, true);
    setDisabled(stop, false);
    state.textContent = "Asking…";
    try {
      for await (const entry of stream("api/ask", {
        body: {method: method.id, arguments: body},
        signal: aborting.signal,
      }))
        turn.take(entry);
      state.textContent = turn.summary();
      if (user && !turn.failed) form.clear(user);
    } catch (error) {
      turn.fail(aborting.signal.aborted ? "Stopped." : /** @type {Error} */ (error).message);
      state.textContent = aborting.signal.aborted ? "Stopped." : "Failed.";
    } finally {
      turn.done();
      asking = null;
      setDisabled(send, false);
      setDisabled(stop, true);
      element.querySelector(".compose").scrollIntoView({block: "nearest"});
    }
  }

  element.append(
    make(
      "header",
      {class: "about-method"},
      make("h2", {}, method.id),
      make(
        "p",
        {class: "about"},
        [method.doc, `Returns ${method.returns}.`, method.memory && `Remembers ${method.memory}.`]
          .filter(Boolean)
          .join(" "),
      ),
      toolChips(method),
    ),
    turns,
    make(
      "div",
      {class: "compose"},
      memory &&
        make(
          "div",
          {class: "field memory"},
          make("label", {for: memoryInput.id}, "Memory id"),
          make(
            "div",
            {class: "beside"},
            memoryInput,
            make(
              "button",
              {type: "button", class: "small quiet", onclick: () => nextMemoryId(memoryInput)},
              "New conversation",
            ),
          ),
        ),
      form.element,
      make("div", {class: "buttons"}, send, stop, form.toggle, state),
    ),
  );
  return element;
}

// Lists the tools that the model can call. Long lists are folded, so that keyboard users do not have to pass through all.
const MAX_OPEN_TOOLS = 12;

function toolChips({tools, providers}) {
  const chips = make(
    "p",
    {class: "chips"},
    tools.map(each => make("a", {class: "chip", href: `#tools/${encodeURIComponent(each)}`}, each)),
    providers.map(each => make("span", {class: "chip"}, `from ${each}`)),
  );
  return tools.length <= MAX_OPEN_TOOLS
    ? chips
    : make("details", {}, make("summary", {}, counted(tools.length, "tool")), chips);
}

const withMemory = (text, name, memory) => {
  const inside = text
    .trim()
    .replace(/^\{|\}$/g, "")
    .trim();
  return `{${JSON.stringify(name)}:${memory}${inside ? `,${inside}` : ""}}`;
};

export const firstMemoryId = ({type}) => (type === "integer" ? "1" : "dev-1");

// Text that is no number is sent as text, so that the server can reject it with its reason.
export const memoryJson = ({type}, text) =>
  type === "integer" && isNumber(text.trim()) ? text.trim() : JSON.stringify(text);

function nextMemoryId(input) {
  input.value = input.value.replace(/(\d+)?$/, number => String(Number(number || 0) + 1));
  input.focus();
}

function newTurn(typed) {
  let said = typed;
  try {
    const values = JSON.parse(typed);
    const keys = Object.keys(values);
    said = keys.length === 1 && typeof values[keys[0]] === "string" ? values[keys[0]] : pretty(typed);
  } catch {
    /* not JSON: shown as typed */
  }
  const answer = make("div", {class: "answer", "aria-live": "polite", "aria-busy": "true"});
  const text = make("p", {class: "text"});
  const thought = make(
    "details",
    {class: "thought", hidden: true},
    make("summary", {}, "Reasoning"),
    make("p", {class: "text"}),
  );
  const items = make("ol", {class: "values"});
  const errorText = make("p", {class: "bad", hidden: true});
  const about = make("p", {class: "about"});
  const timeline = new Timeline();
  answer.append(thought, text);
  const element = make(
    "li",
    {class: "turn waiting"},
    make("p", {class: "said"}, said),
    make("div", {class: "reply"}, answer, items, errorText, timeline.element, about),
  );
  let root = null;
  let usage = null;
  let took = null;
  let failed = false;
  let suspended = false;

  function take(entry) {
    if (feed(timeline, entry, root)) return;
    switch (entry.type) {
      case "asked":
        timeline.begin(entry.at);
        break;
      case "started":
        root ??= entry.invocation;
        break;
      case "ended":
        if (entry.invocation === root) usage = entry.answer?.usage;
        break;
      case "text":
        text.append(readable(entry.text));
        break;
      case "reasoning":
        thought.hidden = false;
        thought.lastChild.append(readable(entry.text));
        break;
      case "item":
        items.append(make("li", {}, block(JSON.stringify(entry.value, null, 2), "Item")));
        break;
      case "answer":
        show(entry.value);
        end(entry);
        break;
      case "suspended":
        suspended = true;
        text.append(
          visible(
            `Waits for ${counted(entry.pending.length, "answer")}: ${entry.pending.map(each => each.tool_name).join(", ")}. `,
          ),
          make("a", {href: `#inbox/${encodeURIComponent(entry.run_id)}`}, "Open the inbox"),
        );
        end(entry);
        break;
      case "failure":
        fail(`${entry.kind}: ${entry.message}`);
        end(entry);
        break;
    }
  }

  function show(value) {
    if (text.textContent || items.children.length) return;
    if (value === null || value === "") text.append(make("span", {class: "about"}, "Empty answer."));
    else if (typeof value === "string") text.append(readable(value));
    else answer.append(block(JSON.stringify(value, null, 2), "Answer"));
  }

  function end({at, duration: seconds}) {
    took = seconds;
    timeline.end(at);
    about.textContent = [
      duration(seconds),
      timeline.count && counted(timeline.count, "tool call"),
      usage && `${tokens(usage)} tokens`,
    ]
      .filter(Boolean)
      .join(" · ");
  }

  function fail(message) {
    failed = true;
    errorText.textContent = visible(message);
    errorText.hidden = false;
  }

  return {
    element,
    take,
    fail,
    get failed() {
      return failed;
    },
    done() {
      element.classList.remove("waiting");
      answer.removeAttribute("aria-busy");
      timeline.leave();
    },
    summary: () =>
      failed
        ? "Failed."
        : `${suspended ? "Suspended" : "Answered"} ${suspended ? "after" : "in"} ${duration(took ?? 0)}${timeline.count ? `, with ${counted(timeline.count, "tool call")}` : ""}.`,
  };
}
