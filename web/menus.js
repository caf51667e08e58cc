// What a right click on a loader offers: the pack's loader in its place, or the kernel behind it.

import { app } from "../../scripts/app.js";
import { translated } from "./translations.js";

const LOADER = "LoadINT8DiT";
const BENCHMARK = "INT8KernelBenchmark";
const KERNEL = "ApplyFusedINT8Kernel";
// Loaders of one diffusion model by their types, each with its input that names the file.
const REPLACED = { UNETLoader: "unet_name", UnetLoaderGGUF: "unet_name", UnetLoaderGGUFAdvanced: "unet_name" };
// Loaders of native INT8 files: what the kernel can be applied to.
const NATIVE = new Set(["UNETLoader", "CheckpointLoaderSimple"]);
const GAP = 40; // between a node and the next

/** The entries for a node; none for one that loads no model. */
export function menuOf(node) {
  return [
    ...(node.type in REPLACED ? [entry("Replace with Load INT8 DiT", () => replaceLoader(node))] : []),
    ...(NATIVE.has(node.type) ? [entry("Add Apply Fused INT8 Kernel behind it", () => addKernel(node))] : []),
  ];
}

/** Show the workflow's Kernel Benchmark; where it has none, one for the MODEL of this node. */
export function openBenchmark(node) {
  const benchmark = node.graph.nodes.find(({ type }) => type === BENCHMARK);
  if (benchmark) app.canvas.selectItems([benchmark]);
  else asOneStep(() => addBenchmark(node));
  app.canvas.centerOnNode(node.graph.nodes.find(({ type }) => type === BENCHMARK));
}

function addBenchmark(node) {
  const benchmark = added(node.graph, BENCHMARK, node.pos);
  benchmark.pos = freePlace(node, benchmark);
  node.connect(modelOutput(node), benchmark, "model");
  return benchmark;
}

function entry(words, change) {
  return { content: translated(words), callback: () => asOneStep(change) };
}

/** Change the workflow so that one undo takes all of it back. */
function asOneStep(change) {
  app.canvas.emitBeforeChange();
  try {
    app.canvas.selectItems([change()]);
  } finally {
    app.canvas.emitAfterChange();
  }
  app.canvas.setDirty(true, true);
}

/** Put the pack's loader where `node` is, with its file and its links. */
function replaceLoader(node) {
  const { graph } = node;
  const loader = added(graph, LOADER, node.pos);
  loader.setSize([Math.max(node.size[0], loader.size[0]), loader.size[1]]);
  loader.mode = node.mode;
  loader.color = node.color;
  loader.bgcolor = node.bgcolor;
  if (node.title !== node.constructor.title) loader.title = node.title; // the user's own
  const input = REPLACED[node.type];
  const file = node.widgets?.find(({ name }) => name === input)?.value;
  const widget = loader.widgets.find(({ name }) => name === "model_name");
  if (file !== undefined) widget.value = file;
  takeInput(node, input, loader, "model_name");
  takeOutputs(node, loader);
  if (node.flags.collapsed) loader.collapse();
  graph.remove(node);
  return loader;
}

/** Put the kernel between `node` and all that its MODEL goes to. */
function addKernel(node) {
  const kernel = added(node.graph, KERNEL, node.pos);
  kernel.pos = freePlace(node, kernel);
  takeOutputs(node, kernel);
  node.connect(modelOutput(node), kernel, 0);
  return kernel;
}

function added(graph, type, pos) {
  const node = LiteGraph.createNode(type);
  node.pos = [...pos];
  graph.add(node);
  return node;
}

const modelOutput = (node) => node.outputs.findIndex(({ type }) => type === "MODEL");

/** Let all that gets the MODEL of one node get that of another. Links into a subgraph's output are links as others. */
function takeOutputs(from, to) {
  const [old, now] = [modelOutput(from), modelOutput(to)];
  const links = [...(from.outputs[old].links ?? [])];
  for (const id of links) Object.assign(to.graph.links.get(id), { origin_id: to.id, origin_slot: now });
  to.outputs[now].links = links;
  from.outputs[old].links = [];
}

/** Let what goes into an input of one node go into that of another; the file can come from elsewhere. */
function takeInput(from, name, to, newName) {
  const input = from.inputs.find((one) => one.name === name);
  const place = to.inputs.findIndex((one) => one.name === newName);
  if (input?.link == null || place < 0) return;
  const { origin_id, origin_slot, parentId } = to.graph.links.get(input.link);
  const origin = to.graph.getNodeById(origin_id);
  if (origin) origin.connect(origin_slot, to, place, parentId);
  else to.graph.inputs[origin_slot].connect(to.inputs[place], to, parentId); // from outside of a subgraph
}

/** Where a new node has room: right of another, below or above it, and further down where nothing is free. */
function freePlace(node, added) {
  const title = LiteGraph.NODE_TITLE_HEIGHT;
  const [x, y] = node.pos;
  const below = y + node.size[1] + title + GAP;
  const places = [
    [x + node.size[0] + GAP, y],
    [x, below],
    [x, y - added.size[1] - title - GAP],
    ...Array.from({ length: 20 }, (_, step) => [x, below + step * (added.size[1] + title)]),
  ];
  const others = node.graph.nodes.filter((other) => other !== added);
  const isFree = ([left, top]) => others.every((other) => !overlap([left, top], added.size, other.pos, other.size, title));
  return places.find(isFree) ?? places[0];
}

function overlap([left, top], [width, height], [otherLeft, otherTop], [otherWidth, otherHeight], title) {
  const beside = left + width <= otherLeft || otherLeft + otherWidth <= left;
  return !beside && top - title < otherTop + otherHeight && otherTop - title < top + height;
}
