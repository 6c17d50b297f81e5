// The map itself, on a canvas: a cell for each block (or for several, where there are more than pixels).
//
//   by place    cells are blocks 0, 1, 2, ...
//   by domain   | what it holds, up to its guarantee | borrowed: with a dot | guaranteed and not used: tinted |

import { isDark, rgb, themed } from "../parts/colours.js";
import { h } from "../parts/dom.js";
import { CACHED, FLASHES, FREE, STATES, heldBlocks } from "./pool.js";

const FLASH_MS = 950; // until about the next look
const CELL_PX_MAX = 28;
const GRID_FROM_PX = 5;
const NOTHING = -1; // a cell without a block

export class BlockMap {
  /** `pointed` is called with the block under the pointer or the cursor, or undefined. */
  constructor(pointed) {
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      "aria-label": "Map of the pool's blocks",
      onpointermove: (event) => this.point(this.cellAt(event)),
      onpointerleave: () => this.point(null),
      onkeydown: (event) => this.move(event),
    });
    this.element = h("div", { class: "canvas" }, this.canvas);
    this.pointed = pointed;
    this.image = document.createElement("canvas");
    this.cursor = null;
    this.flashedAt = -FLASH_MS;
    this.redraw = () => this.pool && this.draw(this.pool, this.order);
    this.sizes = new ResizeObserver(this.redraw);
    this.sizes.observe(this.element);
    window.addEventListener("themechange", this.redraw);
  }

  close() {
    this.sizes.disconnect();
    window.removeEventListener("themechange", this.redraw);
    cancelAnimationFrame(this.frame);
  }

  draw(pool, order, hasChanged = false) {
    this.pool = pool;
    this.order = order;
    if (!pool.told || !this.element.clientWidth) return;
    if (hasChanged) this.flashedAt = performance.now();
    this.lay(order === "domain" ? byDomain(pool) : byPlace(pool));
    this.colourAll();
    cancelAnimationFrame(this.frame);
    this.paint();
  }

  /** Sizes: as large as the cells may be so that all are seen without scrolling. */
  lay({ blocks, owners, borrowed }) {
    const width = this.element.clientWidth;
    const height = Math.min(460, Math.max(260, innerHeight * 0.5));
    let size = CELL_PX_MAX;
    while (size > 1 && Math.floor(width / size) * Math.floor(height / size) < blocks.length) size--;
    const columns = Math.floor(width / size);
    this.blocksPerCell = Math.max(1, Math.ceil(blocks.length / (columns * Math.floor(height / size))));
    this.numCells = Math.ceil(blocks.length / this.blocksPerCell);
    Object.assign(this, { blocks, owners, size, columns, rows: Math.ceil(this.numCells / columns) });
    this.borrowed = this.blocksPerCell === 1 && size >= GRID_FROM_PX ? borrowed : [];
    const scale = devicePixelRatio;
    this.canvas.width = columns * size * scale;
    this.canvas.height = this.rows * size * scale;
    this.canvas.style.width = `${columns * size}px`;
    this.canvas.style.height = `${this.rows * size}px`;
    this.image.width = columns;
    this.image.height = this.rows;
  }

  /** The picture without what flashes; `flashing` has cells, and for each its value and the kind of its flash. */
  colourAll() {
    const page = themed("--card");
    const free = themed("--free");
    const strong = isDark() ? [255, 255, 255] : [20, 30, 24];
    const tones = { granted: strong, cached: themed("--good"), evicted: themed("--bad"), fenced: themed("--warn") };
    this.page = page;
    this.tones = FLASHES.map((kind) => tones[kind]); // none of what is seen well enough without
    this.palette = this.pool.domains.flatMap((domain) =>
      STATES.map((state) => (state === "free" ? free : rgb(domain, state))),
    );
    this.palette[FREE] = free;
    this.still = this.image.getContext("2d").createImageData(this.columns, this.rows);
    this.flashing = [];
    const pixels = new Uint32Array(this.still.data.buffer).fill(packed(page));
    const ofCells = this.palette.map(packed);
    for (let cell = 0; cell < this.numCells; cell++) {
      const block = this.shownOf(cell);
      if (block === NOTHING) {
        const owner = this.owners[cell * this.blocksPerCell];
        pixels[cell] = packed(mixed(free, this.palette[4 * owner + CACHED], 0.3));
        continue;
      }
      pixels[cell] = ofCells[this.pool.cells[block]];
      if (this.tones[this.pool.flashes[block]]) this.flashing.push(cell);
    }
  }

  /** [value of a cell, kind of its flash] as a place in a table of colours: there are few, and many cells. */
  flashOf(cell) {
    const block = this.shownOf(cell);
    return this.pool.cells[block] * FLASHES.length + this.pool.flashes[block];
  }

  paintFlashes(pixels, glow) {
    const table = new Uint32Array(this.palette.length * FLASHES.length);
    this.palette.forEach((tone, value) =>
      this.tones.forEach((flash, kind) => {
        if (flash) table[value * FLASHES.length + kind] = packed(mixed(tone, flash, glow));
      }),
    );
    for (const cell of this.flashing) pixels[cell] = table[this.flashOf(cell)];
  }

  paint() {
    const age = (performance.now() - this.flashedAt) / FLASH_MS;
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const glow = isStill ? Number(age < 1) : Math.max(0, 1 - age);
    const picture = new ImageData(this.still.data.slice(), this.columns, this.rows);
    const pixels = new Uint32Array(picture.data.buffer);
    const hasRings = this.size >= GRID_FROM_PX;
    if (glow && !hasRings) this.paintFlashes(pixels, glow);
    this.image.getContext("2d").putImageData(picture, 0, 0);
    const shown = this.canvas.getContext("2d");
    shown.imageSmoothingEnabled = false;
    shown.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    shown.drawImage(this.image, 0, 0, this.columns * this.size, this.rows * this.size);
    if (hasRings) {
      this.paintGrid(shown);
      this.paintRings(shown, glow);
    }
    if (this.cursor !== null) this.outline(shown, this.cursor);
    if (glow) this.frame = requestAnimationFrame(() => this.paint());
  }

  /** Of the blocks of a cell the one that is worth showing: what just changed, else what is not free. */
  shownOf(cell) {
    const start = cell * this.blocksPerCell;
    if (this.blocksPerCell === 1) return this.blocks[start];
    let found = this.blocks[start];
    for (let at = start; at < Math.min(start + this.blocksPerCell, this.blocks.length); at++) {
      const block = this.blocks[at];
      if (block === NOTHING) continue;
      if (this.pool.flashes[block]) return block;
      if ((this.pool.cells[block] & 3) !== FREE) found = block;
    }
    return found;
  }

  paintGrid(context) {
    const [red, green, blue] = this.page;
    context.fillStyle = `rgb(${red} ${green} ${blue})`;
    for (let column = 1; column <= this.columns; column++)
      context.fillRect(column * this.size - 1, 0, 1, this.rows * this.size);
    for (let row = 1; row <= this.rows; row++) context.fillRect(0, row * this.size - 1, this.columns * this.size, 1);
    const dot = Math.max(2, this.size / 4);
    this.borrowed.forEach((cell) => {
      const [x, y] = this.corner(cell);
      context.fillRect(x + (this.size - 1 - dot) / 2, y + (this.size - 1 - dot) / 2, dot, dot);
    });
  }

  /** What flashes, where a cell is large enough to show its state inside of the flash. */
  paintRings(context, glow) {
    const thick = Math.max(1.5, this.size / 7);
    context.lineWidth = thick;
    for (const cell of glow ? this.flashing : []) {
      const [red, green, blue] = this.tones[this.flashOf(cell) % FLASHES.length];
      const [x, y] = this.corner(cell);
      const side = this.size - 1 - thick;
      context.strokeStyle = `rgb(${red} ${green} ${blue} / ${glow})`;
      context.strokeRect(x + thick / 2, y + thick / 2, side, side);
    }
  }

  outline(context, cell) {
    const [x, y] = this.corner(cell);
    context.strokeStyle = isDark() ? "#fff" : "#000";
    context.lineWidth = 2;
    context.strokeRect(x, y, Math.max(4, this.size - 1), Math.max(4, this.size - 1));
  }

  corner(cell) {
    return [(cell % this.columns) * this.size, Math.floor(cell / this.columns) * this.size];
  }

  cellAt(event) {
    const column = Math.floor(event.offsetX / this.size);
    return column < this.columns ? Math.floor(event.offsetY / this.size) * this.columns + column : null;
  }

  move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const last = Math.ceil(this.blocks.length / this.blocksPerCell) - 1;
    this.point(this.cursor === null ? 0 : Math.min(last, Math.max(0, this.cursor + steps[event.key])));
  }

  point(cell) {
    this.cursor = cell;
    const block = cell === null || !this.blocks ? undefined : this.shownOf(cell);
    this.pointed(block === NOTHING ? undefined : block);
    if (this.blocks) this.paint();
  }
}

function byPlace(pool) {
  const blocks = new Int32Array(pool.cells.length);
  for (let block = 0; block < blocks.length; block++) blocks[block] = block;
  return { blocks, owners: [], borrowed: [] };
}

/** Each domain from its first block to the end of what it holds or is guaranteed, whichever is more; then what is free. */
function byDomain(pool) {
  const ofDomain = pool.domains.map(() => []);
  const free = [];
  pool.cells.forEach((cell, block) => ((cell & 3) === FREE ? free : ofDomain[cell >> 2]).push(block));
  const blocks = [];
  const owners = [];
  const borrowed = [];
  let unused = 0;
  for (const domain of pool.told.domains) {
    const place = pool.places.get(domain.domain);
    const own = ofDomain[place].sort((a, b) => (pool.cells[a] & 3) - (pool.cells[b] & 3));
    own.forEach((block, at) => {
      if (domain.guarantee_blocks && at >= domain.guarantee_blocks) borrowed.push(blocks.length);
      blocks.push(block);
      owners.push(place);
    });
    for (let at = heldBlocks(domain); at < domain.guarantee_blocks; at++, unused++) {
      blocks.push(NOTHING);
      owners.push(place);
    }
  }
  for (const block of free.slice(0, Math.max(0, free.length - unused))) {
    blocks.push(block);
    owners.push(NOTHING);
  }
  return { blocks: Int32Array.from(blocks), owners, borrowed };
}

function mixed(from, to, share) {
  return from.map((value, at) => value + (to[at] - value) * share);
}

/** As one pixel of an image: red is its lowest byte. */
function packed([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
