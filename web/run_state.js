// What a run leaves on the pack's nodes besides results: a failure in red, an interruption, what is no longer new.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { badge, element } from "./elements.js";
import { isPackNode, nodeOf } from "./pack_nodes.js";
import { RESULT_WIDGET, resultWidget } from "./results.js";
import { namesOfInput, translated } from "./translations.js";

const PROGRESS_TEXT = "$$node-text-preview"; // the frontend's line of text on a node that runs
const MOST_RUNS = 100; // remembered, the oldest go first
const FAILED = Symbol("a failure is shown");

// What ComfyUI refuses before anything runs, by the type of its error, as a sentence with what to do.
const REFUSALS = {
  required_input_missing: (input) => `${input} is not connected: connect it`,
  value_not_in_list: (input, { received_value: value }) =>
    /\.\w+$/.test(value)
      ? `there is no file ${value} for ${input}: choose another, or put it into its folder and press R`
      : `${input} cannot be ${value}: choose another`,
  custom_validation_failed: (_input, _info, details) => details.replace(/^\S+ - /, ""), // behind an input's id
};

// How a run can end without a result, and how bad that is.
const ENDS = { "failed": "error", "not run": "error", "interrupted": "warn" };

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
    showFailure(nodeOf(node_id), node_type, "failed", exception_message);
  });
  on("execution_interrupted", ({ prompt_id, node_id, node_type }) => {
    const run = runs.get(prompt_id); // every browser hears of it
    nodesOf(run).forEach(greyed);
    if (run) showFailure(run.graph === graphId() && nodeOf(node_id), node_type, "interrupted", "Queue it again for a result");
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
    showFailure(nodeOf(id), class_type, "not run", ...new Set(sentences));
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
  const widget = node.widgets?.find(({ name }) => name === RESULT_WIDGET);
  if (widget?.[FAILED]) remove(node, RESULT_WIDGET);
  else widget?.box.classList.add("int8-result-old");
}

function withoutProgress(node) {
  if (node && isPackNode(node)) remove(node, PROGRESS_TEXT);
}

function remove(node, name) {
  const place = node.widgets?.findIndex((widget) => widget.name === name) ?? -1;
  if (place < 0) return;
  node.widgets[place].onRemove?.();
  node.widgets.splice(place, 1);
  node.setDirtyCanvas(true, true);
}

/** Put what went wrong in place of an earlier result. */
function showFailure(node, type, words, ...sentences) {
  if (!node || node.comfyClass !== type || !isPackNode(node)) return;
  withoutProgress(node);
  const widget = resultWidget(node);
  widget[FAILED] = true;
  widget.box.classList.remove("int8-result-old");
  widget.box.title = "";
  const className = `int8-${ENDS[words]}`;
  const lines = sentences.map((text) => element("p", { className, text: sentence(translated(text.trim())) }));
  const section = element("section", { role: "alert" }, [badge(ENDS[words], translated(words)), ...lines]);
  widget.content.replaceChildren(section);
}

/** A text with a capital at its beginning, unless that is a file's name or an id. */
const sentence = (text) => text.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase());
