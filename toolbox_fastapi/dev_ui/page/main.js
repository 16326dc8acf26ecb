// The page: reads the program, and shows the view that the address names.

import {at, complain} from "./dom.js";
import {showBeans} from "./beans.js";
import {showChat} from "./chat.js";
import {get} from "./events.js";
import {makeLog} from "./log.js";
import {showTools} from "./tools.js";

const VIEWS = {chat: showChat, tools: showTools, beans: showBeans, log: () => {}};
let program = null;

function show() {
  const [view, wanted] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const chosen = view in VIEWS ? view : "chat";
  for (const name of Object.keys(VIEWS)) at(`view-${name}`).hidden = name !== chosen;
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.hash === `#${chosen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  complain(null);
  VIEWS[chosen](program, wanted);
}

try {
  program = await get("api/program");
  at("title").textContent = program.title;
  document.title = `${program.title} · Dev UI`;
  makeLog();
  addEventListener("hashchange", () => { if (location.hash !== "#main") show(); });
  show();
} catch (error) {
  complain(`The program cannot be read: ${error.message}`);
}
