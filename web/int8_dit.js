// The pack's part of the frontend: what nodes show of their runs, the server's warnings, the names of nested widgets.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { element, STYLE } from "./elements.js";
import { fitWords, labelChoices, labelGrown } from "./labels.js";
import { menuOf } from "./menus.js";
import { followRenderer, hideRareWidgets } from "./more_settings.js";
import { heightOf, showLastResults, showNewResults, showsResults } from "./results.js";
import { listSavedFiles } from "./saved_files.js";
import { loadTranslations, translateOptions } from "./translations.js";
import { SETTINGS, showWarning, WARNING_EVENT } from "./warnings.js";

// What ComfyUI calls the pack: by its folder.
const MODULE = `custom_nodes.${decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-2))}`;

app.registerExtension({
  name: "int8_dit",
  settings: SETTINGS,

  init: loadTranslations,

  setup() {
    document.head.append(element("style", { text: STYLE }));
    api.addEventListener(WARNING_EVENT, ({ detail }) => showWarning(detail));
    listSavedFiles();
    followRenderer();
  },

  getNodeMenuItems: menuOf,

  nodeCreated(node) {
    if (node.constructor.nodeData?.python_module === MODULE) {
      translateOptions(node);
      labelGrown(node);
      fitWords(node);
      hideRareWidgets(node);
      node.setSize([node.size[0], heightOf(node)]);
    }
    if (node.comfyClass === "QuantizeToINT8SmoothQuant") labelChoices(node);
    if (showsResults(node)) showNewResults(node);
  },

  loadedGraphNode(node) {
    if (showsResults(node)) showLastResults(node);
  },
});
