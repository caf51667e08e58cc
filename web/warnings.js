// The server's warnings: each reason once a session, with a setting that silences it for good.
//
// The frontend's own toasts take text alone, no button: these are elements of the pack's own.

import { app } from "../../scripts/app.js";
import { element } from "./elements.js";
import { nodeOfWarning, openHelp, PARAGRAPHS } from "./help.js";
import { openBenchmark } from "./menus.js";
import { nodeOf } from "./pack_nodes.js";
import { translated } from "./translations.js";

export const WARNING_EVENT = "int8_dit.warning";

// By the reason that nodes/host/notices.py sends: what the setting is called.
const REASONS = {
  "bf16": "A model runs in bf16 instead of INT8",
  "not-applied": "The fused kernel is not applied to a model",
  "uncalibrated": "A model is quantized without calibration",
  "folded-lora": "A LoRA or a merge meets a file that was saved with fold",
  "fold-incomplete": "A folded file needs this pack all the same",
  "attention": "INT8 attention did not run",
  "gguf-architecture": "A saved GGUF file may be refused by ComfyUI-GGUF",
  "gguf-lora": "A saved GGUF file may have lost a LoRA",
  "triton": "Triton is missing, or another one than PyTorch's",
  "unfused": "A model runs without the fusion between its linears",
};
const LIFE_MS = 20000;
const SEEN = "int8_dit.seen_warnings"; // in the session's storage, which a reload of the page keeps

const settingOf = (reason) => `INT8DiT.Warnings.${reason}`;

export const SETTINGS = Object.entries(REASONS).map(([reason, name]) => ({
  id: settingOf(reason),
  name,
  category: ["INT8 DiT", "Warnings", reason],
  tooltip: "Shown once a session. The server's log has every warning.",
  type: "boolean",
  defaultValue: true,
  onChange: (on, before) => on && before === false && setSeen(reason, false),
}));

function seen() {
  try {
    return JSON.parse(sessionStorage.getItem(SEEN)) ?? [];
  } catch {
    return [];
  }
}

function setSeen(reason, isSeen) {
  const others = seen().filter((other) => other !== reason);
  sessionStorage.setItem(SEEN, JSON.stringify(isSeen ? [...others, reason] : others));
}

export function showWarning({ reason, summary, detail, node }) {
  if (seen().includes(reason) || app.extensionManager.setting.get(settingOf(reason)) === false) return;
  setSeen(reason, true);
  const title = node && nodeOf(node)?.title;
  const where = node ? [element("p", { className: "int8-warning-node", text: `${title ?? translated("Node")} (#${node})` })] : [];
  const close = element("button", { className: "int8-warning-close", text: "✕", "aria-label": translated("Close") });
  const mute = element("button", {
    className: "int8-warning-mute",
    text: translated("Don't show again"),
    title: translated("Settings › INT8 DiT › Warnings turns it on again."),
  });
  const warning = element("div", { className: "int8-warning", role: "alert", "data-severity": "warn" }, [
    close,
    element("h4", { text: translated(summary) }),
    ...where,
    element("p", { text: translated(detail) }),
    ...actions(reason, node && nodeOf(node)),
    ...(reason in REASONS ? [mute] : []),
  ]);
  close.onclick = () => warning.remove();
  mute.onclick = () => {
    app.extensionManager.setting.set(settingOf(reason), false);
    warning.remove();
  };
  goLater(warning);
  stack().append(warning);
}

/** What a warning leads to: the paragraph of the help page, and the benchmark that decides what `auto` runs. */
function actions(reason, node) {
  const about = nodeOfWarning(reason, node);
  if (!about) return [];
  const button = (words, act) => {
    const made = element("button", { text: translated(words) });
    made.onclick = act;
    return made;
  };
  return [
    button("More", () => openHelp(about, PARAGRAPHS[reason]?.[about.type])),
    ...(reason === "bf16" ? [button("Open Kernel Benchmark", () => openBenchmark(about))] : []),
  ];
}

/** Remove a warning some time after nobody points at it any more. */
function goLater(warning) {
  let timer;
  warning.onmouseenter = () => clearTimeout(timer);
  warning.onmouseleave = () => (timer = setTimeout(() => warning.remove(), LIFE_MS));
  warning.onmouseleave();
}

function stack() {
  const existing = document.querySelector(".int8-warnings");
  if (existing) return existing;
  const made = element("div", { className: "int8-warnings" });
  document.body.append(made);
  return made;
}
