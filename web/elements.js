// How the pack's own elements are made and styled.

export function element(tag, { className, text, ...attributes } = {}, children = []) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A line that must be seen: a coloured dot and a few words. `severity` is good, note, warn or error. */
export function badge(severity, text) {
  return element("strong", { className: "int8-badge", "data-severity": severity, text });
}

export const BOX_PADDING = 12; // above and below together
export const MAX_RESULT_HEIGHT = 480; // more is scrolled

// The colours are the frontend's own variables, so everything follows the user's theme.
export const STYLE = `
[data-severity] { --int8-hue: #8a8f98; }
[data-severity=good] { --int8-hue: #2ea04f; }
[data-severity=warn] { --int8-hue: #d98e1f; }
[data-severity=error] { --int8-hue: #e5484d; }
.int8-result-old [data-severity] { --int8-hue: #8a8f98; }

.int8-badge { display: block; width: fit-content; max-width: 100%; box-sizing: border-box; padding: 2px 8px;
  border-radius: 6px; font-size: 12px; font-weight: 600; color: var(--input-text);
  background: color-mix(in srgb, var(--int8-hue) 28%, transparent); }
.int8-badge::before { content: ""; display: inline-block; width: 8px; height: 8px; margin-right: 6px;
  border-radius: 50%; background: var(--int8-hue); }

.int8-result { box-sizing: border-box; overflow: auto; max-height: ${MAX_RESULT_HEIGHT}px; padding: ${BOX_PADDING / 2}px 8px; border-radius: 6px;
  background: var(--comfy-input-bg); color: var(--input-text); font: 12px/1.4 sans-serif; user-select: text; }
.int8-result-content { width: fit-content; min-width: 100%; }
.int8-result section + section { margin-top: 8px; }
.int8-result h4 { margin: 0 0 4px; font-size: 12px; font-weight: 600; }
.int8-result table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.int8-result th, .int8-result td { padding: 2px 8px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--border-color); }
.int8-result th { color: var(--descrip-text); font-weight: 500; vertical-align: bottom; white-space: normal; }
.int8-result th:first-child, .int8-result td:first-child { padding-left: 0; text-align: left; }
.int8-result th:last-child, .int8-result td:last-child { padding-right: 0; }
.int8-result p { margin: 4px 0 0; color: var(--descrip-text); font-size: 11px; overflow-wrap: anywhere; }
.int8-result .int8-summary { margin: 4px 0; padding: 4px 8px; border-left: 3px solid var(--int8-hue);
  background: color-mix(in srgb, var(--int8-hue) 14%, transparent); color: var(--input-text); font-size: 12px; }
.int8-result a { display: inline-block; margin-top: 6px; color: var(--input-text); text-decoration: underline; }
.int8-result .int8-result-age { margin: 0 0 4px; font-style: italic; }
.int8-result-old :is(.int8-badge, .int8-summary) { color: var(--descrip-text); }
.int8-result .int8-error { color: color-mix(in srgb, #e5484d 45%, var(--input-text)); font-size: 12px; }

.int8-warnings { position: fixed; left: 50%; bottom: 16px; transform: translateX(-50%); z-index: 3000;
  width: min(440px, calc(100vw - 32px)); display: flex; flex-direction: column; gap: 8px; }
.int8-warning { box-sizing: border-box; padding: 10px 12px; border-radius: 8px; border: 1px solid var(--border-color);
  border-left: 4px solid var(--int8-hue); background: var(--comfy-menu-bg); color: var(--fg-color);
  font: 13px/1.4 sans-serif; box-shadow: 0 4px 16px rgb(0 0 0 / 35%); user-select: text; overflow-wrap: anywhere; }
.int8-warning h4 { margin: 0 24px 4px 0; font-size: 13px; font-weight: 600; }
.int8-warning p { margin: 0 0 6px; }
.int8-warning p:last-of-type::first-letter { text-transform: uppercase; }
.int8-warning p.int8-warning-node { color: var(--descrip-text); }
.int8-warning button { padding: 3px 8px; border: 1px solid var(--border-color); border-radius: 4px;
  background: var(--comfy-input-bg); color: var(--input-text); font: inherit; cursor: pointer; }
.int8-warning button:hover { border-color: var(--int8-hue); }
.int8-warning .int8-warning-close { float: right; border: none; background: none; }
`;
