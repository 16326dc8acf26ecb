// Asking services: a conversation per method, each turn with its answer, as it comes, and its timeline.

import {at, block, complain, counted, duration, make, setOff} from "./dom.js";
import {stream} from "./events.js";
import {schemaForm} from "./forms.js";
import {Timeline, feed, tokens} from "./timeline.js";

const talks = new Map();

export function showChat(program, wanted) {
  const methods = program.services.flatMap(service => service.methods.map(method => ({...method, service})));
  if (!methods.length) {
    at("methods").replaceChildren();
    at("chat").replaceChildren(make("p", {class: "empty"}, "There is no AI service in this container."));
    return;
  }
  const current = methods.find(each => each.id === wanted) ?? methods[0];
  at("methods").replaceChildren(...program.services.map(service => make("section", {},
    make("h2", {}, service.name),
    make("p", {class: "about"}, service.model),
    make("ul", {}, service.methods.map(method => make("li", {}, make("a", {
      href: `#chat/${encodeURIComponent(method.id)}`, "aria-current": method.id === current.id ? "page" : null,
    }, make("span", {class: "name"}, method.name), make("span", {class: "about"}, method.streams ? "streams" : method.returns))))),
  )));
  if (!talks.has(current.id)) talks.set(current.id, talk(current));
  at("chat").replaceChildren(talks.get(current.id));
}

function talk(method) {
  const {memory_parameter: memory, user_parameter: user} = method;
  const schema = {...method.schema, properties: {...method.schema.properties}};
  delete schema.properties[memory];
  const form = schemaForm(schema, {large: user ?? Object.keys(schema.properties)[0]});
  const turns = make("ol", {class: "turns", "aria-label": "Conversation"});
  const memoryInput = memory && make("input", {id: `memory ${method.id}`, value: "dev-1", autocomplete: "off", spellcheck: "false"});
  const send = make("button", {type: "submit"}, "Send");
  const stop = make("button", {type: "button", class: "quiet", "aria-disabled": "true", onclick: () => asking?.abort()}, "Stop");
  const state = make("p", {role: "status", class: "state"});
  let asking = null;
  const memoryText = () => {
    const {type} = method.schema.properties[memory];
    return type === "integer" ? memoryInput.value : JSON.stringify(memoryInput.value);
  };
  const element = make("form", {class: "talk", "aria-label": method.id, onsubmit(event) { event.preventDefault(); ask(); },
    onkeydown(event) {
      if (event.key === "Enter" && !event.shiftKey && event.target.tagName === "TEXTAREA" && !event.isComposing) {
        event.preventDefault();
        element.requestSubmit();
      }
      if (event.key === "Escape") asking?.abort();
    }});

  async function ask() {
    if (asking) return;
    complain(null);
    const typed = form.text();
    const body = memory ? withMemory(typed, memory, memoryText()) : typed;
    const turn = newTurn(typed, user);
    turns.append(turn.element);
    turn.element.scrollIntoView({block: "nearest"});
    const aborting = asking = new AbortController();
    setOff(send, true);
    setOff(stop, false);
    state.textContent = "Asking…";
    try {
      for await (const entry of stream("api/ask", {body: {method: method.id, arguments: body}, signal: aborting.signal})) turn.take(entry);
      state.textContent = turn.summary();
      if (user && !turn.failed) form.clear(user);
    } catch (error) {
      turn.fail(aborting.signal.aborted ? "Stopped." : error.message);
      state.textContent = aborting.signal.aborted ? "Stopped." : "It failed.";
    } finally {
      turn.done();
      asking = null;
      setOff(send, false);
      setOff(stop, true);
      element.querySelector(".compose").scrollIntoView({block: "nearest"});
    }
  }

  element.append(
    make("header", {class: "about-method"},
      make("h2", {}, method.id),
      make("p", {class: "about"}, [method.doc, `Returns ${method.returns}.`, method.memory && `Remembers ${method.memory}.`].filter(Boolean).join(" ")),
      offered(method)),
    turns,
    make("div", {class: "compose"},
      memory && make("div", {class: "field memory"}, make("label", {for: memoryInput.id}, "Memory id"),
        make("div", {class: "beside"}, memoryInput, make("button", {type: "button", class: "small quiet", onclick: () => renew(memoryInput)}, "New conversation"))),
      form.element,
      make("div", {class: "buttons"}, send, stop, form.toggle, state)),
  );
  return element;
}

// What a model may call; of many tools the number, so that the keyboard need not pass through all.
const FEW = 12;

function offered({tools, providers}) {
  const chips = make("p", {class: "chips"}, tools.map(each => make("a", {class: "chip", href: `#tools/${encodeURIComponent(each)}`}, each)),
    providers.map(each => make("span", {class: "chip"}, `from ${each}`)));
  return tools.length <= FEW ? chips : make("details", {}, make("summary", {}, counted(tools.length, "tool")), chips);
}

const withMemory = (text, name, memory) => {
  const inside = text.trim().replace(/^\{|\}$/g, "").trim();
  return `{${JSON.stringify(name)}:${memory}${inside ? `,${inside}` : ""}}`;
};

function renew(input) {
  input.value = input.value.replace(/(\d+)?$/, number => String(Number(number || 0) + 1));
  input.focus();
}

function newTurn(typed, user) {
  let said = typed;
  try {
    const values = JSON.parse(typed);
    const keys = Object.keys(values);
    said = keys.length === 1 && typeof values[keys[0]] === "string" ? values[keys[0]] : JSON.stringify(values, null, 2);
  } catch { /* shown as it was typed */ }
  const answer = make("div", {class: "answer", "aria-live": "polite", "aria-busy": "true"});
  const text = make("p", {class: "text"});
  const thought = make("details", {class: "thought", hidden: true}, make("summary", {}, "Reasoning"), make("p", {class: "text"}));
  const items = make("ol", {class: "values"});
  const trouble = make("p", {class: "bad", hidden: true});
  const about = make("p", {class: "about"});
  const timeline = new Timeline();
  answer.append(thought, text);
  const element = make("li", {class: "turn waiting"}, make("p", {class: "said"}, said),
    make("div", {class: "reply"}, answer, items, trouble, timeline.element, about));
  let root = null, usage = null, took = null, failed = false;

  function take(entry) {
    if (feed(timeline, entry, root)) return;
    switch (entry.type) {
      case "asked": timeline.begin(entry.at); break;
      case "started": root ??= entry.run; break;
      case "ended": if (entry.run === root) usage = entry.answer?.usage; break;
      case "text": text.append(entry.text); break;
      case "reasoning": thought.hidden = false; thought.lastChild.append(entry.text); break;
      case "item": items.append(make("li", {}, block(JSON.stringify(entry.value, null, 2), "Item"))); break;
      case "answer": show(entry.value); end(entry); break;
      case "failure": fail(`${entry.kind}: ${entry.message}`); end(entry); break;
    }
  }

  function show(value) {
    if (text.textContent || items.children.length) return;
    if (value === null || value === "") text.append(make("span", {class: "about"}, "It answered nothing."));
    else if (typeof value === "string") text.append(value);
    else answer.append(block(JSON.stringify(value, null, 2), "Answer"));
  }

  function end({at, duration: seconds}) {
    took = seconds;
    timeline.end(at);
    about.textContent = [duration(seconds), timeline.count && counted(timeline.count, "tool call"), usage && `${tokens(usage)} tokens`].filter(Boolean).join(" · ");
  }

  function fail(message) {
    failed = true;
    trouble.textContent = message;
    trouble.hidden = false;
  }

  return {element, take, fail, get failed() { return failed; }, 
    done() { element.classList.remove("waiting"); answer.removeAttribute("aria-busy"); timeline.leave(); },
    summary: () => failed ? "It failed." : `Answered in ${duration(took ?? 0)}${timeline.count ? `, with ${counted(timeline.count, "tool call")}` : ""}.`};
}
