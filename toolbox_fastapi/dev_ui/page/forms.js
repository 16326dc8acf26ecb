// @ts-check
// Builds a form from a JSON schema. Each control returns JSON text, or undefined to omit the value. The server validates.

import {escaped, make, newId, pretty} from "./dom.js";

const MAX_DEPTH = 5;

// Follows references and takes `null` out of unions.
export function resolveSchema(schema, definitions) {
  let nullable = false;
  for (let steps = 0; steps < 20; steps++) {
    if (typeof schema !== "object" || schema === null) return {schema: {}, definitions, nullable};
    if (schema.$defs) definitions = {...definitions, ...schema.$defs};
    if (schema.$ref) {
      const {$ref, ...own} = schema;
      schema = {...definitions[$ref.split("/").pop()], ...own};
      continue;
    }
    if (schema.allOf?.length === 1) {
      const {allOf, ...own} = schema;
      schema = {...allOf[0], ...own};
      continue;
    }
    const union = schema.anyOf ?? schema.oneOf;
    if (union) {
      const rest = union.filter(each => each.type !== "null");
      nullable ||= rest.length < union.length;
      if (rest.length === 1) {
        const own = {...schema};
        delete own.anyOf;
        delete own.oneOf;
        schema = {...rest[0], ...own};
        continue;
      }
    }
    if (Array.isArray(schema.type)) {
      const types = schema.type.filter(each => each !== "null");
      nullable ||= types.length < schema.type.length;
      if (types.length > 1) return {schema: {anyOf: types.map(type => ({...schema, type}))}, definitions, nullable};
      schema = {...schema, type: types[0]};
    }
    break;
  }
  return {schema, definitions, nullable};
}

export const isNumber = text => /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(text);

/** @param {any} schema */
export function kindOf({type, enum: values, anyOf, oneOf, items, prefixItems, format}) {
  if (values) return "one of";
  if (anyOf || oneOf) return (anyOf ?? oneOf).map(nameOf).join(" or ");
  if (type === "array") return prefixItems || !items ? "list" : `list of ${nameOf(items)}`;
  return format ?? type ?? "any JSON";
}

// Returns a short name for one schema of a union.
/** @param {any} schema */
export function nameOf(schema) {
  if (schema.title) return schema.title;
  if (schema.$ref) return schema.$ref.split("/").pop();
  const properties = Object.entries(schema.properties ?? {});
  const tag = properties.find(([, each]) => each.const !== undefined);
  if (tag) return String(tag[1].const);
  if (properties.length)
    return `object (${properties
      .slice(0, 3)
      .map(([name]) => name)
      .join(", ")}${properties.length > 3 ? ", …" : ""})`;
  return kindOf(schema);
}

const EXAMPLES = {date: "2026-01-31", "date-time": "2026-01-31T12:00:00Z", time: "12:00:00", duration: "PT5M"};

function textControl(id, schema, required, {large = false, describedBy, read}) {
  const shown =
    schema.default === undefined ? (EXAMPLES[schema.format] ?? "") : `default: ${JSON.stringify(schema.default)}`;
  const input = make("textarea", {
    id,
    rows: large ? 2 : 1,
    spellcheck: "false",
    placeholder: schema.examples ? String(schema.examples[0]) : shown,
    "aria-describedby": describedBy,
    "aria-required": required ? "true" : null,
  });
  return {element: input, focus: input, read: () => read(input.value)};
}

// A text control for a URL, with a button that takes a file as a data URL.
function fileControl(id, schema, required, options) {
  const made = textControl(id, schema, required, options);
  const file = make("input", {
    type: "file",
    accept: schema.contentMediaType,
    "aria-label": "Choose a file",
    onchange() {
      const reader = new FileReader();
      reader.addEventListener("load", () => {
        made.element.value = reader.result;
      });
      if (file.files[0]) reader.readAsDataURL(file.files[0]);
    },
  });
  return {...made, element: make("div", {class: "file"}, made.element, file)};
}

function choice(id, options, describedBy) {
  const select = make(
    "select",
    {id, "aria-describedby": describedBy},
    options.map(([value, text]) => make("option", {value}, text)),
  );
  return {element: select, focus: select, read: () => (select.value === "" ? undefined : select.value)};
}

const OMITTED = ["", "— omit —"];

function rawJson(id, schema, required, nothing, describedBy) {
  const input = make("textarea", {
    id,
    rows: 2,
    class: "code",
    spellcheck: "false",
    placeholder: "JSON",
    "aria-describedby": describedBy,
  });
  const read = () => {
    if (!input.value.trim()) return required ? nothing : undefined;
    try {
      JSON.parse(input.value);
      return input.value;
    } catch {
      return JSON.stringify(input.value);
    }
  };
  return {element: input, focus: input, read};
}

// --- controls

function control(id, whole, definitions, required, depth, options) {
  const {schema, definitions: known, nullable} = resolveSchema(whole, definitions);
  const {describedBy} = options;
  const nothing = nullable ? "null" : "";
  if (schema.const !== undefined)
    return choice(id, [[JSON.stringify(schema.const), String(schema.const)]], describedBy);
  if (schema.enum) {
    const values = schema.enum.map(each => [JSON.stringify(each), String(each)]);
    return choice(id, required ? values : [OMITTED, ...values], describedBy);
  }
  if (schema.anyOf || schema.oneOf) return variants(id, schema, known, required, depth, options);
  if (schema.type === "boolean") {
    const values = [
      ["false", "false"],
      ["true", "true"],
    ];
    return choice(id, required && !nullable ? values : [required ? ["null", "null"] : OMITTED, ...values], describedBy);
  }
  if (schema.type === "integer" || schema.type === "number") {
    const read = text =>
      isNumber(text.trim())
        ? text.trim()
        : text.trim()
          ? JSON.stringify(text.trim())
          : required && nullable
            ? "null"
            : undefined;
    const made = textControl(id, schema, required, {describedBy, read});
    made.element.setAttribute("inputmode", schema.type === "integer" ? "numeric" : "decimal");
    return made;
  }
  if (schema.type === "string") {
    const read = text => (text !== "" ? JSON.stringify(text) : required ? (nullable ? "null" : '""') : undefined);
    return schema.contentMediaType
      ? fileControl(id, schema, required, {...options, read})
      : textControl(id, schema, required, {...options, read});
  }
  if (depth < MAX_DEPTH && schema.type === "array" && schema.items && !schema.prefixItems)
    return items(id, schema, known, required, depth);
  if (depth < MAX_DEPTH && schema.type === "object" && schema.properties && Object.keys(schema.properties).length)
    return group(id, schema, known, required && !nullable, depth);
  return rawJson(
    id,
    schema,
    required,
    nothing || (schema.type === "array" ? "[]" : schema.type === "object" ? "{}" : "null"),
    describedBy,
  );
}

function variants(id, schema, definitions, required, depth, options) {
  const union = (schema.anyOf ?? schema.oneOf).filter(each => each.type !== "null");
  const made = [],
    place = make("div", {class: "variant"});
  const names = union.map((each, index) => [String(index), nameOf(each)]);
  const select = make(
    "select",
    {"aria-describedby": options.describedBy, onchange: show},
    (required ? names : [OMITTED, ...names]).map(([value, text]) => make("option", {value}, text)),
  );
  function show() {
    const index = select.value;
    if (index === "") {
      place.replaceChildren();
      return;
    }
    made[index] ??= control(newId("field"), union[index], definitions, true, depth + 1, {label: "Value"});
    if (made[index].focus && !made[index].focus.hasAttribute("aria-label"))
      made[index].focus.setAttribute("aria-label", names[index][1]);
    place.replaceChildren(made[index].element);
  }
  select.id = id;
  show();
  return {
    element: make("div", {class: "variants"}, select, place),
    focus: select,
    read: () => (select.value === "" ? undefined : made[select.value].read()),
  };
}

function items(id, schema, definitions, required, depth) {
  const list = make("ol", {class: "items"});
  const held = [];
  const add = make("button", {type: "button", id, class: "small", onclick: () => more().focus?.focus()}, "Add item");
  const number = () => held.forEach((item, index) => item.label(`Item ${index + 1}`));
  function more() {
    const item = control(newId("item"), schema.items, definitions, true, depth + 1, {});
    const remove = make(
      "button",
      {
        type: "button",
        class: "small",
        onclick() {
          held.splice(held.indexOf(item), 1);
          row.remove();
          number();
          add.focus();
        },
      },
      "Remove",
    );
    const nested = item.element.classList.contains("nested");
    const row = make("li", {}, make("div", {role: nested ? "group" : null}, item.element), remove);
    item.label = text => {
      (nested ? item.element.parentNode : item.focus)?.setAttribute("aria-label", text);
      remove.setAttribute("aria-label", `Remove ${text.toLowerCase()}`);
    };
    held.push(item);
    list.append(row);
    number();
    return item;
  }
  const read = () => {
    const texts = held.map(each => each.read() ?? "null");
    return texts.length || required ? `[${texts.join(",")}]` : undefined;
  };
  return {element: make("div", {class: "nested"}, list, add), focus: add, read};
}

function group(id, schema, definitions, required, depth) {
  const inner = fields(schema, definitions, depth + 1);
  if (required) return {element: make("div", {class: "nested", id}, inner.element), read: inner.read};
  const given = make("input", {
    type: "checkbox",
    id,
    onchange() {
      inner.element.hidden = !given.checked;
    },
  });
  inner.element.hidden = true;
  return {
    element: make("div", {class: "nested"}, make("label", {class: "check"}, given, " set"), inner.element),
    focus: given,
    read: () => (given.checked ? inner.read() : undefined),
  };
}

// Builds one control for each property of an object, with its label and description.
function fields(schema, definitions, depth, large = null) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, property]) => {
    const id = newId("field"),
      describedBy = newId("about");
    const seen = resolveSchema(property, definitions).schema;
    const made = control(id, property, definitions, required.has(name), depth, {describedBy, large: name === large});
    const kind = `${kindOf(seen)}${required.has(name) ? "" : ", optional"}`;
    const isGroup = made.element.classList.contains("nested");
    const about = make(
      "span",
      {class: "about", id: describedBy},
      make("span", {class: "kind"}, kind),
      property.description ?? seen.description ?? "",
    );
    const element = isGroup
      ? make("fieldset", {class: "field"}, make("legend", {}, name), about, made.element)
      : make(
          "div",
          {class: "field"},
          make("div", {class: "head"}, make("label", {for: id}, name), about),
          made.element,
        );
    return {name, read: made.read, element, input: made.focus};
  });
  const read = () =>
    `{${rows
      .map(({name, read}) => [name, read()])
      .filter(([, text]) => text !== undefined)
      .map(([name, text]) => `${JSON.stringify(name)}:${text}`)
      .join(",")}}`;
  const clear = name => {
    const input = rows.find(each => each.name === name)?.input;
    if (input?.tagName === "TEXTAREA") input.value = "";
  };
  return {
    element: make(
      "div",
      {class: "fields"},
      rows.map(each => each.element),
    ),
    read,
    clear,
  };
}

// Builds the whole form: the fields, or the JSON itself. `text()` returns the JSON to send.
export function schemaForm(schema, {large = null, label = "Arguments"} = {}) {
  const made = fields(schema, schema.$defs ?? {}, 0, large);
  const raw = make("textarea", {
    class: "code",
    rows: 6,
    spellcheck: "false",
    "aria-label": `${label} as JSON`,
    hidden: true,
  });
  const empty = !Object.keys(schema.properties ?? {}).length;
  const toggle = make(
    "button",
    {
      type: "button",
      class: "small quiet",
      "aria-pressed": "false",
      onclick() {
        const asJson = raw.hidden;
        if (asJson) raw.value = escaped(pretty(made.read()));
        raw.hidden = !asJson;
        made.element.hidden = asJson;
        toggle.setAttribute("aria-pressed", String(asJson));
        if (asJson) raw.focus();
      },
    },
    "As JSON",
  );
  const nothing = empty ? make("p", {class: "about"}, "No arguments.") : null;
  return {
    element: make("div", {class: "form"}, nothing, made.element, raw),
    toggle,
    clear: made.clear,
    text: () => (raw.hidden ? made.read() : raw.value),
  };
}
