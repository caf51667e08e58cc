// A file that a node has just saved is in the lists of the loaders at once, with no reload of the page.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const MODEL_FILE = /\.(safetensors|gguf)$/;

/** Read what the nodes offer again when one has saved a model or a calibration. */
export function listSavedFiles() {
  api.addEventListener("executed", ({ detail }) => {
    if (detail.output?.saved?.some(({ filename }) => MODEL_FILE.test(filename))) app.reloadNodeDefs();
  });
}
