// Making and changing elements. Text goes in as text, whatever an engine sent.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  if (properties.role) element.setAttribute("role", properties.role);
  element.append(...children);
  return element;
}

/** Change words only if they are others: selections and readers stay where they are. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function fill(element, children) {
  element.replaceChildren(...children);
}
