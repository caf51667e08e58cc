// Names on nodes that the frontend leaves as ids, and the width that they take.

import { namesOfInput } from "./translations.js";

const LEAST_WIDTH = 225; // of a node in the Vue renderer
const TITLE_ROOM = 60; // beside a title: the dot in front of it, and margins
const SLOT_ROOM = 70; // beside the names of an input and an output

/** Make a new node as wide as its words; one of a saved workflow gets its own size after that. */
export function fitWords(node) {
  const context = document.createElement("canvas").getContext("2d");
  const wide = (text, size) => {
    context.font = `${size}px ${LiteGraph.NODE_FONT}`;
    return Math.ceil(context.measureText(text ?? "").width);
  };
  const slot = (one) => wide(one && (one.label ?? one.localized_name ?? one.name), LiteGraph.NODE_SUBTEXT_SIZE);
  const inputs = node.inputs?.filter(({ widget }) => !widget) ?? [];
  const rows = Array.from(node.outputs ?? [], (output, row) => slot(inputs[row]) + slot(output) + SLOT_ROOM);
  const width = Math.max(LEAST_WIDTH, wide(node.title, LiteGraph.NODE_TEXT_SIZE) + TITLE_ROOM, ...rows);
  if (node.size[0] < width) node.setSize([width, node.size[1]]);
}

/** Name the slots that grow by what they are: "positive 1" for positive.positive_0, in the user's language. */
export function labelGrown(node) {
  const label = () => labelSlots(node);
  const { onConnectionsChange, onConfigure } = node;
  node.onConnectionsChange = function () {
    onConnectionsChange?.apply(this, arguments);
    label(); // before the Vue renderer draws a slot that this has added
  };
  node.onConfigure = function () {
    onConfigure?.apply(this, arguments);
    joinGrown(this);
    label();
  };
  label();
}

/** Put grown slots behind the first of their group: a paste links by places, and a configured node has them last. */
function joinGrown({ inputs }) {
  const first = new Map(inputs.map(({ name }, place) => [name.split(".")[0], place]).reverse());
  inputs.sort((one, other) => first.get(one.name.split(".")[0]) - first.get(other.name.split(".")[0]));
}

function labelSlots(node) {
  for (const input of node.inputs ?? []) {
    const [, group, slot] = /^(\w+)\.(\w+_\d+)$/.exec(input.name) ?? [];
    if (!group) continue;
    const names = namesOfSlot(node, group, slot);
    if (input.label && ![slot, ...names].includes(input.label)) continue; // the user's own
    input.label = names[0];
  }
}

/** A slot's names in all languages, the user's first. */
function namesOfSlot(node, group, slot) {
  const [, prefix, number] = /^(\w+)_(\d+)$/.exec(slot);
  return namesOfInput(node.comfyClass, group).map((name) => `${name ?? prefix} ${Number(number) + 1}`);
}

/** Show the display names that the node's definition gives to the inputs of its choices. */
export function labelChoices(node) {
  const { required, optional } = node.constructor.nodeData?.input ?? {};
  for (const [name, [type, options]] of Object.entries({ ...required, ...optional })) {
    if (type !== "COMFY_DYNAMICCOMBO_V3") continue;
    const label = () => labelChosen(node, name, options.options);
    // The frontend makes the widgets anew when the choice changes, and names them after it has added them.
    const inherited = node.addCustomWidget;
    node.addCustomWidget = function (widget) {
      if (widget.name.startsWith(`${name}.`)) queueMicrotask(label);
      return inherited.apply(this, arguments);
    };
    label();
  }
}

function labelChosen(node, name, choices) {
  const chosen = node.widgets?.find((widget) => widget.name === name)?.value;
  const { required, optional } = choices.find(({ key }) => key === chosen)?.inputs ?? {};
  for (const [id, [, { display_name } = {}]] of Object.entries({ ...required, ...optional })) {
    const widget = node.widgets.find((other) => other.name === `${name}.${id}`);
    const input = node.inputs?.find((other) => other.name === `${name}.${id}`);
    // A translation of the user's language stays.
    if (display_name && widget?.label === id) widget.label = display_name;
    if (display_name && input?.label === id) input.label = display_name;
  }
}
