// Texts into the clipboard.

import { element } from "./elements.js";

/** Copy a text; whether the browser let it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

/** The old way: a page that comes over http from another machine has no navigator.clipboard. */
function copySelected(text) {
  const field = element("textarea", { style: "position: fixed; opacity: 0" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
