// The page: reads the program, and shows the view that the address names.

import {at, complain, make} from "./dom.js";
import {showBeans} from "./beans.js";
import {showChat} from "./chat.js";
import {get} from "./events.js";
import {makeLog} from "./log.js";
import {showTools} from "./tools.js";

const VIEWS = new Map([["chat", showChat], ["tools", showTools], ["beans", showBeans], ["log", () => {}]]);
let program = null, shown = null;

function named() {
  const [view, wanted] = location.hash.slice(1).split("/");
  try { return [VIEWS.has(view) ? view : "chat", wanted && decodeURIComponent(wanted)]; } catch { return [view, undefined]; }
}

function show() {
  const [chosen, wanted] = named();
  for (const name of VIEWS.keys()) at(`view-${name}`).hidden = name !== chosen;
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.hash === `#${chosen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  complain(null);
  VIEWS.get(chosen)(program, wanted);
  document.querySelector(`#view-${chosen} .list [aria-current]`)?.scrollIntoView({block: "nearest"});
  if (chosen !== shown) scrollTo(0, 0);
  shown = chosen;
}

// What was gone to by a link that is no longer there begins with its heading: so the keyboard goes on from there.
function go() {
  show();
  if (document.activeElement !== document.body && document.activeElement?.checkVisibility()) return;
  const heading = document.querySelector(`#view-${shown} .stage h2`) ?? at("main");
  heading.tabIndex = -1;
  heading.focus();
}

// After a restart the page may be of a program that was.
async function compare() {
  const now = await get("api/program");
  if (JSON.stringify(now) === JSON.stringify(program)) at("news").replaceChildren();
  else at("news").replaceChildren("The program has changed since this page was loaded. ",
    make("button", {type: "button", class: "small", onclick: () => location.reload()}, "Load it"));
}

try {
  program = await get("api/program");
  at("title").textContent = program.title;
  document.title = `${program.title} · Dev UI`;
  makeLog(() => compare().catch(() => {}));
  addEventListener("hashchange", go);
  document.querySelector(".skip").addEventListener("click", event => { event.preventDefault(); at("main").focus(); });
  show();
} catch (error) {
  complain(`The program cannot be read: ${error.message}`);
}
