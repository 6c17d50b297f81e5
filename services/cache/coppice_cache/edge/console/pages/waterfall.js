// One request: why it took that long in sentences, and its life as a waterfall of stages and chunks.

import { requests } from "../parts/api.js";
import { h, notice, show } from "../parts/dom.js";
import { count, several, share, time } from "../parts/format.js";
import { blockerWords, stageName } from "../parts/stages.js";

const RETRY_MS = 1_000;
const RETRIES = 5; // a request is kept when it has ended, which a page may be earlier than

export function openRequest(root, id) {
  let left = false;
  const body = h("div", {}, notice("loading", `Looking for ${id} …`));
  show(root, h("p", {}, h("a", { href: "#/requests" }, "← all requests")), h("h1", { class: "mono" }, id), body);
  look(RETRIES);
  return () => {
    left = true;
  };

  async function look(retries) {
    try {
      const found = await requests(`/requests/${encodeURIComponent(id)}`);
      if (!left) show(body, told(found.request, found.why));
    } catch (problem) {
      if (left) return;
      if (problem.status === 404 && retries) setTimeout(() => look(retries - 1), RETRY_MS);
      show(
        body,
        problem.status === 404
          ? notice(
              "empty",
              "No such request is kept.",
              "A request is kept when it has ended, and as long as the request log has it (--request-log). This page asks a few times more.",
            )
          : notice("error", problem.message, ...(problem.advice ?? [])),
      );
    }
  }
}

function told(record, why) {
  const fact = (name, value) =>
    value === undefined || value === "" ? null : h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return [
    h(
      "section",
      { class: "card why" },
      h("h2", {}, "Why it took that long"),
      why.length
        ? h(
            "ol",
            {},
            why.map((sentence) => h("li", {}, sentence)),
          )
        : h("p", { class: "dim" }, "Nothing is known of its life: it ended before it was queued."),
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Its life"),
      record.stages?.length
        ? waterfall(record)
        : notice("empty", "It has no stages.", "It was refused at the door, or its planner was lost."),
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "What it was"),
      h(
        "dl",
        { class: "facts" },
        fact("tenant", record.tenant || "nobody"),
        fact("key", record.key),
        fact("asked for", record.api),
        fact("model", record.model),
        fact("ended", `${record.status} ${record.end}`),
        fact("at", record.at),
        fact(
          "prompt",
          `${several(record.tokens_in ?? 0, "token")}, ${share(record.tokens_cached ?? 0, record.tokens_in ?? 0)} cached`,
        ),
        fact("answer", several(record.tokens_out ?? 0, "token")),
        fact("queue", time(record.queue_ms ?? 0)),
        fact("first token", time(record.ttft_ms ?? 0)),
        fact("in all", time(record.total_ms ?? 0)),
        fact("trace", record.trace),
        fact("answer's id", record.call),
      ),
    ),
  ];
}

function waterfall(record) {
  const end = Math.max(record.total_ms ?? 0, ...record.stages.map((stage) => stage[2]), 0.001);
  const at = (ms) => `${(100 * Math.max(0, ms)) / end}%`;
  const rows = record.stages.map(([kind, from, to, blocker, amount]) => {
    const words = blockerWords(kind, blocker, amount);
    const piece =
      from === to
        ? h("b", { class: `event ${kind}`, style: { left: at(from) } })
        : h("i", { class: kind, style: { left: at(from), width: at(to - from) } });
    return h(
      "div",
      { class: "stage", "data-kind": kind },
      h(
        "span",
        { class: "name" },
        stageName(kind),
        words ? h("span", { class: "dim" }, ` ${words}`) : null,
      ),
      h("span", { class: "track", role: "img", "aria-label": `from ${time(from)} to ${time(to)}` }, piece),
      h("span", { class: "number" }, from === to ? `at ${time(from)}` : time(to - from)),
    );
  });
  const chunks = record.chunks ?? [];
  const pieces = chunks.map(([from, to, tokens]) =>
    h("i", {
      class: "chunk",
      title: `${count(tokens)} tokens in ${time(to - from)}`,
      style: { left: at(from), width: at(to - from) },
    }),
  );
  const chunkRow = chunks.length
    ? h(
        "div",
        { class: "stage chunks" },
        h("span", { class: "name" }, `${several(chunks.length, "chunk")} of the prompt`),
        h("span", { class: "track" }, pieces),
        h("span", { class: "number" }, `${count(chunks.reduce((sum, [, , tokens]) => sum + tokens, 0))} tokens`),
      )
    : null;
  const first = record.ttft_ms
    ? h("span", {
        class: "first",
        title: `first token at ${time(record.ttft_ms)}`,
        style: { left: at(record.ttft_ms) },
      })
    : null;
  const axis = h(
    "div",
    { class: "stage axis" },
    h("span", { class: "name dim" }, record.ttft_ms ? "│ first token" : ""),
    h(
      "span",
      { class: "track" },
      [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", { style: { left: `${100 * part}%` } }, time(part * end))),
      first,
    ),
    h("span", { class: "number" }),
  );
  return h("div", { class: "waterfall" }, axis, rows, chunkRow);
}
