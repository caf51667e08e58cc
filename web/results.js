// What a node shows of its last run: badges and tables, in a widget below the others.

import { api } from "../../scripts/api.js";
import { copy } from "./clipboard.js";
import { badge, element, MAX_RESULT_HEIGHT } from "./elements.js";
import { openHelp, PARAGRAPHS } from "./help.js";
import { forget, recall, remember } from "./last_results.js";
import { quantizationSection } from "./quantization_report.js";
import { namesOfInput, translated } from "./translations.js";

const FAILURE = "int8_dit_failure"; // the one result that web/run_state.js makes, and no node
const TYPICAL_ERRORS = "Typical errors"; // the last heading of every help page
// How a run can end without a result, and how bad that is.
const ENDS = { "failed": "error", "not run": "error", "interrupted": "warn" };

// By the key of a ui result, a list of values: what of it is always seen, what a click on "Details" opens, what one on
// "Copy JSON" copies, and the heading of the help page that "More" opens, where something is bad.
const RESULTS = {
  [FAILURE]: { line: failureLine, help: ([{ words }]) => ENDS[words] === "error" && TYPICAL_ERRORS },
  int8_quantization_report: {
    line: ([{ headline, title }]) => [headlineOf(headline ?? title)],
    details: ([report]) => [quantizationSection(report)],
  },
  int8_image_pair: { line: () => [], details: ([pair], node) => [pairSection(pair, node)] },
  int8_benchmark: {
    line: benchmarkLine,
    details: benchmarkDetails,
    copied: ([{ copied }]) => copied, // none in results of an earlier version, which may name paths
    help: ([{ valid = true }]) => !valid && "What the node shows",
  },
  int8_dit_badges: { line: badgeLine, details: badgeDetails, help: helpOfBadges },
};
// The nodes with results, and how much height each keeps free for them: a run must not make it cover its neighbours.
const ROOM = {
  ApplyFusedINT8Kernel: 60,
  ApplyFusedINT8KernelCLIP: 60,
  CompareImagesINT8DiT: 74,
  INT8KernelBenchmark: 140,
  LoadINT8DiT: 60,
  QuantizeToINT8SmoothQuant: 104,
  SaveGGUFDiT: 66,
  SaveINT8Calibration: 66,
  SaveINT8DiT: 66,
};
const RESULT_WIDGET = "int8_dit_result";
const MARGIN = 4;
const SAID_MS = 3000; // how long a button says what it did

export const showsResults = (node) => node.comfyClass in ROOM;

const paragraphs = (texts) => texts.map((text) => element("p", { text: translated(text) }));
const headlineOf = (text) => element("p", { className: "int8-headline", text: translated(text) });

function badgeLine(badges) {
  return badges.map(({ severity, text, detail }) => {
    const made = badge(severity, translated(text));
    if (detail) made.title = translated(detail);
    return made;
  });
}

/** The paragraph about the first of a node's badges that says something bad. */
function helpOfBadges(badges, node) {
  const bad = badges.find(({ severity, reason }) => severity === "warn" && PARAGRAPHS[reason]?.[node.comfyClass]);
  return bad && PARAGRAPHS[bad.reason][node.comfyClass];
}

function failureLine([{ words, sentences }]) {
  const className = `int8-${ENDS[words]}`;
  return [
    badge(ENDS[words], translated(words)),
    ...sentences.map((text) => element("p", { className, text: sentence(translated(text)) })),
  ];
}

/** A text with a capital at its beginning, unless that is a file's name or an id. */
const sentence = (text) => text.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase());

function badgeDetails(badges) {
  return badges.map(({ text, detail }) =>
    element("section", {}, [element("h4", { text: translated(text) }), ...paragraphs(detail ? [detail] : [])]),
  );
}

/** What a benchmark or a comparison says first, and of a benchmark this pack's bar beside that of bf16. */
function benchmarkLine([{ title, bars = [], valid = true }]) {
  const ours = bars.some((bar) => bar.ours) ? bars.filter((bar) => bar.ours || bar.ratio === 1) : [];
  return [
    headlineOf(title),
    ...(ours.length ? [barsOf(ours)] : []),
    ...(valid ? [] : [badge("warn", translated("not a valid measurement"))]),
  ];
}

function barsOf(bars) {
  const longest = Math.max(...bars.map(({ ratio }) => ratio));
  const rows = bars.flatMap(({ name, ratio, ours }) => [
    element("span", { text: translated(name) }),
    element("div", { className: "int8-bar", "data-ours": ours, style: `width: ${(100 * ratio) / longest}%` }),
    element("span", { text: ratio.toFixed(2) }),
  ]);
  return element("div", { className: "int8-bars" }, rows);
}

function benchmarkDetails([first, ...others]) {
  const { bars = [], summary = [], valid = true, download } = first;
  const severity = valid ? "note" : "warn"; // what a valid one found may be good or bad
  return [
    element("section", {}, [
      ...(bars.length ? [barsOf(bars)] : []),
      ...summary.map((text) =>
        element("p", { className: "int8-summary", "data-severity": severity, text: translated(text) }),
      ),
      ...tableAndNotes(first),
    ]),
    ...others.map((section) =>
      element("section", {}, [element("h4", { text: translated(section.title) }), ...tableAndNotes(section)]),
    ),
    ...(download ? [downloadLink(download)] : []),
  ];
}

function tableAndNotes({ columns, rows, notes }) {
  const cells = (tag, texts) => element("tr", {}, texts.map((text) => element(tag, { text: translated(text) })));
  const table = element("table", {}, [
    element("thead", {}, [cells("th", columns)]),
    element("tbody", {}, rows.map((row) => cells("td", row))),
  ]);
  return [...(rows.length ? [table] : []), ...paragraphs(notes)];
}

/** A reference and an image over each other, with a slider that says how much of each is seen. */
function pairSection({ number, files }, node) {
  const names = ["reference", "image"].map((input) => namesOfInput(node.comfyClass, input)[0] ?? input);
  const images = files.map((file, index) => element("img", { src: urlOf(file), alt: names[index] }));
  const slider = element("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": names.join(" | ") });
  slider.oninput = () => images[1].style.setProperty("clip-path", `inset(0 0 0 ${slider.value}%)`);
  slider.oninput();
  const section = element("section", {}, [
    element("h4", { text: translated(`Pair ${number}, the least like its reference`) }),
    element("div", { className: "int8-pair" }, images),
    element("div", { className: "int8-pair-names" }, [
      element("span", { text: names[0] }),
      slider,
      element("span", { text: names[1] }),
    ]),
  ]);
  for (const image of images) image.onerror = () => section.remove(); // of a run before ComfyUI started anew
  return section;
}

const urlOf = ({ filename, subfolder, type }) =>
  api.apiURL(`/view?${new URLSearchParams({ filename, subfolder, type })}`);

function downloadLink({ filename, subfolder, type }) {
  const href = urlOf({ filename, subfolder, type });
  return element("a", { href, download: filename, target: "_blank", text: translated("JSON for an issue") });
}

/** The node's result widget; the first result makes it, so a node that has not run shows nothing. */
function resultWidget(node) {
  const existing = node.widgets?.find((widget) => widget.name === RESULT_WIDGET);
  if (existing) return existing;
  const content = element("div");
  const box = element("div", { className: "int8-result" }, [content]);
  const widget = node.addDOMWidget(RESULT_WIDGET, RESULT_WIDGET, box, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => widget.resultHeight ?? 0,
  });
  // The option keeps the result out of the prompt; this keeps it out of the saved workflow.
  widget.serialize = false;
  Object.assign(widget, { box, content });
  // A node outside the viewport has no layout, so its result is measured whenever it gets one.
  new ResizeObserver(() => fitNode(node, widget)).observe(content);
  return widget;
}

export const greyResult = (node) =>
  node.widgets?.find(({ name }) => name === RESULT_WIDGET)?.box.classList.add("int8-result-old");

/** Grow the node where its result has more lines than it kept free; what the user made larger stays so. A result can
 * be measured before it has its width, and then again: the height before the first of these growths counts. */
function fitNode(node, widget) {
  const height = widget.content.offsetHeight; // a layout size: the canvas zoom is a transform and does not count
  if (height === 0) return;
  if (node.size[1] !== widget.grownTo) widget.grownFrom = node.size[1];
  // The frontend takes the widget's margin out of the height that it is given.
  widget.resultHeight = Math.min(height, MAX_RESULT_HEIGHT) + 2 * widget.margin;
  node.setSize([node.size[0], Math.max(widget.grownFrom, node.computeSize()[1])]);
  widget.grownTo = node.size[1];
  node.setDirtyCanvas(true, true);
}

/** The height that a node needs without a result, and what it keeps free for one. */
export function heightOf(node) {
  const hasResult = node.widgets?.some((widget) => widget.name === RESULT_WIDGET);
  return node.computeSize()[1] + (hasResult ? 0 : (ROOM[node.comfyClass] ?? 0));
}

/** Show the results of a run: of one that has just ended, or, with its time `ranAt`, of one that a page showed before. */
function show(node, output, ranAt) {
  const shown = Object.entries(RESULTS).filter(([key]) => output[key]?.length);
  if (shown.length === 0) return;
  const widget = resultWidget(node);
  const { box, content } = widget;
  widget.isFailure = FAILURE in output;
  const age = ranAt === undefined ? [] : [ageLine(ranAt)];
  const details = () => [...age, ...shown.flatMap(([key, { details: draw }]) => draw(output[key], node))];
  const heading = shown.map(([key, { help }]) => help?.(output[key], node)).find(Boolean);
  const texts = shown.map(([key, { copied }]) => copied?.(output[key])).filter(Boolean);
  const buttons = [
    ...(widget.isFailure ? [] : [linkTo("int8-more", "Details", () => openDetails(node.title, details()))]),
    ...texts.map(copyButton),
    ...(heading ? [linkTo("int8-help", "More", () => openHelp(node, heading))] : []),
  ];
  const parts = shown.flatMap(([key, { line }]) => line(output[key]));
  const row = parts.filter((part) => part.matches(".int8-badge"));
  const others = parts.filter((part) => !row.includes(part));
  const rows = [element("div", { className: "int8-row" }, [...row, ...buttons])];
  box.classList.toggle("int8-result-old", ranAt !== undefined);
  box.title = age.map((line) => line.textContent).join();
  if (!widget.isFailure) content.replaceChildren(...others, ...rows);
  else content.replaceChildren(element("section", ranAt ? {} : { role: "alert" }, [...rows, ...others]));
}

function linkTo(className, words, act) {
  const made = element("button", { className, type: "button", text: translated(words) });
  made.onclick = act;
  return made;
}

function copyButton(text) {
  const made = linkTo("int8-copy", "Copy JSON", async () => {
    made.textContent = translated((await copy(text)) ? "Copied" : "Not copied: see Details");
    setTimeout(() => (made.textContent = translated("Copy JSON")), SAID_MS);
  });
  made.setAttribute("aria-live", "polite");
  return made;
}

/** Show in place of an earlier result what went wrong, and keep it for a reload of the page. */
export function showFailure(node, words, sentences) {
  const output = { [FAILURE]: [{ words, sentences }] };
  show(node, output);
  remember(node, output);
}

/** A failure is over when the node runs again: it has no widget and nothing to come back, which true says. */
export function endFailure(node) {
  const place = node.widgets?.findIndex(({ name, isFailure }) => name === RESULT_WIDGET && isFailure) ?? -1;
  if (place < 0) return false;
  removeWidget(node, place);
  forget(node);
  return true;
}

export function removeWidget(node, place) {
  node.widgets[place].onRemove?.();
  node.widgets.splice(place, 1);
  node.setDirtyCanvas(true, true);
}

/** Show a node's details above the graph, at a size that the zoom does not change. */
function openDetails(title, details) {
  const close = element("button", { className: "int8-details-close", text: "✕", "aria-label": translated("Close") });
  const heading = element("p", { className: "int8-headline", text: title });
  const dialog = element("dialog", { className: "int8-details" }, [close, heading, ...details]);
  close.onclick = () => dialog.remove();
  dialog.onclick = ({ target }) => target !== dialog || dialog.remove(); // beside it
  dialog.oncancel = () => dialog.remove();
  dialog.onkeydown = ({ key }) => key !== "Escape" || dialog.remove();
  document.body.append(dialog);
  dialog.showModal();
}

function ageLine(ranAt) {
  const time = new Date(ranAt).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  return element("p", { className: "int8-result-age", text: translated(`Last run in this browser: ${time}`) });
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
