// Elements without a framework. Text is always text: nothing here parses HTML.

/** An element: h("p", { class: "lead", onclick: f, style: { "--c": "red" } }, "text", child, null). */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== "") element.append(child);
  }
}

/** Replaces what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

/** Buttons of which one is chosen. */
export function segmented(label, options, chosen, choose) {
  const group = h("div", { class: "segmented", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    const button = h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      choose(value);
    } }, text);
    group.append(button);
  }
  return group;
}

/** Copies text and says so on the button for a moment. */
export async function copyFrom(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = h("textarea", { value: text, class: "offscreen" });
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    area.remove();
  }
  setTimeout(() => { button.textContent = before; }, 1400);
}
