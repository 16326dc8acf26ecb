// The tools: what a model is told of each, and a form to call it.

import {at, block, complain, counted, duration, make, pretty, setOff} from "./dom.js";
import {post} from "./events.js";
import {schemaForm} from "./forms.js";

const benches = new Map();

export function showTools(program, wanted) {
  if (!program.tools.length) {
    at("tools").replaceChildren();
    at("tool").replaceChildren(make("p", {class: "empty"}, "There is no tool in this container."));
    return;
  }
  const current = program.tools.find(each => each.id === wanted) ?? program.tools[0];
  at("tools").replaceChildren(make("section", {},
    make("h2", {}, counted(program.tools.length, "tool")),
    make("ul", {}, program.tools.map(tool => make("li", {}, make("a", {
      href: `#tools/${encodeURIComponent(tool.id)}`, "aria-current": tool.id === current.id ? "page" : null,
    }, make("span", {class: "name"}, tool.name), make("span", {class: "about"}, tool.where)))))));
  if (!benches.has(current.id)) benches.set(current.id, bench(current));
  at("tool").replaceChildren(benches.get(current.id));
}

function bench(tool) {
  const form = schemaForm(tool.schema);
  const call = make("button", {type: "submit"}, "Call");
  const state = make("p", {role: "status", class: "state"});
  const outcome = make("div", {class: "outcome"});
  let calling = false;
  const memory = tool.wants_memory_id && make("input", {id: `memory of ${tool.id}`, autocomplete: "off", value: tool.needs_memory_id ? "dev-1" : "", spellcheck: "false"});

  async function run() {
    if (calling) return;
    complain(null);
    calling = true;
    setOff(call, true);
    state.textContent = "Calling…";
    try {
      const memory_id = memory && memory.value ? memory.value : null;
      const told = await post("api/tool", {tool: tool.id, arguments: form.text(), memory_id});
      outcome.replaceChildren(...shown(told));
      state.textContent = told.type === "failure" ? "It failed." : `${told.is_error ? "An error" : "A result"} after ${duration(told.duration)}.`;
    } catch (error) {
      outcome.replaceChildren(make("p", {class: "bad"}, error.message));
      state.textContent = "It could not be called.";
    } finally {
      calling = false;
      setOff(call, false);
    }
  }

  const facts = [["Declared", tool.where], ["Runs on", tool.runs], ["Offered by", tool.offered_by.join(", ") || "no service"],
    ["Takes", `about ${counted(tool.tokens, "token")} of a request`], tool.timeout !== null && ["Time-out", duration(tool.timeout)],
    tool.returns_immediately && ["Result", "ends the invocation, without going back to the model"]].filter(Boolean);
  return make("form", {class: "bench", "aria-label": tool.name, onsubmit(event) { event.preventDefault(); run(); },
    onkeydown(event) { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } }},
    make("h2", {}, tool.name),
    make("p", {class: "description"}, tool.description ?? "It has no description: a model knows it by its name only."),
    make("dl", {class: "facts"}, facts.flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)])),
    make("details", {class: "schema"}, make("summary", {}, "Schema of its arguments"), block(JSON.stringify(tool.schema, null, 2), "Schema")),
    make("div", {class: "compose"},
      memory && make("div", {class: "field memory"}, make("label", {for: memory.id}, "Memory id"), memory),
      form.element,
      make("div", {class: "buttons"}, call, form.toggle, state)),
    outcome);
}

function shown(told) {
  if (told.type === "failure") return [make("p", {class: "bad"}, `${told.kind}: ${told.message}`)];
  const title = told.is_error ? "What a model reads: an error" : "What a model reads";
  const images = told.contents.filter(each => each.type === "ImageContent" && each.data)
    .map(each => make("img", {src: `data:${each.mime_type ?? "image/png"};base64,${each.data}`, alt: "An image the tool returned"}));
  return [make("h3", {class: told.is_error ? "bad" : null}, title), block(pretty(told.text), "Result"), ...images];
}
