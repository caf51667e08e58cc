// The names of widgets below a widget that chooses among them: a frontend that ignores their display_name shows the id
// of the input, which two choices may share.

/** Show the display names that the node's definition gives to the inputs of its choices. */
export function labelChoices(node) {
  const { required, optional } = node.constructor.nodeData?.input ?? {};
  for (const [name, [type, options]] of Object.entries({ ...required, ...optional })) {
    if (type !== "COMFY_DYNAMICCOMBO_V3") continue;
    const label = () => labelChosen(node, name, options.options);
    // The frontend makes the widgets anew when the choice changes, and names them after it has added them.
    const inherited = node.addCustomWidget;
    node.addCustomWidget = function (widget) {
      if (widget.name.startsWith(`${name}.`)) queueMicrotask(label);
      return inherited.apply(this, arguments);
    };
    label();
  }
}

function labelChosen(node, name, choices) {
  const chosen = node.widgets?.find((widget) => widget.name === name)?.value;
  const { required, optional } = choices.find(({ key }) => key === chosen)?.inputs ?? {};
  for (const [id, [, { display_name } = {}]] of Object.entries({ ...required, ...optional })) {
    const widget = node.widgets.find((other) => other.name === `${name}.${id}`);
    const input = node.inputs?.find((other) => other.name === `${name}.${id}`);
    // A translation of the user's language stays.
    if (display_name && widget?.label === id) widget.label = display_name;
    if (display_name && input?.label === id) input.label = display_name;
  }
}
