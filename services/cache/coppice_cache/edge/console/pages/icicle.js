// One radix tree as an icicle: from left to right is the prompt from its first block, and branches lie below each other.
//
//   |----- common beginning -----|-- one goes on --|
//                                |------ another --------|

import { h, show, svg } from "../parts/dom.js";
import { ago, count, several } from "../parts/format.js";

const ROW_PX = 22;
const ROWS_MAX = 60;
const WIDTH = 1000; // of the drawing, in its own units
const SAME_MS = 1_000; // shorter differences of age are none

export class Icicle {
  /** `chosen` is called with the node that somebody clicked. */
  constructor(tree, chosen) {
    this.tree = tree;
    this.chosen = chosen;
    this.element = h("div", { class: "icicle" });
    this.marked = new Set();
    this.top = rooted(tree.nodes);
    this.zoomed = this.top;
    this.draw();
  }

  /** Shows a path: the first seals of its nodes, in hexadecimal. */
  mark(path) {
    this.marked = new Set(path);
    this.draw();
  }

  draw() {
    const top = this.zoomed;
    const rows = [];
    const first = top.first_block;
    const blocks = Math.max(1, deepest(top) - first);
    const unit = WIDTH / blocks;
    let numRows = 0;
    let numLeft = 0;
    const lay = (node) => {
      const row = numRows;
      for (const child of node.children) {
        if (numRows >= ROWS_MAX) {
          numLeft += leaves(child);
          continue;
        }
        lay(child);
      }
      if (numRows === row) numRows++;
      if (node.num_blocks) rows.push([node, row, numRows - row]);
    };
    lay(top);
    const drawn = rows.map(([node, row, height]) =>
      this.drawNode(node, (node.first_block - first) * unit, row, node.num_blocks * unit, height),
    );
    show(
      this.element,
      h(
        "p",
        { class: "dim row" },
        h("span", {}, `${several(blocks, "block")} deep, ${several(leaves(top), "branch", "branches")}`),
        this.zoomed === this.top
          ? null
          : h("button", { type: "button", onclick: () => this.zoom(this.top) }, "Whole tree"),
        h(
          "span",
          { class: "key" },
          h("i", { class: "hot" }),
          "used last",
          h("i", { class: "cold" }),
          "longest unused",
          h("i", { class: "pinned" }),
          "pinned",
        ),
      ),
      svg(
        "svg",
        {
          viewBox: `0 0 ${WIDTH} ${numRows * ROW_PX}`,
          preserveAspectRatio: "none",
          role: "group",
          "aria-label": "Radix tree",
          style: { height: `${numRows * ROW_PX}px` },
        },
        drawn,
      ),
      numLeft
        ? h(
            "p",
            { class: "dim" },
            `${count(numLeft)} further branches are not drawn. Double-click a node to see what follows it.`,
          )
        : null,
    );
  }

  drawNode(node, x, row, width, height) {
    const heat = this.heatOf(node);
    const words = `blocks ${node.first_block} to ${node.first_block + node.num_blocks - 1}, used ${ago(node.idle_ms)}, ${node.num_pins ? `pinned by ${node.num_pins}` : "not pinned"}`;
    const kinds = ["node", node.num_pins ? "pinned" : "", this.marked.has(node.node) ? "marked" : ""].join(" ");
    const choose = (event) => {
      this.element.querySelector(".chosen")?.classList.remove("chosen");
      event.currentTarget.classList.add("chosen");
      this.chosen(node);
    };
    return svg(
      "rect",
      {
        class: kinds,
        x,
        y: row * ROW_PX + 1,
        width: Math.max(1, width - 1.5),
        height: height * ROW_PX - 2,
        rx: 2,
        tabindex: 0,
        role: "button",
        "aria-label": words,
        style: { "--heat": `${(100 * heat).toFixed(0)}%` },
        onclick: choose,
        ondblclick: () => this.zoom(node),
        onkeydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            choose(event);
          }
        },
      },
      svg("title", {}, words),
    );
  }

  /** From 0, the longest unused node of this tree, to 1, the one used last; in the logarithm of the time since then. */
  heatOf(node) {
    const age = (one) => Math.log(one.idle_ms + SAME_MS);
    this.ages ??= this.tree.nodes.slice(1).map(age);
    const [least, most] = [Math.min(...this.ages), Math.max(...this.ages)];
    return most > least ? (most - age(node)) / (most - least) : 1;
  }

  zoom(node) {
    this.zoomed = node;
    this.draw();
  }
}

/** Nodes in preorder, each with its depth, as a tree; the child that was used last first. `idle_ms` becomes that of the
    path: a beginning is as warm as what is read behind it. */
function rooted(nodes) {
  const path = [];
  for (const node of nodes) {
    node.children = [];
    path.length = Math.min(path.length, node.depth);
    path.at(-1)?.children.push(node);
    path.push(node);
  }
  for (const node of nodes.toReversed()) {
    node.children.sort((a, b) => a.idle_ms - b.idle_ms);
    if (node.children.length) node.idle_ms = Math.min(node.idle_ms, node.children[0].idle_ms);
  }
  return nodes[0];
}

function deepest(node) {
  let most = node.first_block + node.num_blocks;
  const waiting = [...node.children];
  while (waiting.length) {
    const next = waiting.pop();
    most = Math.max(most, next.first_block + next.num_blocks);
    waiting.push(...next.children);
  }
  return most;
}

function leaves(node) {
  let number = 0;
  const waiting = [node];
  while (waiting.length) {
    const next = waiting.pop();
    if (next.children.length) waiting.push(...next.children);
    else number++;
  }
  return number;
}
