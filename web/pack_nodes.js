// Which nodes are the pack's, and where a running prompt has them.

import { app } from "../../scripts/app.js";

// What ComfyUI calls the pack: by its folder.
const MODULE = `custom_nodes.${decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-2))}`;

export const isPackNode = (node) => node.constructor.nodeData?.python_module === MODULE;

/** The node that a running prompt calls `id`: a path through subgraphs, such as "12:5". */
export function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph;
  let node;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}
