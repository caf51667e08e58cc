// The pack's part of the frontend: the benchmark table inside its node, and the server's warnings as toasts.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const BENCHMARK_NODE = "INT8KernelBenchmark";
const BENCHMARK_RESULT = "int8_benchmark";
const TABLE_WIDGET = "int8_benchmark_table";
const WARNING_EVENT = "int8_dit.warning";
const WARNING_LIFE_MS = 15000;
const BOX_PADDING = 12; // above and below together
const MAX_TABLE_HEIGHT = 480;
const MAX_NODE_WIDTH = 900;

// The colours are the frontend's own variables, so the table follows the user's theme.
const STYLE = `
.int8-benchmark { box-sizing: border-box; overflow: auto; padding: ${BOX_PADDING / 2}px 8px; border-radius: 6px;
  background: var(--comfy-input-bg); color: var(--input-text); font: 12px/1.4 sans-serif; user-select: text; }
.int8-benchmark-content { width: fit-content; min-width: 100%; }
.int8-benchmark section + section { margin-top: 10px; }
.int8-benchmark h4 { margin: 0 0 4px; font-size: 12px; font-weight: 600; }
.int8-benchmark table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.int8-benchmark th, .int8-benchmark td { padding: 2px 8px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--border-color); }
.int8-benchmark th { color: var(--descrip-text); font-weight: 500; vertical-align: bottom; white-space: normal; }
.int8-benchmark th:first-child, .int8-benchmark td:first-child { padding-left: 0; text-align: left; }
.int8-benchmark th:last-child, .int8-benchmark td:last-child { padding-right: 0; }
.int8-benchmark p { margin: 4px 0 0; color: var(--descrip-text); font-size: 11px; }
`;

function element(tag, { className, text } = {}, children = []) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

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

/** The node's table widget; the first result makes it, so a node that has not run shows nothing. */
function tableWidget(node) {
  const existing = node.widgets?.find((widget) => widget.name === TABLE_WIDGET);
  if (existing) return existing;
  const content = element("div", { className: "int8-benchmark-content" });
  const box = element("div", { className: "int8-benchmark" }, [content]);
  const widget = node.addDOMWidget(TABLE_WIDGET, TABLE_WIDGET, box, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => widget.tableHeight ?? 0,
  });
  // The option keeps the table out of the prompt; this keeps it out of the saved workflow.
  widget.serialize = false;
  widget.content = content;
  // A node outside the viewport has no layout, so its table is measured whenever it gets one.
  new ResizeObserver(() => fitNode(node, widget, box)).observe(content);
  return widget;
}

/** Grow the node until its table shows, and never shrink what the user made larger. */
function fitNode(node, widget, box) {
  const contentHeight = widget.content.offsetHeight; // a layout size: the canvas zoom is a transform and does not count
  if (contentHeight === 0) return;
  // The frontend takes the widget's margin out of the height that it is given.
  widget.tableHeight = Math.min(contentHeight + BOX_PADDING, MAX_TABLE_HEIGHT) + 2 * widget.margin;
  const wanted = Math.min(node.size[0] + box.scrollWidth - box.clientWidth, MAX_NODE_WIDTH);
  const [minWidth, minHeight] = node.computeSize();
  node.setSize([Math.max(node.size[0], minWidth, wanted), Math.max(node.size[1], minHeight)]);
  node.setDirtyCanvas(true, true);
}

function showBenchmark(node, results) {
  tableWidget(node).content.replaceChildren(...results.map(benchmarkSection));
}

const visibleWarnings = new Set();

function showWarning({ summary, detail }) {
  // A sampler can repeat a warning at every step.
  const key = JSON.stringify([summary, detail]);
  if (visibleWarnings.has(key)) return;
  visibleWarnings.add(key);
  setTimeout(() => visibleWarnings.delete(key), WARNING_LIFE_MS);
  app.extensionManager.toast.add({ severity: "warn", summary, detail, life: WARNING_LIFE_MS });
}

app.registerExtension({
  name: "int8_dit",

  setup() {
    document.head.append(element("style", { text: STYLE }));
    api.addEventListener(WARNING_EVENT, ({ detail }) => showWarning(detail));
  },

  nodeCreated(node) {
    if (node.comfyClass !== BENCHMARK_NODE) return;
    const inherited = node.onExecuted;
    node.onExecuted = function (output) {
      inherited?.apply(this, arguments);
      if (output?.[BENCHMARK_RESULT]) showBenchmark(this, output[BENCHMARK_RESULT]);
    };
  },
});
