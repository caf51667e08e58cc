// What the nodes last showed, kept in this browser and not in the workflow: a workflow that is handed on must not say
// how a model ran on somebody else's machine.

import { app } from "../../scripts/app.js";

const STORE = "int8_dit.last_results";
const MOST = 100; // nodes; the oldest go first
const NO_ID = "00000000-0000-0000-0000-000000000000"; // a graph that was never saved or loaded

/** What tells a node from those of all other workflows; nothing where the workflow has no id yet. */
function keyOf(node) {
  const root = (app.rootGraph ?? app.graph).id;
  if (!root || root === NO_ID) return undefined;
  return [root, node.graph?.id, node.id, node.comfyClass].join("/");
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {}; // not there for this page, or not ours
  }
}

export function remember(node, output) {
  const key = keyOf(node);
  if (key) keep({ ...kept(), [key]: { output, ranAt: Date.now() } });
}

/** What the node showed is over, and a reload does not bring it back. */
export function forget(node) {
  const { [keyOf(node)]: _, ...others } = kept();
  keep(others);
}

function keep(results) {
  const newest = Object.entries(results)
    .sort(([, one], [, other]) => other.ranAt - one.ranAt)
    .slice(0, MOST);
  try {
    localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(newest)));
  } catch {
    // Full or forbidden: then a reload shows nothing.
  }
}

/** The output that the node last showed and the time of it, or nothing. */
export function recall(node) {
  const key = keyOf(node);
  return key && kept()[key];
}
