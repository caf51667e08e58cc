// The pack's part of the frontend: results shown inside their nodes, and the server's warnings as toasts.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { BOX_PADDING, element, STYLE } from "./elements.js";
import { quantizationSection } from "./quantization_report.js";
import { SETTINGS, showWarning, WARNING_EVENT } from "./warnings.js";

// What is shown inside a node, by the key of its ui result: a list of values, each made an element.
const RESULTS = {
  int8_benchmark: benchmarkSection,
  int8_quantization_report: quantizationSection,
  int8_dit_summary: (text) => element("p", { text }),
};
const RESULT_NODES = new Set(["ApplyFusedINT8Kernel", "INT8KernelBenchmark", "LoadINT8DiT", "QuantizeToINT8SmoothQuant"]);
const RESULT_WIDGET = "int8_dit_result";
const MAX_RESULT_HEIGHT = 480;
const MAX_NODE_WIDTH = 900;

/** One benchmark as a section: title, table, notes. */
function benchmarkSection({ title, columns, rows, notes }) {
  const cells = (tag, texts) => element("tr", {}, texts.map((text) => element(tag, { text })));
  return element("section", {}, [
    element("h4", { text: title }),
    element("table", {}, [
      element("thead", {}, [cells("th", columns)]),
      element("tbody", {}, rows.map((row) => cells("td", row))),
    ]),
    ...notes.map((text) => element("p", { text })),
  ]);
}

/** The node's result widget; the first result makes it, so a node that has not run shows nothing. */
function resultWidget(node) {
  const existing = node.widgets?.find((widget) => widget.name === RESULT_WIDGET);
  if (existing) return existing;
  const content = element("div", { className: "int8-result-content" });
  const box = element("div", { className: "int8-result" }, [content]);
  const widget = node.addDOMWidget(RESULT_WIDGET, RESULT_WIDGET, box, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => widget.resultHeight ?? 0,
  });
  // The option keeps the result out of the prompt; this keeps it out of the saved workflow.
  widget.serialize = false;
  widget.content = content;
  // A node outside the viewport has no layout, so its result is measured whenever it gets one.
  new ResizeObserver(() => fitNode(node, widget, box)).observe(content);
  return widget;
}

/** Grow the node until its result shows, and never shrink what the user made larger. */
function fitNode(node, widget, box) {
  const contentHeight = widget.content.offsetHeight; // a layout size: the canvas zoom is a transform and does not count
  if (contentHeight === 0) return;
  // The frontend takes the widget's margin out of the height that it is given.
  widget.resultHeight = Math.min(contentHeight + BOX_PADDING, MAX_RESULT_HEIGHT) + 2 * widget.margin;
  const wanted = Math.min(node.size[0] + box.scrollWidth - box.clientWidth, MAX_NODE_WIDTH);
  const [minWidth, minHeight] = node.computeSize();
  node.setSize([Math.max(node.size[0], minWidth, wanted), Math.max(node.size[1], minHeight)]);
  node.setDirtyCanvas(true, true);
}

function showResults(node, output) {
  for (const [key, draw] of Object.entries(RESULTS)) {
    if (output?.[key]) resultWidget(node).content.replaceChildren(...output[key].map(draw));
  }
}

app.registerExtension({
  name: "int8_dit",
  settings: SETTINGS,

  setup() {
    document.head.append(element("style", { text: STYLE }));
    api.addEventListener(WARNING_EVENT, ({ detail }) => showWarning(detail));
  },

  nodeCreated(node) {
    if (!RESULT_NODES.has(node.comfyClass)) return;
    const inherited = node.onExecuted;
    node.onExecuted = function (output) {
      inherited?.apply(this, arguments);
      showResults(this, output);
    };
  },
});
