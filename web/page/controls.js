// Sliders, choices and numbers that are bound to settings.
import { h } from "./dom.js";

let serial = 0;

/**
 * A slider. @param {any} app
 * @param {{ name: string, label: string, min: number, max: number, step: number, text?: (x: number) => string, hint?: string }} about
 */
export function slider(app, about) {
  const id = `slider-${about.name}-${(serial += 1)}`;
  const output = h("output", { htmlFor: id });
  const input = h("input", {
    type: "range", id, min: about.min, max: about.max, step: about.step, title: about.hint ?? "",
    oninput: () => app.set({ [about.name]: Number(input.value) }),
  });
  const show = () => {
    const value = app.settings[about.name];
    input.value = String(value);
    output.textContent = about.text ? about.text(value) : String(value);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  app.bind(about.name, show);
  return h("div", { className: "control", "data-setting": about.name }, h("label", { htmlFor: id }, about.label, output), input);
}

/** A list to choose from. @param {any} app @param {{ name: string, label: string, options: [any, string][], wide?: boolean }} about */
export function list(app, about) {
  const id = `list-${about.name}-${(serial += 1)}`;
  const select = h("select", {
    id,
    onchange: () => {
      const value = typeof app.settings[about.name] === "number" ? Number(select.value) : select.value;
      app.set({ [about.name]: value });
    },
  });
  const fill = (options) => {
    select.replaceChildren(...options.map(([value, text]) => h("option", { value: String(value) }, text)));
    select.value = String(app.settings[about.name]);
  };
  fill(about.options);
  app.bind(about.name, () => (select.value = String(app.settings[about.name])));
  const className = `control${about.wide ? " long" : ""}`;
  const element = h("div", { className, "data-setting": about.name }, h("label", { htmlFor: id }, about.label), select);
  return Object.assign(element, { fill });
}

/** A number. @param {any} app @param {{ name: string, label: string, min: number, max: number }} about */
export function number(app, about) {
  const id = `number-${about.name}-${(serial += 1)}`;
  const input = h("input", {
    type: "number", id, min: about.min, max: about.max, step: 1, inputMode: "numeric",
    onchange: () => {
      const value = Math.round(Number(input.value));
      if (input.value !== "" && value >= about.min && value <= about.max) app.set({ [about.name]: value });
      else input.value = String(app.settings[about.name]);
    },
  });
  app.bind(about.name, () => (input.value = String(app.settings[about.name])));
  return h("div", { className: "control", "data-setting": about.name }, h("label", { htmlFor: id }, about.label), input);
}

/** Choices of which one is taken. @param {any} app @param {{ name: string, label: string, options: [string, string][], wide?: boolean }} about */
export function choices(app, about) {
  const group = `choice-${about.name}-${(serial += 1)}`;
  const inputs = about.options.map(([value]) =>
    h("input", { type: "radio", name: group, value, onchange: () => app.set({ [about.name]: value }) }),
  );
  app.bind(about.name, () => inputs.forEach((input) => (input.checked = input.value === app.settings[about.name])));
  return h(
    "fieldset",
    { className: `choices control${about.wide ? " wide" : ""}`, style: "display:flex", "data-setting": about.name },
    h("legend", {}, about.label),
    ...about.options.map(([, text], i) => h("label", {}, inputs[i], h("span", {}, text))),
  );
}
