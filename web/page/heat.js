// Heat maps on a 2-D canvas: one cell for each datum, drawn at the screen's own resolution.
import { framed, h, token } from "./dom.js";

/** `#rrggbb` as numbers. */
function rgb(color) {
  const n = Number.parseInt(color.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

const mix = (a, b, t) => a.map((x, i) => x + (b[i] - x) * t);

/** A colour as a pixel of ImageData has it. */
const pixel = ([r, g, b]) => ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;

/** A table of 256 pixels from several colours, evenly spaced. */
export function ramp(...colors) {
  const stops = colors.map((color) => (typeof color === "string" ? rgb(color.startsWith("--") ? token(color) : color) : color));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    return pixel(mix(stops[low], stops[low + 1], at - low));
  });
}

/** The colours of cosines: retained rows from low over the panel's colour to high, merged rows in one hue. */
export function cosineColors() {
  const [low, mid, high, merged] = ["--low", "--mid", "--high", "--merged"].map((name) => rgb(token(name)));
  return {
    retained: ramp(low, mix(low, mid, 0.62), mid, mix(high, mid, 0.62), high),
    merged: ramp(mix(merged, mid, 0.25), merged, merged),
  };
}

export class HeatMap {
  /**
   * @param {{ label: string, height: (rows: number, width: number) => number, describe: (row: number, column: number) => string[],
   *   pick?: (row: number, column: number) => void, axes: { rows: (row: number) => string | null, columns: string } }} about
   */
  constructor(about) {
    this.about = about;
    this.rows = 0;
    this.columns = 0;
    this.chosen = -1;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", "aria-label": about.label });
    this.tip = h("div", { className: "tip", role: "status", hidden: true });
    this.element = h("div", { className: "heat" }, this.canvas, this.tip);
    this.cells = h("canvas");
    this.cursor = null;
    this.draw = framed(() => this.#draw());
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#show(null));
    this.canvas.addEventListener("blur", () => this.#show(null));
    this.canvas.addEventListener("click", (event) => {
      this.#point(event);
      if (this.cursor) about.pick?.(...this.cursor);
    });
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /**
   * Sets the data. @param {number} rows @param {number} columns
   * @param {(pixels: Uint32Array, row: number) => void} fill colours a row's cells, of `ramp`; cells left as they are have no datum
   */
  set(rows, columns, fill) {
    this.rows = rows;
    this.columns = columns;
    if (rows === 0 || columns === 0) return;
    const image = new ImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer).fill(pixel(rgb(token("--sunk"))));
    for (let row = 0; row < rows; row += 1) fill(pixels.subarray(row * columns, (row + 1) * columns), row);
    this.cells.width = this.columns;
    this.cells.height = this.rows;
    this.cells.getContext("2d").putImageData(image, 0, 0);
    this.draw();
  }

  #frame() {
    const left = 44;
    const bottom = 34;
    const width = this.element.clientWidth - left - 2;
    return { left, top: 2, width, height: this.about.height(this.rows, width), bottom };
  }

  #draw() {
    const { left, top, width, height, bottom } = this.#frame();
    if (width <= 0 || this.rows === 0) return;
    const scale = devicePixelRatio || 1;
    const total = { width: width + left + 2, height: height + top + bottom };
    this.canvas.width = Math.round(total.width * scale);
    this.canvas.height = Math.round(total.height * scale);
    this.canvas.style.height = `${total.height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.imageSmoothingEnabled = this.columns > width * scale;
    pen.drawImage(this.cells, left, top, width, height);
    this.#axes(pen, { left, top, width, height });
    const mark = (row, column, color) => {
      pen.strokeStyle = color;
      pen.lineWidth = 1.5;
      const [w, t] = [width / this.columns, height / this.rows];
      if (column === null) pen.strokeRect(left + 0.5, top + row * t, width - 1, t);
      else pen.strokeRect(left + column * w - 0.5, top + row * t - 0.5, w + 1, t + 1);
    };
    if (this.chosen >= 0) mark(this.chosen, null, token("--accent"));
    if (this.cursor) mark(...this.cursor, token("--ink"));
  }

  #axes(pen, { left, top, width, height }) {
    pen.font = `11px ${token("--sans")}`;
    pen.fillStyle = token("--muted");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    let last = -99;
    for (let row = 0; row < this.rows; row += 1) {
      const text = this.about.axes.rows(row);
      const y = top + ((row + 0.5) / this.rows) * height;
      if (text === null || y - last < 15) continue;
      pen.fillText(text, left - 6, y);
      last = y;
    }
    pen.textBaseline = "top";
    const steps = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
    const step = steps.find((step) => (width / this.columns) * step >= 46) ?? this.columns;
    for (let column = 0; column < this.columns; column += step) {
      const x = left + ((column + 0.5) / this.columns) * width;
      pen.textAlign = column === 0 ? "left" : "center";
      pen.fillText(String(column), column === 0 ? left : x, top + height + 5);
    }
    pen.textAlign = "right";
    pen.fillText(this.about.axes.columns, left + width, top + height + 19);
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const { left, top, width, height } = this.#frame();
    const column = Math.floor(((event.clientX - box.left - left) / width) * this.columns);
    const row = Math.floor(((event.clientY - box.top - top) / height) * this.rows);
    const inside = row >= 0 && row < this.rows && column >= 0 && column < this.columns;
    this.#show(inside ? [row, column] : null);
  }

  #key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (event.key === "Escape") this.#show(null);
    if ((event.key === "Enter" || event.key === " ") && this.cursor) this.about.pick?.(...this.cursor);
    if (!move) return;
    event.preventDefault();
    const far = event.shiftKey ? 8 : 1;
    const [row, column] = this.cursor ?? [0, 0];
    const within = (x, most) => Math.min(Math.max(x, 0), most - 1);
    this.#show([within(row + move[0] * far, this.rows), within(column + move[1] * far, this.columns)]);
  }

  #show(cell) {
    this.cursor = cell;
    this.tip.hidden = cell === null;
    if (cell) {
      const { left, top, width, height } = this.#frame();
      this.tip.replaceChildren(...this.about.describe(...cell).map((line) => h("div", {}, line)));
      const half = this.tip.offsetWidth / 2;
      const x = left + ((cell[1] + 0.5) / this.columns) * width;
      this.tip.style.left = `${Math.min(Math.max(x, half), this.element.clientWidth - half)}px`;
      const y = top + (cell[0] / this.rows) * height;
      this.tip.style.top = `${y < 70 ? y + this.tip.offsetHeight + 34 : y}px`;
    }
    this.draw();
  }
}
