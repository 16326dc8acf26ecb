// @ts-check
// Shows the conversations: a list, and what was said in one of them beside what a model sees of it.

import {at, block, counted, make, mediaOf, pretty, setDisabled, showError, visible, when} from "./dom.js";
import {get, post} from "./events.js";
import {tokens} from "./timeline.js";

const PAGE = 50;
const VIEW = "#conversations";

// What is shown: the filter of the list and how many items of it; the open conversation, and how many entries of it.
const list = {service: "", owner: "", count: PAGE, form: null};
const room = {address: "", count: PAGE};
const names = new Map(); // of services, by their stored names
let showing = 0;

/** @typedef {{service: string, memory_id: string}} Place */

/** @param {Place} place */
export const addressOf = ({service, memory_id}) =>
  `${VIEW}/${encodeURIComponent(JSON.stringify([service, memory_id]))}`;

// Returns the conversation that an address names, or null.
/** @param {string | undefined} wanted @returns {Place | null} */
export function placeIn(wanted) {
  try {
    const [service, memory_id] = JSON.parse(wanted ?? "");
    return typeof service === "string" && typeof memory_id === "string" ? {service, memory_id} : null;
  } catch {
    return null;
  }
}

const nameOf = service => names.get(service) ?? service;
const textOf = error => /** @type {Error} */ (error).message;
const empty = text => make("p", {class: "empty"}, text);
const button = (title, onclick, kind = "small quiet") => make("button", {type: "button", class: kind, onclick}, title);

// Loads pages until they have `count` items. Each page has older items than the one before.
async function loadPages(path, query, count) {
  const pages = [];
  let page = null;
  do {
    page = await get(`${path}?${new URLSearchParams(page ? {...query, before: page.next} : query)}`);
    pages.push(page.items);
  } while (page.next !== null && pages.flat().length < count);
  return {...page, pages};
}

export async function showConversations(program, wanted) {
  const number = ++showing;
  const again = () => showConversations(program, wanted);
  try {
    const found = await loadPages("api/conversations", {service: list.service, owner: list.owner}, list.count);
    for (const each of found.services) names.set(each.stored, each.name);
    const place = placeIn(wanted) ?? found.pages.flat()[0];
    const details = place ? await loadDetails(place, again, program) : empty(reasonFor(found));
    if (number !== showing) return;
    showError(null);
    showList(found, place, again);
    at("conversation").replaceChildren(details);
  } catch (error) {
    if (number === showing) showError(`Cannot load the conversations: ${textOf(error)}`);
  }
}

// Says why there are no conversations.
export function reasonFor({unavailable, services}) {
  if (unavailable !== null) return `There is no list. ${unavailable}`;
  if (services.length) return "No conversations. A call with a memory id begins one.";
  return "No service of this program keeps conversations. Those with a MemoryId parameter do.";
}

// --- the list

function showList({pages, next, services, unavailable}, place, again) {
  if (list.form === null) {
    list.form = filterForm(services);
    const filter = make("details", {open: unavailable !== null}, make("summary", {}, "Filter"), list.form);
    at("conversations").replaceChildren(filter, make("section", {id: "rooms"}));
  }
  list.form.onsubmit = event => {
    event.preventDefault();
    const typed = new FormData(list.form);
    const [service, owner, memory_id] = ["service", "owner", "memory_id"].map(name => String(typed.get(name)));
    const chosen = service || (services.length === 1 ? services[0].stored : "");
    if (memory_id && !chosen) {
      showError("Choose the service whose conversation has this memory id.");
      return;
    }
    Object.assign(list, {service, owner, count: PAGE});
    list.form.elements.memory_id.value = "";
    if (memory_id) location.hash = addressOf({service: chosen, memory_id});
    else again();
  };
  const items = pages.flat();
  const more = () => {
    list.count = items.length + 1;
    again();
  };
  const current = place && addressOf(place);
  const title = unavailable === null ? `${counted(items.length, "conversation")}${next ? " or more" : ""}` : "No list";
  at("rooms").replaceChildren(
    make("h2", {}, title),
    button("Refresh", again),
    make(
      "ul",
      {},
      items.map(info => make("li", {}, roomLink(info, addressOf(info) === current))),
    ),
    next ? button("Show more", more) : "",
  );
}

function roomLink(info, isCurrent) {
  const id = info.title === null ? null : info.memory_id;
  const facts = [id, nameOf(info.service), info.owner, counted(info.messages, "message"), when(info.updated_at)];
  return make(
    "a",
    {href: addressOf(info), "aria-current": isCurrent ? "page" : null},
    make("span", {class: "name"}, info.title ?? info.memory_id),
    make("span", {class: "about"}, facts.filter(each => each !== null).join(" · ")),
  );
}

function filterForm(services) {
  const field = (label, input) => make("div", {class: "field"}, make("label", {for: input.id}, label), input);
  const text = name => make("input", {id: `rooms ${name}`, name, autocomplete: "off", spellcheck: "false"});
  const choices = services.map(each => make("option", {value: each.stored}, each.name));
  return make(
    "form",
    {class: "form"},
    field(
      "Service",
      make("select", {id: "rooms service", name: "service"}, make("option", {value: ""}, "All services"), choices),
    ),
    field("Owner", text("owner")),
    field("Open by memory id", text("memory_id")),
    make("div", {class: "buttons"}, make("button", {type: "submit", class: "small"}, "Show")),
  );
}

// --- one conversation

async function loadDetails(place, again, program) {
  const query = {service: place.service, memory_id: place.memory_id};
  const address = addressOf(query);
  if (room.address !== address) Object.assign(room, {address, count: PAGE});
  const found = await get(`api/conversation?${new URLSearchParams(query)}`);
  if (found.unavailable !== null) return empty(found.unavailable);
  const history = await loadPages("api/history", query, room.count);
  return detailsOf(query, found, history, {
    again,
    leave() {
      globalThis.history.replaceState(null, "", VIEW);
      return showConversations(program, undefined);
    },
  });
}

function detailsOf(place, found, history, {again, leave}) {
  const {info, run} = found;
  const state = make("p", {class: "state", role: "status"});

  // Sends a change, and shows what there is then. By then the user may have opened another conversation.
  async function change(action, pressed, more = {}) {
    if (pressed.getAttribute("aria-disabled") === "true") return;
    setDisabled(pressed, true);
    state.textContent = "Waiting…";
    try {
      const {stopped} = await post("api/conversations", {...place, action, ...more});
      if (!state.isConnected) return;
      await (action === "delete" ? leave() : again());
      report(action === "stop" ? (stopped ? "Stopped." : "Nothing is at work.") : "Done.");
    } catch (error) {
      state.replaceChildren(make("span", {class: "bad"}, textOf(error)));
    } finally {
      setDisabled(pressed, false);
    }
  }

  const showEarlier = () => {
    room.count = history.pages.flat().length + 1;
    again();
  };
  return make(
    "div",
    {class: "bench"},
    make("h2", {}, info?.title ?? place.memory_id),
    make("p", {class: "about"}, info ? aboutOf(info) : "There is no such conversation."),
    run ? make("p", {}, `Its run is ${run.status}. `, runLink(run.id, "Open the inbox")) : null,
    info && renameForm(info, (title, pressed) => change("rename", pressed, {title})),
    make("div", {class: "buttons"}, buttonsOf(place, info, change), state),
    info && make("div", {class: "sides"}, historyOf(history, change, showEarlier), seenOf(found)),
  );
}

// Says in the open view what was done. The button that was pressed is gone: its focus moves to the heading.
function report(text) {
  const now = document.querySelector("#conversation [role=status]");
  if (now) now.textContent = text;
  /** @type {HTMLElement | null} */
  const heading = document.querySelector("#conversation h2");
  if (heading === null || document.activeElement !== document.body) return;
  heading.tabIndex = -1;
  heading.focus();
}

// Returns a button that sends a change, after `question` if there is one.
function changeButton(title, send, question = "") {
  const pressed = button(title, () => (!question || confirm(visible(question)) ? send(pressed) : undefined));
  return pressed;
}

function buttonsOf(place, info, change) {
  const stop = changeButton("Stop", pressed => change("stop", pressed));
  if (!info) return [stop];
  const question = `Delete the conversation “${info.title ?? info.memory_id}”? This cannot be undone.`;
  const file = {href: `api/export?${new URLSearchParams(place)}`, download: "conversation.json"};
  return [stop, changeButton("Delete", pressed => change("delete", pressed), question), make("a", file, "Export")];
}

const runLink = (id, title) => make("a", {href: `#inbox/${encodeURIComponent(id)}`}, title);

export const aboutOf = info =>
  [
    `${nameOf(info.service)}, memory id ${info.memory_id}`,
    info.owner === null ? "no owner" : `owner ${info.owner}`,
    info.in_charge ? `${info.in_charge} in charge` : null,
    `begun ${when(info.created_at)}`,
    info.usage.input_tokens || info.usage.output_tokens ? `${tokens(info.usage)} tokens` : null,
  ]
    .filter(each => each !== null)
    .join(" · ");

function renameForm(info, send) {
  const title = make("input", {id: "title of the room", value: info.title ?? "", autocomplete: "off"});
  const pressed = make("button", {type: "submit", class: "small quiet"}, "Rename");
  const onsubmit = event => {
    event.preventDefault();
    send(title.value, pressed);
  };
  return make("form", {class: "beside", onsubmit}, make("label", {for: title.id}, "Title"), title, pressed);
}

function historyOf({pages, next}, change, showEarlier) {
  const entries = pages.toReversed().flat();
  const rewind = entry =>
    changeButton(
      "Rewind",
      pressed => change("rewind", pressed, {entry: entry.id}),
      "Go back to before this message? It and all that follows is hidden.",
    );
  return make(
    "section",
    {"aria-label": "What was said"},
    make("h3", {}, "What was said"),
    next ? button("Show earlier", showEarlier) : null,
    make(
      "ol",
      {class: "turns"},
      entries.map((entry, index) => entryItem(entry, turnOf(entry) !== turnOf(entries[index - 1]), rewind)),
    ),
  );
}

// An entry's id is that of its turn and a number.
const turnOf = entry => entry?.id.replace(/\.\d+$/, "");

// Says who gave an answer, from which sources, and what it used.
export const answerOf = ({answered_by: by, sources, usage}) =>
  [
    by && `by ${by}`,
    sources.length ? `sources: ${sources.map((each, index) => `[${index + 1}] ${visible(each)}`).join(", ")}` : null,
    usage && `${tokens(usage)} tokens`,
  ]
    .filter(each => each)
    .join(" · ");

function entryItem(entry, beginsTurn, rewind) {
  const about = [
    beginsTurn ? when(entry.at) : null,
    beginsTurn && entry.state !== "answered" ? make("span", {class: `mark ${entry.state}`}, entry.state) : null,
    beginsTurn && entry.run_id !== null ? runLink(entry.run_id, "Run") : null,
    entry.message.type === "user" ? rewind(entry) : null,
  ].filter(each => each !== null);
  return make(
    "li",
    {class: "turn"},
    about.length ? make("p", {class: "about"}, about) : null,
    partsOf(entry.message),
    answerOf(entry) ? make("p", {class: "about"}, answerOf(entry)) : null,
  );
}

function seenOf({messages, left_out: leftOut, view, is_known: isKnown}) {
  const kept = view === null ? "Nothing: the service keeps no conversations." : `It keeps ${view}.`;
  return make(
    "section",
    {"aria-label": "What the model sees"},
    make("h3", {}, "What the model sees"),
    make("p", {class: "about"}, isKnown ? kept : "This program has no service with this name."),
    leftOut ? make("p", {class: "about"}, `Not shown here: ${counted(leftOut, "earlier message")}.`) : null,
    make(
      "ol",
      {class: "turns"},
      messages.map(message => make("li", {class: "turn"}, partsOf(message))),
    ),
  );
}

// Returns the elements of a message.
function partsOf(message) {
  const media = (message.media ?? []).map(mediaOf);
  if (message.type === "user")
    return [
      message.name ? make("p", {class: "about"}, message.name) : null,
      make("p", {class: "said"}, message.text),
      ...media,
    ];
  if (message.type === "tool") {
    const [what, kind] = message.is_error ? ["Error", "bad"] : ["Result", "about"];
    const result = block(pretty(message.text), `${what} of ${message.name}`);
    return [make("div", {class: "reply"}, make("p", {class: kind}, `${what} of ${message.name}`), result, media)];
  }
  const calls = (message.calls ?? []).map(each =>
    make(
      "div",
      {},
      make("p", {class: "about"}, `Call of ${each.name}`),
      block(pretty(each.arguments || "{}"), `Arguments of ${each.name}`),
    ),
  );
  const thought =
    message.reasoning &&
    make(
      "details",
      {class: "thought"},
      make("summary", {}, "Reasoning"),
      make("p", {class: "text"}, message.reasoning),
    );
  const text = message.text && make("p", {class: "text"}, message.text);
  return [make("div", {class: "reply"}, thought || null, text || null, calls)];
}
