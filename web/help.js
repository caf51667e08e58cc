// The help page of a node, opened at the paragraph that a warning or a badge is about.

import { app } from "../../scripts/app.js";

// Paragraphs by the reason of a warning: for each node that can have caused it a heading of its English page. Pages in
// other languages have the same paragraphs in the same order.
export const PARAGRAPHS = {
  "bf16": {
    LoadINT8DiT: "kernel",
    QuantizeToINT8SmoothQuant: "Inputs",
    ApplyFusedINT8Kernel: "Inputs",
    ApplyFusedINT8KernelCLIP: "Inputs",
  },
  "not-applied": { ApplyFusedINT8Kernel: "Inputs", ApplyFusedINT8KernelCLIP: "Inputs" },
  "uncalibrated": { QuantizeToINT8SmoothQuant: "Calibration" },
  "folded-lora": { LoadINT8DiT: "What is fused" },
  "fold-incomplete": { SaveINT8DiT: "Who can read the file" },
  "attention": {
    LoadINT8DiT: "attention",
    QuantizeToINT8SmoothQuant: "INT8 attention",
    ApplyFusedINT8Kernel: "Inputs",
  },
  "gguf-architecture": { SaveGGUFDiT: "Who can read the file" },
  "gguf-lora": { SaveGGUFDiT: "What is in the file" },
  "triton": { LoadINT8DiT: "kernel" },
  "unfused": { LoadINT8DiT: "What is fused", ApplyFusedINT8Kernel: "Outputs", ApplyFusedINT8KernelCLIP: "Outputs" },
};
const WAIT_MS = 5000; // for the panel to show the page

/** The node that a warning is about: the one that ran, or, where that is a sampler, one of the pack beside it. */
export function nodeOfWarning(reason, node) {
  const types = PARAGRAPHS[reason] ?? {};
  if (!node || node.type in types) return node;
  const fromModel = (one, depth = 0) => {
    if (!one || depth > 50 || one.type in types) return one;
    const input = one.inputs?.findIndex(({ type }) => type === "MODEL" || type === "GUIDER") ?? -1;
    return input < 0 ? undefined : fromModel(one.getInputNode(input), depth + 1);
  };
  return fromModel(node) ?? node.graph.nodes.find(({ type }) => type in types);
}

/** Open the help page of a node in the side panel, at a heading of its English page or at its beginning. */
export async function openHelp(node, heading) {
  app.canvas.selectItems([node]);
  const { $pinia } = document.querySelector("#vue-app")?.__vue_app__?.config.globalProperties ?? {};
  const panel = $pinia?._s?.get("rightSidePanel");
  const url = new URL(`./docs/${node.comfyClass}.md`, import.meta.url);
  if (!panel?.openPanel) return window.open(url);
  panel.openPanel("info");
  if (!heading) return;
  const page = await (await fetch(url)).text();
  const place = page.match(/^## .+$/gm).indexOf(`## ${heading}`);
  const title = node.constructor.title;
  for (const end = Date.now() + WAIT_MS; Date.now() < end; await new Promise(requestAnimationFrame)) {
    const help = document.querySelector(".node-help-content");
    const picture = help?.querySelector("img");
    if (help?.querySelector("h1")?.textContent !== title || !picture?.complete) continue; // not there, or moved by it
    return help.querySelectorAll("h2")[place]?.scrollIntoView();
  }
}
