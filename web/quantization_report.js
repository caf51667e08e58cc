// The report of a quantization as an element: a small chart per kind of layer, in the frontend's own colours.

import { element } from "./elements.js";
import { translated } from "./translations.js";

const SVG = "http://www.w3.org/2000/svg";
// Of one chart, in units of which it is WIDTH wide at whatever size it is shown.
const [WIDTH, LEFT, RIGHT, TOP, HEIGHT, FLOOR, FOOT] = [440, 46, 6, 6, 56, 6, 14];
const NUMBER_WIDTH = 20; // a block's number and a gap
// A mark by what the layer is held in: its name in the legend, its class and its shape around 0, 0.
const CIRCLE = "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0Z";
const BEFORE = { className: "before", shape: CIRCLE }; // its name is the report's
const AS_QUANTIZED = { name: "as quantized", className: "after", shape: CIRCLE };
const NEVER = { name: "never called", className: "never", shape: "M-3-3L3 3M-3 3L3-3" };
const PROTECTED = {
  INT8: { name: "8-bit weights", className: "protected", shape: CIRCLE },
  "INT8 with 16-bit activations": { name: "16-bit activations", className: "protected", shape: "M0-4L4 0L0 4L-4 0Z" },
  bf16: { name: "kept in bf16", className: "protected", shape: "M-3-3H3V3H-3Z" },
};

const STYLE = `
.int8-report { min-width: 380px; max-width: 720px; }
.int8-report .legend { display: flex; flex-wrap: wrap; gap: 2px 12px; margin: 6px 0; font-size: 11px; }
.int8-report .legend svg { width: 8px; height: 8px; margin-right: 4px; overflow: visible; }
.int8-report .kind { display: flex; gap: 12px; justify-content: space-between; margin-top: 4px; font-size: 11px; }
.int8-report .kind span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.int8-report .kind span + span { flex: none; color: var(--descrip-text); }
.int8-report .blocks { margin-bottom: 8px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  text-align: center; color: var(--descrip-text); font-size: 11px; }
.int8-report .chart { display: block; width: 100%; overflow: visible; font-size: 10px; fill: var(--descrip-text); }
.int8-report .grid, .int8-report .axis { stroke: var(--descrip-text); stroke-width: 0.6; }
.int8-report .grid { opacity: 0.35; }
.int8-report .before { fill: var(--descrip-text); stroke: var(--descrip-text); }
.int8-report { --int8-after: color-mix(in srgb, #3b82f6 75%, var(--input-text));
  --int8-protected: color-mix(in srgb, #e5484d 80%, var(--input-text)); }
.int8-report .after { fill: var(--int8-after); stroke: var(--int8-after); }
.int8-report .protected { fill: var(--int8-protected); stroke: var(--int8-protected); }
.int8-report .never { stroke: var(--descrip-text); }
`;
document.head.append(element("style", { text: STYLE }));

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const percent = (error) => `${(100 * error).toFixed(2)} %`;

function kindOfMark(mark) {
  if (mark.before === null) return NEVER;
  const isProtected = mark.protected ?? mark.held_in !== "INT8"; // results of an earlier version do not say
  return isProtected ? PROTECTED[mark.held_in] : AS_QUANTIZED;
}

function described(mark) {
  if (mark.before === null) return `${mark.layer}: ${translated(NEVER.name)}`;
  return `${mark.layer}: ${percent(mark.before)} → ${percent(mark.after)}, ${translated(mark.held_in)}`;
}

/** Which of the numbers first..last are written: as many as have room. */
function writtenNumbers(first, last) {
  const room = (WIDTH - LEFT - RIGHT) / (last - first + 1);
  let step = 1;
  for (let digit = 0; step * room < NUMBER_WIDTH; digit++) step = [1, 2, 5][digit % 3] * 10 ** Math.floor(digit / 3);
  const numbers = Array.from({ length: last - first + 1 }, (_, index) => first + index);
  return numbers.filter((number) => number % step === 0);
}

/** The chart of one kind; `numbers` are those of all its blocks, which are written under it where it has a `foot`. */
function chart({ low, high, ticks }, panel, numbers, foot) {
  const [first, last] = [Math.min(...numbers), Math.max(...numbers)];
  const x = (block) => LEFT + (((block ?? first) - first + 0.5) / (last - first + 1)) * (WIDTH - LEFT - RIGHT);
  const y = (error) => TOP + HEIGHT * (1 - Math.log(Math.max(error, low) / low) / Math.log(high / low));
  const bottom = TOP + HEIGHT + FLOOR;
  const drawn = ticks.flatMap((tick) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
    svg("text", { x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end" }, `${+(100 * tick).toPrecision(2)} %`),
  ]);
  drawn.push(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom }));
  for (const mark of panel.marks) {
    const kind = kindOfMark(mark);
    const at = (error, { className, shape }) =>
      svg("path", { class: className, d: shape, transform: `translate(${x(mark.block)} ${y(error ?? 0)})` });
    const parts = [at(mark.after, kind)];
    if (mark.before !== null) {
      const line = { x1: x(mark.block), x2: x(mark.block), y1: y(mark.before), y2: y(mark.after) };
      const color = kind.className === "protected" ? kind.className : BEFORE.className;
      parts.unshift(svg("line", { class: color, ...line }), at(mark.before, BEFORE));
    }
    drawn.push(svg("g", { class: "mark" }, svg("title", {}, described(mark)), ...parts));
  }
  if (foot) {
    for (const number of writtenNumbers(first, last)) {
      drawn.push(svg("text", { class: "number", x: x(number), y: bottom + 12, "text-anchor": "middle" }, `${number}`));
    }
  }
  const height = bottom + (foot ? FOOT : 2);
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}` }, ...drawn);
}

function legend({ panels, plain = "plain INT8" }) {
  const found = new Set(panels.flatMap((panel) => panel.marks.map(kindOfMark)));
  const entries = [AS_QUANTIZED, ...Object.values(PROTECTED), NEVER].filter((kind) => found.has(kind));
  entries.unshift({ ...BEFORE, name: plain });
  const drawn = entries.map(({ name, className, shape }) =>
    element("span", {}, [svg("svg", { class: className, viewBox: "-4 -4 8 8" }, svg("path", { d: shape })), translated(name)]),
  );
  return element("div", { className: "legend" }, drawn);
}

/** The report as a section; `report` is what QuantizationReport.chart of nodes/quantization/report.py returns. */
export function quantizationSection(report) {
  const { title, summary, panels } = report;
  const drawn = panels.flatMap((panel, index) => {
    const same = panels.filter(({ blocks }) => blocks && blocks === panel.blocks);
    const numbers = same.length ? same.flatMap(({ marks }) => marks.map(({ block }) => block)) : [0];
    const foot = panel.blocks !== "" && panels[index + 1]?.blocks !== panel.blocks;
    const means = panel.before === null ? "" : `${percent(panel.before)} → ${percent(panel.after)}`;
    const heading = [element("span", { text: panel.kind, title: panel.kind }), element("span", { text: means })];
    const parts = [element("div", { className: "kind" }, heading), chart(report, panel, numbers, foot)];
    const below = translated(`number of the block in ${panel.blocks}`);
    return foot ? [...parts, element("div", { className: "blocks", text: below })] : parts;
  });
  const words = [element("h4", { text: translated(title) }), element("p", { text: translated(summary) })];
  return element("section", { className: "int8-report" }, [...words, legend(report), ...drawn]);
}
