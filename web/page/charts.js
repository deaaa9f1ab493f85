// Figures with their tools, and curves by uPlot.
// uPlot comes as a classic script: its minified form is no module.
import { csv, download, h, token } from "./dom.js";

/**
 * A figure: title, note, body, legend, and the buttons that save it. A legend's entry is a text, the names of its colour or
 * of the colours of a ramp, and how it is drawn where that is no square: line, dashes, dots, outline.
 * @param {{ title: string, name: string, note?: string, full?: boolean, legend?: [string, string, string?][],
 *   table?: () => { header: string[], rows: Iterable<any[]> }, picture?: boolean }} about
 */
export function figureOf(about, ...body) {
  const note = h("p", { className: "note" }, about.note ?? "");
  const legend = h("div", { className: "legend" });
  const tools = h("div", { className: "tools" });
  const content = h("div", {}, ...body);
  const element = h(
    "section",
    { className: `figure${about.full ? " full" : ""}`, "aria-label": about.title },
    h("header", {}, h("h3", {}, about.title), tools),
    note,
    content,
    legend,
  );
  const setLegend = (entries = []) => {
    legend.replaceChildren(
      ...entries.map(([text, color, kind]) => {
        const colors = color.split(" ").map((name) => `var(${name})`);
        const swatch = h("i", { className: colors.length > 1 ? "ramp" : (kind ?? ""), "data-color": color });
        swatch.style.color = colors[0];
        if (colors.length > 1) swatch.style.background = `linear-gradient(90deg, ${colors})`;
        return h("span", {}, swatch, text);
      }),
    );
  };
  setLegend(about.legend);
  if (about.picture !== false) {
    const save = () => picture(about.title, content, legend, `kvfold-${about.name}.png`);
    tools.append(h("button", { className: "quiet", type: "button", onclick: save, "aria-label": `${about.title} as PNG` }, "PNG"));
  }
  if (about.table) {
    const save = async () => {
      const { header, rows } = about.table();
      download(await csv(header, rows), `kvfold-${about.name}.csv`);
    };
    tools.append(h("button", { className: "quiet", type: "button", onclick: save, "aria-label": `${about.title} as CSV` }, "CSV"));
  }
  return { element, content, setLegend, setNote: (text) => (note.textContent = text) };
}

/** Puts a figure's canvases, title and legend on one picture. */
function picture(title, content, legend, name) {
  const box = content.getBoundingClientRect();
  const scale = Math.max(2, devicePixelRatio);
  const pad = 18;
  const canvas = h("canvas");
  canvas.width = (box.width + 2 * pad) * scale;
  canvas.height = (box.height + 2 * pad + 60) * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = token("--panel");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = token("--ink");
  pen.font = `600 15px ${token("--sans")}`;
  pen.fillText(title, pad, pad + 12);
  for (const drawn of content.querySelectorAll("canvas")) {
    const at = drawn.getBoundingClientRect();
    pen.imageSmoothingEnabled = false;
    pen.drawImage(drawn, pad + at.left - box.left, pad + 24 + at.top - box.top, at.width, at.height);
  }
  pen.font = `12px ${token("--sans")}`;
  let x = pad;
  const y = box.height + pad + 46;
  for (const entry of legend.children) {
    const swatch = entry.querySelector("i");
    if (swatch) {
      const { width } = swatch.getBoundingClientRect();
      const colors = swatch.dataset.color.split(" ").map(token);
      pen.fillStyle = colors[0];
      if (colors.length > 1) {
        pen.fillStyle = pen.createLinearGradient(x, 0, x + width, 0);
        colors.forEach((color, i) => pen.fillStyle.addColorStop(i / (colors.length - 1), color));
      }
      const thin = ["line", "dashes", "dots"].includes(swatch.className);
      pen.fillRect(x, thin ? y - 5 : y - 9, width, thin ? 3 : 11);
      x += width + 5;
    }
    pen.fillStyle = token("--muted");
    pen.fillText(entry.textContent, x, y);
    x += pen.measureText(entry.textContent).width + 18;
  }
  pen.textAlign = "right";
  pen.fillText("kvfold", box.width + pad, pad + 12);
  canvas.toBlob((blob) => blob && download(blob, name));
}

/** A chart that keeps its width and its colours. */
export class Chart {
  #plot = null;
  #make;
  #data = null;
  #none;

  /** @param {(width: number) => any} options uPlot's options for a width */
  constructor(options, label) {
    this.#make = options;
    this.element = h("div", { className: "chart", role: "img", "aria-label": label });
    this.#none = h("p", { hidden: true });
    this.element.append(this.#none);
    new ResizeObserver(() => this.#resize()).observe(this.element);
  }

  set label(text) {
    this.element.setAttribute("aria-label", text);
  }

  /** Draws data: arrays of x and of each curve; `none` is said over a plot that shows nothing. */
  draw(data, none = "") {
    this.#data = data;
    this.#none.textContent = none;
    this.#none.hidden = none === "";
    this.redraw();
  }

  /** Draws again, as after a change of theme. */
  redraw() {
    const width = this.element.clientWidth;
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#data && width > 0) this.#plot = new globalThis.uPlot(this.#make(width), this.#data, this.element);
  }

  #resize() {
    const width = this.element.clientWidth;
    if (width === 0 || !this.#data) return;
    if (!this.#plot) this.redraw();
    else if (Math.abs(this.#plot.width - width) > 1) this.#plot.setSize({ width, height: this.#plot.height });
  }
}

const FONT = 11;

/** An axis in the page's colours. */
export function axis(label, more = {}) {
  const sans = token("--sans");
  return {
    label,
    stroke: token("--muted"),
    font: `${FONT}px ${sans}`,
    labelFont: `${FONT + 1}px ${sans}`,
    labelSize: 22,
    labelGap: 2,
    size: 44,
    grid: { stroke: token("--line"), width: 1 },
    ticks: { stroke: token("--line"), width: 1, size: 4 },
    ...more,
  };
}

/** The x axis of layers, pairs or tokens: whole numbers alone. */
export const wholes = (label) => axis(label, {
  size: 30,
  incrs: [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 1024, 2000],
});

/** A curve. */
export const curve = (label, color, more = {}) => ({
  label,
  stroke: token(color),
  width: 2,
  points: { show: false },
  ...more,
});

/** Draws a horizontal line at a height that may change. */
export function rule(height, color) {
  return {
    hooks: {
      draw: [
        (plot) => {
          const y = plot.valToPos(height(), "y", true);
          const { left, top, width, height: tall } = plot.bbox;
          if (y < top || y > top + tall) return;
          const pen = plot.ctx;
          pen.save();
          pen.strokeStyle = token(color);
          pen.lineWidth = 1.5 * devicePixelRatio;
          pen.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
          pen.beginPath();
          pen.moveTo(left, y);
          pen.lineTo(left + width, y);
          pen.stroke();
          pen.restore();
        },
      ],
    },
  };
}

/** Tells the nearest point's figures beside the cursor. @param {(index: number) => string[]} lines */
export function tooltip(lines) {
  const tip = h("div", { className: "tip", hidden: true });
  return {
    hooks: {
      init: [(plot) => plot.over.append(tip)],
      setCursor: [
        (plot) => {
          const { idx, left, top } = plot.cursor;
          tip.hidden = idx === null || idx === undefined || left < 0;
          if (tip.hidden) return;
          tip.replaceChildren(...lines(idx).map((line) => h("div", {}, line)));
          const wide = tip.offsetWidth / 2 + 4;
          tip.style.left = `${Math.min(Math.max(left, wide), plot.over.clientWidth - wide)}px`;
          tip.style.top = `${Math.max(top, 34)}px`;
        },
      ],
    },
  };
}
