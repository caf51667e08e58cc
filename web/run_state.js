// What a run leaves on the pack's nodes besides results: a failure in red, an interruption, what is no longer new.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { isPackNode, nodeOf } from "./pack_nodes.js";
import { endFailure, greyResult, removeWidget, showFailure } from "./results.js";
import { namesOfInput } from "./translations.js";

const PROGRESS_TEXT = "$$node-text-preview"; // the frontend's line of text on a node that runs
const MOST_RUNS = 100; // remembered, the oldest go first

// What ComfyUI refuses before anything runs, by the type of its error, as a sentence with what to do.
const REFUSALS = {
  required_input_missing: (input) => `${input} is not connected: connect it`,
  value_not_in_list: (input, { received_value: value }) =>
    /\.\w+$/.test(value)
      ? `there is no file ${value} for ${input}: choose another, or put it into its folder and press R`
      : `${input} cannot be ${value}: choose another`,
  custom_validation_failed: (_input, _info, details) => details.replace(/^\S+ - /, ""), // behind an input's id
};

const runs = new Map(); // by prompt id: the graph that was queued, and the types of its nodes by id
let latest;

/** Show on the pack's nodes how runs go. */
export function followRuns() {
  followQueue();
  const on = (event, act) => api.addEventListener(event, ({ detail }) => act(detail));
  // The server can start a prompt before it has answered who queued it.
  on("execution_start", ({ prompt_id }) => nodesOf(runs.get(prompt_id) ?? latest).forEach(greyed));
  on("executed", ({ node, display_node }) => withoutProgress(nodeOf(display_node ?? node)));
  on("execution_error", ({ prompt_id, node_id, node_type, exception_message }) => {
    nodesOf(runs.get(prompt_id)).forEach(greyed);
    fail(nodeOf(node_id), node_type, "failed", exception_message);
  });
  on("execution_interrupted", ({ prompt_id, node_id, node_type }) => {
    const run = runs.get(prompt_id); // every browser hears of it
    nodesOf(run).forEach(greyed);
    if (run) fail(run.graph === graphId() && nodeOf(node_id), node_type, "interrupted", "Queue it again for a result");
  });
}

const graphId = () => (app.rootGraph ?? app.graph).id;

/** Remember what is queued, and show what the server refuses of it. */
function followQueue() {
  const inherited = api.queuePrompt;
  api.queuePrompt = async function (number, prompt) {
    const types = Object.entries(prompt.output).map(([id, { class_type }]) => [id, class_type]);
    const run = (latest = { graph: graphId(), types });
    try {
      const answer = await inherited.apply(this, arguments);
      runs.set(answer.prompt_id, run);
      if (runs.size > MOST_RUNS) runs.delete(runs.keys().next().value);
      showRefusals(run, answer.node_errors);
      return answer;
    } catch (error) {
      showRefusals(run, error.response?.node_errors);
      throw error;
    }
  };
}

function showRefusals({ graph }, errors) {
  if (graph !== graphId()) return;
  for (const [id, { class_type, errors: found }] of Object.entries(errors ?? {})) {
    const sentences = found.map(({ type, message, details, extra_info: info = {} }) => {
      const input = namesOfInput(class_type, info.input_name)[0] ?? info.input_name;
      return REFUSALS[type]?.(input, info, details) ?? `${message}: ${details}`;
    });
    fail(nodeOf(id), class_type, "not run", ...new Set(sentences));
  }
}

/** The nodes of the pack in a run, where the page still shows its graph. */
function nodesOf(run) {
  if (run?.graph !== graphId()) return [];
  return run.types.flatMap(([id, type]) => nodeOf(id) ?? []).filter(isPackNode);
}

/** What is on a node is of an earlier run; a failure is over. */
function greyed(node) {
  withoutProgress(node);
  if (!endFailure(node)) greyResult(node);
}

function withoutProgress(node) {
  if (!node || !isPackNode(node)) return;
  const place = node.widgets?.findIndex(({ name }) => name === PROGRESS_TEXT) ?? -1;
  if (place >= 0) removeWidget(node, place);
}

/** Put what went wrong in place of an earlier result. */
function fail(node, type, words, ...sentences) {
  if (!node || node.comfyClass !== type || !isPackNode(node)) return;
  withoutProgress(node);
  showFailure(node, words, sentences.map((text) => text.trim()));
}
