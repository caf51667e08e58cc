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

export const MAX_RESULT_HEIGHT = 240; // more is scrolled

// The colours are the frontend's own variables, so everything follows the user's theme.
export const STYLE = `
[data-severity] { --int8-hue: #8a8f98; }
[data-severity=good] { --int8-hue: #2ea04f; }
[data-severity=warn] { --int8-hue: #d98e1f; }
[data-severity=error] { --int8-hue: #e5484d; }
.int8-result-old [data-severity] { --int8-hue: #8a8f98; }

.int8-badge { width: fit-content; max-width: 100%; box-sizing: border-box; padding: 2px 8px;
  border-radius: 6px; font-size: 12px; font-weight: 600; color: var(--input-text);
  background: color-mix(in srgb, var(--int8-hue) 28%, transparent); }
.int8-badge::before { content: ""; display: inline-block; width: 8px; height: 8px; margin-right: 6px;
  border-radius: 50%; background: var(--int8-hue); }

.int8-result { box-sizing: border-box; overflow: auto; max-height: ${MAX_RESULT_HEIGHT}px; color: var(--input-text);
  font: 12px/1.4 sans-serif; user-select: text; overflow-wrap: anywhere; }
.int8-headline { margin: 0 0 4px; color: var(--input-text); font-size: 16px; font-weight: 600; line-height: 1.25; }
.int8-row { display: flex; flex-wrap: wrap; gap: 4px 6px; align-items: center; }
.int8-row > .int8-badge { max-width: calc(100% - 60px); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
:is(.int8-more, .int8-help, .int8-copy) { padding: 0 2px; border: none; background: none; color: var(--input-text); font: inherit;
  text-decoration: underline; cursor: pointer; }
.int8-bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 2px 6px; align-items: center;
  margin: 0 0 6px; font-variant-numeric: tabular-nums; }
.int8-bar { height: 10px; border-radius: 2px; background: var(--descrip-text); }
.int8-bar[data-ours=true] { background: #2f6fd0; }
.int8-result.int8-result-old .int8-error, .int8-result-old :is(.int8-badge, .int8-headline) { color: var(--descrip-text); }
.int8-result .int8-error { margin: 4px 0 0; color: color-mix(in srgb, #e5484d 45%, var(--input-text)); }

.int8-details { box-sizing: border-box; max-width: min(900px, 92vw); max-height: 86vh; margin: auto; overflow: auto;
  padding: 14px 18px; border: 1px solid var(--border-color); border-radius: 8px; background: var(--comfy-menu-bg);
  color: var(--input-text); font: 13px/1.45 sans-serif; user-select: text; }
.int8-details::backdrop { background: rgb(0 0 0 / 45%); }
.int8-details-close { float: right; border: none; background: none; color: inherit; font: inherit; cursor: pointer; }
.int8-details section { margin-top: 12px; }
.int8-details h4 { margin: 0 0 4px; font-size: 13px; font-weight: 600; }
.int8-details table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.int8-details th, .int8-details td { padding: 2px 8px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--border-color); }
.int8-details th { color: var(--descrip-text); font-weight: 500; vertical-align: bottom; white-space: normal; }
.int8-details th:first-child, .int8-details td:first-child { padding-left: 0; text-align: left; }
.int8-details th:last-child, .int8-details td:last-child { padding-right: 0; }
.int8-details p { margin: 4px 0 0; overflow-wrap: anywhere; }
.int8-details .int8-summary { margin: 4px 0; padding: 4px 8px; border-left: 3px solid var(--int8-hue);
  background: color-mix(in srgb, var(--int8-hue) 14%, transparent); }
.int8-pair { display: grid; width: fit-content; max-width: 100%; margin: 0 auto; }
.int8-pair img { grid-area: 1 / 1; max-width: 100%; max-height: 56vh; }
.int8-pair-names { display: flex; gap: 8px; align-items: center; }
.int8-pair-names input { flex: 1; }
.int8-details a { display: inline-block; margin-top: 6px; color: var(--input-text); text-decoration: underline; }

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
