// Who waits for whom: the waits of the newest requests, summed up by who waited and who was in the way.

import { requests } from "../parts/api.js";
import { colour } from "../parts/colours.js";
import { cell, h, notice, number, poll, show, svg, table } from "../parts/dom.js";
import { count, several, time } from "../parts/format.js";
import { stageName, waitsFor } from "../parts/stages.js";

export const title = "Waits";

const EVERY_MS = 5_000;
const QUICK_ANSWER_MS = 20; // of the cache service, which every request asks once: that is no wait
const EDGES_MAX = 40;
const BANDS_PX = 120; // all bands together
const GAP_PX = 16;
const NAME_PX = 18;
const NAME_CHARS_MAX = 15;
const SIDE_PX = 120; // for names
const WIDTH_MAX = 760;
const MARGIN_PX = 40;

export function open(root) {
  const body = h("div", {}, notice("loading", "Looking at the newest requests …"));
  show(root, h("h1", {}, "Who waits for whom"), body);
  return poll(EVERY_MS, async () => {
    try {
      draw(body, (await requests("/requests?limit=1000")).requests);
    } catch (problem) {
      show(body, notice("error", problem.message, ...(problem.advice ?? [])));
    }
  });
}

function draw(body, records) {
  const edges = edgesOf(records);
  if (!edges.length) {
    show(
      body,
      notice(
        "empty",
        "Nobody has waited.",
        records.length
          ? `None of the newest ${count(records.length)} requests waited for anybody.`
          : "No request has ended yet: send one from the playground.",
      ),
    );
    return;
  }
  const words = "The left side waited, the right side was in the way; the wider, the longer.";
  const columns = ["who waited", "why", "for whom", "requests#", "in all#", "longest#", ""];
  show(
    body,
    h(
      "section",
      { class: "card" },
      h("p", { class: "dim" }, `Waits of the newest ${several(records.length, "request")}. ${words}`),
      graph(edges, Math.min(WIDTH_MAX, body.clientWidth - MARGIN_PX)),
    ),
    h("section", { class: "card" }, table(columns, edges.map(row))),
  );
}

function row(edge) {
  return h(
    "tr",
    {},
    cell(edge.from),
    cell(stageName(edge.kind)),
    cell(edge.to),
    number(count(edge.ids.size)),
    number(time(edge.ms)),
    number(time(edge.longest)),
    cell(h("a", { href: `#/requests/${encodeURIComponent(edge.worst)}` }, "longest one")),
  );
}

/** The longest first: {from, kind, to, ms, longest, worst, ids}. */
function edgesOf(records) {
  const found = new Map();
  for (const record of records) {
    for (const [kind, start, end, blocker, amount] of record.stages ?? []) {
      const from = record.tenant || "nobody";
      const to = waitsFor(kind, from, blocker, amount);
      if (!to || end <= start || (kind === "acquire" && end - start < QUICK_ANSWER_MS)) continue;
      const key = JSON.stringify([from, kind, to]);
      const edge = found.get(key) ?? { from, kind, to, ms: 0, longest: 0, worst: "", ids: new Set() };
      edge.ms += end - start;
      edge.ids.add(record.id);
      if (end - start > edge.longest) Object.assign(edge, { longest: end - start, worst: record.id });
      found.set(key, edge);
    }
  }
  return [...found.values()].sort((a, b) => b.ms - a.ms).slice(0, EDGES_MAX);
}

/** Names on both sides, each as high as all of its waits, and a band for each wait between them. */
function graph(edges, width) {
  const [from, to] = [SIDE_PX, width - SIDE_PX];
  const scale = BANDS_PX / edges.reduce((sum, edge) => sum + edge.ms, 0);
  const bands = edges.map((edge) => ({ ...edge, thick: Math.max(1.5, edge.ms * scale) }));
  const [left, right] = ["from", "to"].map((side) => stacked(bands, side));
  const height = Math.max(left.height, right.height);
  const lines = bands.map((band, place) => {
    const [y1, y2] = [left.middles[place], right.middles[place]];
    const words = `${band.from} waited ${time(band.ms)} for ${band.to}: ${stageName(band.kind)}`;
    return svg(
      "path",
      {
        class: "flow",
        d: `M${from} ${y1}C${width / 2} ${y1} ${width / 2} ${y2} ${to} ${y2}`,
        stroke: colour(`tenant/${band.from}`),
        "stroke-width": band.thick,
      },
      svg("title", {}, words),
    );
  });
  const names = (side, x, anchor) =>
    side.names.map(([name, y]) => svg("text", { x, y: y + 5, "text-anchor": anchor }, shortened(name)));
  const attributes = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "As the table below says" };
  return h(
    "div",
    { class: "scroll" },
    svg("svg", { class: "graph", ...attributes }, lines, names(left, from - 10, "end"), names(right, to + 10, "start")),
  );
}

/** Heights of one side: the middle of each band, and of each name, whose bands lie on each other. */
function stacked(bands, side) {
  const middles = [];
  const names = [];
  let top = GAP_PX / 2;
  for (const name of new Set(bands.map((band) => band[side]))) {
    const start = top;
    bands.forEach((band, place) => {
      if (band[side] !== name) return;
      middles[place] = top + band.thick / 2;
      top += band.thick;
    });
    names.push([name, (start + top) / 2]);
    top = Math.max(top, start + NAME_PX) + GAP_PX;
  }
  return { middles, names, height: top };
}

function shortened(name) {
  return name.length > NAME_CHARS_MAX ? `${name.slice(0, NAME_CHARS_MAX - 1)}…` : name;
}
