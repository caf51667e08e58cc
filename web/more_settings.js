// Rare widgets stay out of sight: the Vue renderer does that with what is marked `advanced`, here the classic one does too.
//
// A widget that is not as it was when its node was new, or that a link feeds, is always seen.

import { app } from "../../scripts/app.js";
import { heightOf } from "./results.js";
import { translated } from "./translations.js";

const BUTTON = "more settings";
const VUE = "Comfy.VueNodes.Enabled";
const refreshers = new WeakMap(); // by node

/** Hide the rare widgets of a new node, and give it a button that shows them. */
export function hideRareWidgets(node) {
  const rare = (node.widgets ?? []).filter(({ options }) => options?.advanced);
  if (rare.length === 0) return;
  // What stands below a widget, such as "control after generate", goes with it.
  const groups = rare.map((widget) => [widget, ...(widget.linkedWidgets ?? [])]);
  const before = new Map(groups.flat().map((widget) => [widget, widget.value]));
  const isRare = (group) =>
    group.every((widget) => widget.value === before.get(widget) && node.getSlotFromWidget?.(widget)?.link == null);

  const button = node.addWidget("button", BUTTON, null, () => toggle(), { serialize: false, canvasOnly: true });
  button.serialize = false;

  // Newer frontends know where a widget is hidden. There `hidden` is everywhere, also in panels and in a subgraph.
  const byPlace = groups.flat().every((widget) => "visibility" in widget);
  const isHidden = (group) => !node.showAdvanced && isRare(group);
  for (const group of byPlace ? groups : []) for (const widget of group) hideOnCanvas(widget, () => isHidden(group));
  const hide = (inVue = app.extensionManager.setting.get(VUE)) => {
    const here = !byPlace && !inVue;
    for (const group of groups) for (const widget of group) widget.hidden = here && isHidden(group);
    button.label = translated(node.showAdvanced ? "fewer settings" : BUTTON);
  };
  const toggle = () => {
    const free = node.size[1] - heightOf(node);
    node.showAdvanced = !node.showAdvanced;
    hide();
    node.setSize([node.size[0], heightOf(node) + Math.max(0, free)]);
    node.setDirtyCanvas(true, true);
  };
  for (const event of ["onConfigure", "onConnectionsChange"]) {
    const inherited = node[event];
    node[event] = function () {
      inherited?.apply(this, arguments);
      hide();
    };
  }
  refreshers.set(node, hide);
  hide();
}

/** Let the canvas leave a widget out while `isHidden` says so: no other place, and no copy of it in a subgraph. */
function hideOnCanvas(widget, isHidden) {
  const prototype = Object.getPrototypeOf(widget);
  Object.defineProperty(widget, "visibility", {
    configurable: true,
    get() {
      const own = Reflect.get(prototype, "visibility", widget);
      return isHidden() ? { ...own, surfaces: { ...own.surfaces, canvas: "never" } } : own;
    },
  });
}

/** Nodes that are there when the user changes the renderer. */
export function followRenderer() {
  const all = (graph) => graph.nodes.flatMap((node) => [node, ...(node.subgraph ? all(node.subgraph) : [])]);
  app.ui.settings.addEventListener(`${VUE}.change`, ({ detail }) => {
    for (const node of all(app.rootGraph ?? app.graph)) refreshers.get(node)?.(detail.value); // not stored yet
  });
}
