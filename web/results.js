// What a node shows of its last run: badges and tables, in a widget below the others.

import { api } from "../../scripts/api.js";
import { badge, BOX_PADDING, element, MAX_RESULT_HEIGHT } from "./elements.js";
import { recall, remember } from "./last_results.js";
import { quantizationSection } from "./quantization_report.js";

// What is shown inside a node, by the key of its ui result: a list of values, each made an element.
const RESULTS = {
  int8_dit_badges: badgeSection,
  int8_benchmark: benchmarkSection,
  int8_quantization_report: quantizationSection,
};
const RESULT_NODES = new Set([
  "CompareImagesINT8DiT",
  "ApplyFusedINT8Kernel",
  "INT8KernelBenchmark",
  "LoadINT8DiT",
  "QuantizeToINT8SmoothQuant",
  "SaveINT8Calibration",
  "SaveGGUFDiT",
  "SaveINT8DiT",
]);
export const RESULT_WIDGET = "int8_dit_result";
const MAX_NODE_WIDTH = 900;

export const showsResults = (node) => RESULT_NODES.has(node.comfyClass);

function badgeSection({ severity, text, detail }) {
  return element("section", { title: detail }, [badge(severity, text), ...paragraphs(detail ? [detail] : [])]);
}

/** One benchmark: title, what matters of it, table, notes, and its JSON. */
function benchmarkSection({ title, columns, rows, notes, summary = [], valid = true, download }) {
  const cells = (tag, texts) => element("tr", {}, texts.map((text) => element(tag, { text })));
  const severity = valid ? "note" : "warn"; // what a valid one found may be good or bad
  return element("section", {}, [
    element("h4", { text: title }),
    ...(valid ? [] : [badge(severity, "not a valid measurement")]),
    ...summary.map((text) => element("p", { className: "int8-summary", "data-severity": severity, text })),
    element("table", {}, [
      element("thead", {}, [cells("th", columns)]),
      element("tbody", {}, rows.map((row) => cells("td", row))),
    ]),
    ...paragraphs(notes),
    ...(download ? [downloadLink(download)] : []),
  ]);
}

const paragraphs = (texts) => texts.map((text) => element("p", { text }));

function downloadLink({ filename, subfolder, type }) {
  const href = api.apiURL(`/view?${new URLSearchParams({ filename, subfolder, type })}`);
  return element("a", { href, download: filename, target: "_blank", text: "JSON for an issue" });
}

/** The node's result widget; the first result makes it, so a node that has not run shows nothing. */
export function resultWidget(node) {
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

/** Show the results of a run: of one that has just ended, or, with its time `ranAt`, of one that a page showed before. */
function show(node, output, ranAt) {
  const sections = Object.entries(RESULTS).flatMap(([key, draw]) => (output[key] ?? []).map(draw));
  if (sections.length === 0) return;
  const { content } = resultWidget(node);
  content.classList.toggle("int8-result-old", ranAt !== undefined);
  content.replaceChildren(...(ranAt === undefined ? [] : [ageLine(ranAt)]), ...sections);
}

function ageLine(ranAt) {
  const time = new Date(ranAt).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  return element("p", { className: "int8-result-age", text: `Last run in this browser: ${time}` });
}

/** Show what the node's runs return from now on, and keep it for a reload of the page. */
export function showNewResults(node) {
  const inherited = node.onExecuted;
  node.onExecuted = function (output) {
    inherited?.apply(this, arguments);
    const shown = Object.fromEntries(Object.keys(RESULTS).flatMap((key) => (output?.[key] ? [[key, output[key]]] : [])));
    if (Object.keys(shown).length === 0) return;
    show(this, shown);
    remember(this, shown);
  };
}

/** Show what the node of a loaded workflow returned when it last ran in this browser. */
export function showLastResults(node) {
  const last = recall(node);
  if (last) show(node, last.output, last.ranAt);
}
