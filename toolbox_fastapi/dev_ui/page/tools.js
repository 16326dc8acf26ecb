// @ts-check
// Shows the tools: what a model reads about each one, and a form to call it.

import {at, block, showError, counted, duration, make, mediaOf, pretty, setDisabled} from "./dom.js";
import {post} from "./events.js";
import {schemaForm} from "./forms.js";

const benches = new Map();

export function showTools(program, wanted) {
  if (!program.tools.length) {
    at("tools").replaceChildren();
    at("tool").replaceChildren(make("p", {class: "empty"}, "This container has no tools."));
    return;
  }
  const current = program.tools.find(each => each.id === wanted) ?? program.tools[0];
  at("tools").replaceChildren(
    make(
      "section",
      {},
      make("h2", {}, counted(program.tools.length, "tool")),
      make(
        "ul",
        {},
        program.tools.map(tool =>
          make(
            "li",
            {},
            make(
              "a",
              {
                href: `#tools/${encodeURIComponent(tool.id)}`,
                "aria-current": tool.id === current.id ? "page" : null,
              },
              make("span", {class: "name"}, tool.name),
              make("span", {class: "about"}, tool.where),
            ),
          ),
        ),
      ),
    ),
  );
  if (!benches.has(current.id)) benches.set(current.id, newBench(current));
  at("tool").replaceChildren(benches.get(current.id));
}

function newBench(tool) {
  const form = schemaForm(tool.schema);
  const call = make("button", {type: "submit"}, "Call");
  const state = make("p", {role: "status", class: "state"});
  const outcome = make("div", {class: "outcome"});
  let calling = false;
  const memory =
    tool.wants_memory_id &&
    make("input", {
      id: `memory of ${tool.id}`,
      autocomplete: "off",
      value: tool.needs_memory_id ? "dev-1" : "",
      spellcheck: "false",
    });

  async function run() {
    if (calling) return;
    showError(null);
    calling = true;
    setDisabled(call, true);
    state.textContent = "Calling…";
    try {
      const memory_id = memory && memory.value ? memory.value : null;
      const reply = await post("api/tool", {tool: tool.id, arguments: form.text(), memory_id});
      outcome.replaceChildren(...resultOf(reply));
      state.textContent =
        reply.type === "failure"
          ? "Failed."
          : `${reply.is_error ? "An error" : "A result"} after ${duration(reply.duration)}.`;
    } catch (error) {
      outcome.replaceChildren(make("p", {class: "bad"}, /** @type {Error} */ (error).message));
      state.textContent = "The call failed.";
    } finally {
      calling = false;
      setDisabled(call, false);
    }
  }

  const facts = [
    ["Declared", tool.where],
    ["Runs on", tool.runs],
    ["Offered by", tool.offered_by.join(", ") || "no service"],
    ["Costs", `about ${counted(tool.tokens, "token")} per request`],
    tool.timeout !== null && ["Timeout", duration(tool.timeout)],
    tool.returns_immediately && ["Result", "ends the invocation without another model call"],
  ].filter(Boolean);
  return make(
    "form",
    {
      class: "bench",
      "aria-label": tool.name,
      onsubmit(event) {
        event.preventDefault();
        run();
      },
      onkeydown(event) {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
          event.preventDefault();
          run();
        }
      },
    },
    make("h2", {}, tool.name),
    make("p", {class: "description"}, tool.description ?? "No description. The model sees only its name and schema."),
    make(
      "dl",
      {class: "facts"},
      facts.flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]),
    ),
    make(
      "details",
      {class: "schema"},
      make("summary", {}, "Schema of the arguments"),
      block(JSON.stringify(tool.schema, null, 2), "Schema"),
    ),
    make(
      "div",
      {class: "compose"},
      memory && make("div", {class: "field memory"}, make("label", {for: memory.id}, "Memory id"), memory),
      form.element,
      make("div", {class: "buttons"}, call, form.toggle, state),
    ),
    outcome,
  );
}

function resultOf(reply) {
  if (reply.type === "failure") return [make("p", {class: "bad"}, `${reply.kind}: ${reply.message}`)];
  const title = reply.is_error ? "The model reads an error" : "The model reads";
  const media = reply.contents.map(mediaOf);
  return [make("h3", {class: reply.is_error ? "bad" : null}, title), block(pretty(reply.text), "Result"), ...media];
}
