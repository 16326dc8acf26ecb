// @ts-check
// Shows which tools can be called from where, as a table.

import {at, make} from "./dom.js";

export function showReach(program) {
  if (!at("reach").children.length) at("reach").append(program.reach.length ? table(program.reach) : nothing());
}

function nothing() {
  return make("p", {class: "empty"}, "No tool can be reached.");
}

/** Return the roles of which one is enough; if no single role is, what each check on the way needs. */
function rolesOf(way) {
  if (!way.checks.length) return way.needs_identity ? "any identity" : "everybody";
  if (way.roles.every(role => way.checks.every(check => check.includes(role)))) return way.roles.join(", ");
  return way.checks.map(check => check.join(" or ")).join(", and ");
}

function table(ways) {
  const head = ["Entry", "Through", "Tool", "Roles", "Approval", "Guardrails", "Effects"].map(text =>
    make("th", {scope: "col"}, text),
  );
  const rows = ways.map(way =>
    make(
      "tr",
      {},
      make("th", {scope: "row"}, way.entry),
      make("td", {}, way.path.join(" → ")),
      make("td", {}, make("code", {}, way.tool)),
      make("td", {}, rolesOf(way)),
      make("td", {}, way.approvers.join(", ") || (way.requires_approval ? "yes" : "")),
      make("td", {}, way.guardrails.join(", ")),
      make("td", {}, way.effects.join(", ")),
    ),
  );
  return make(
    "div",
    {class: "table", tabindex: "0", role: "region", "aria-label": "Table of the reach"},
    make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)),
  );
}
