// The pack's part of the frontend: what nodes show of their runs, the server's warnings, the names of nested widgets.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { element, STYLE } from "./elements.js";
import { fitWords, labelChoices, labelGrown } from "./labels.js";
import { menuOf } from "./menus.js";
import { followRenderer, hideRareWidgets } from "./more_settings.js";
import { isPackNode } from "./pack_nodes.js";
import { heightOf, showLastResults, showNewResults, showsResults } from "./results.js";
import { followRuns } from "./run_state.js";
import { listSavedFiles } from "./saved_files.js";
import { loadTranslations, translateOptions } from "./translations.js";
import { SETTINGS, showWarning, WARNING_EVENT } from "./warnings.js";

app.registerExtension({
  name: "int8_dit",
  settings: SETTINGS,

  init: loadTranslations,

  setup() {
    document.head.append(element("style", { text: STYLE }));
    api.addEventListener(WARNING_EVENT, ({ detail }) => showWarning(detail));
    listSavedFiles();
    followRenderer();
    followRuns();
  },

  getNodeMenuItems: menuOf,

  nodeCreated(node) {
    if (isPackNode(node)) {
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
    if (isPackNode(node)) showLastResults(node);
  },
});
