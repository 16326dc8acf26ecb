// @ts-check
// Starts the page: loads the program and shows the view named in the address.

import {at, showError, make} from "./dom.js";
import {showBeans} from "./beans.js";
import {showChat} from "./chat.js";
import {showConversations} from "./conversations.js";
import {get} from "./events.js";
import {showInbox} from "./inbox.js";
import {makeLog} from "./log.js";
import {showReach} from "./reach.js";
import {showTools} from "./tools.js";

const VIEWS = new Map([
  ["chat", showChat],
  ["tools", showTools],
  ["inbox", showInbox],
  ["conversations", showConversations],
  ["beans", showBeans],
  ["reach", showReach],
  ["log", () => {}],
]);
let program = null;
let shown = null;

function viewInAddress() {
  const [view, wanted] = location.hash.slice(1).split("/");
  try {
    return [VIEWS.has(view) ? view : "chat", wanted && decodeURIComponent(wanted)];
  } catch {
    return [view, undefined];
  }
}

function show() {
  const [chosen, wanted] = viewInAddress();
  for (const name of VIEWS.keys()) at(`view-${name}`).hidden = name !== chosen;
  for (const link of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("header nav a"))) {
    if (link.hash === `#${chosen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  showError(null);
  VIEWS.get(chosen)(program, wanted);
  document.querySelector(`#view-${chosen} .list [aria-current]`)?.scrollIntoView({block: "nearest"});
  if (chosen !== shown) scrollTo(0, 0);
  shown = chosen;
}

// Shows the view. If the focused element is gone, moves the focus to the heading for keyboard users.
function navigate() {
  show();
  if (document.activeElement !== document.body && document.activeElement?.checkVisibility()) return;
  /** @type {HTMLElement} */
  const heading = document.querySelector(`#view-${shown} .stage h2`) ?? at("main");
  heading.tabIndex = -1;
  heading.focus();
}

// After a restart, offers to reload the page if the program has changed.
async function checkForChanges() {
  const now = await get("api/program");
  if (JSON.stringify(now) === JSON.stringify(program)) at("news").replaceChildren();
  else
    at("news").replaceChildren(
      "The program has changed since this page was loaded. ",
      make("button", {type: "button", class: "small", onclick: () => location.reload()}, "Reload"),
    );
}

try {
  program = await get("api/program");
  at("title").textContent = program.title;
  document.title = `${program.title} · Dev UI`;
  makeLog(() => checkForChanges().catch(() => {}));
  addEventListener("hashchange", navigate);
  document.querySelector(".skip").addEventListener("click", event => {
    event.preventDefault();
    at("main").focus();
  });
  show();
} catch (error) {
  showError(`Cannot load the program: ${/** @type {Error} */ (error).message}`);
}
