// The newest requests: searched, filtered, and one of them told from its first moment to its last.

import { requests } from "../parts/api.js";
import { fillSelect, h, notice, number, poll, show, table } from "../parts/dom.js";
import { ago, count, holderName, share, time } from "../parts/format.js";
import { openRequest } from "./waterfall.js";

export const title = "Requests";

const EVERY_MS = 3_000;
const LISTED_MAX = 1_000;
const ROWS_MAX = 150;
const COLUMNS = [
  ...["ended", "id", "tenant", "ended as", "in#", "cached#", "out#", "queue#", "first token#", "in all#", "cause"],
];
const asked = { text: "", tenant: "", cause: "", slow: false, calls: true };

export function open(root, id) {
  return id ? openRequest(root, id) : openList(root);
}

function openList(root) {
  let found = null;
  let numShown = ROWS_MAX;
  const search = h("input", {
    type: "search",
    placeholder: "x-request-id, or part of it",
    "aria-label": "Search by request id",
    value: asked.text,
    oninput: () => {
      asked.text = search.value.trim();
      draw();
    },
  });
  const tenant = h("select", {
    "aria-label": "Tenant",
    onchange: () => {
      asked.tenant = tenant.value;
      draw();
    },
  });
  const cause = h("select", {
    "aria-label": "Cause",
    onchange: () => {
      asked.cause = cause.value;
      draw();
    },
  });
  const slow = h("input", {
    type: "checkbox",
    checked: asked.slow,
    onchange: () => {
      asked.slow = slow.checked;
      draw();
    },
  });
  const calls = h("input", {
    type: "checkbox",
    checked: asked.calls,
    onchange: () => {
      asked.calls = calls.checked;
      draw();
    },
  });
  const numbers = h("span", { class: "dim", role: "status" });
  const body = h("tbody");
  const more = h(
    "button",
    {
      type: "button",
      onclick: () => {
        numShown += ROWS_MAX;
        draw();
      },
    },
    "Show more",
  );
  const rows = table(COLUMNS, body, { class: "requests" });
  const problems = h("div");
  const form = h(
    "form",
    {
      class: "row",
      role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        openTyped();
      },
    },
    search,
    tenant,
    cause,
    h("label", {}, slow, "slowest first"),
    h("label", { title: "Not those that ask for models, tokens or what a browser may send" }, calls, "answers only"),
    numbers,
  );
  show(root, h("h1", {}, "Requests"), problems, h("section", { class: "card" }, form, rows, more));
  const stop = poll(EVERY_MS, look);
  return stop;

  /** Enter opens what was typed, also one that is not among those listed. */
  function openTyped() {
    const rows = chosen();
    const id = rows.length === 1 ? rows[0].id : asked.text;
    if (id) location.hash = `#/requests/${encodeURIComponent(id)}`;
  }

  async function look() {
    try {
      const answer = await requests(`/requests?limit=${LISTED_MAX}`);
      if (
        found &&
        JSON.stringify(found[0]) === JSON.stringify(answer.requests[0]) &&
        found.length === answer.requests.length
      )
        return;
      found = answer.requests;
      show(problems);
      const names = (field) => [...new Set(found.map((record) => record[field]).filter(Boolean))].sort();
      fillSelect(tenant, [["", "all tenants"], ...names("tenant").map((name) => [name, name])]);
      fillSelect(cause, [["", "all causes"], ...names("cause").map((name) => [name, name.replaceAll("_", " ")])]);
      tenant.value = names("tenant").includes(asked.tenant) ? asked.tenant : "";
      cause.value = names("cause").includes(asked.cause) ? asked.cause : "";
      draw();
    } catch (problem) {
      show(problems, notice("error", problem.message, ...(problem.advice ?? [])));
    }
  }

  function chosen() {
    const rows = (found ?? []).filter(
      (record) =>
        (!asked.calls || asked.text || isCall(record)) &&
        (!asked.text || record.id.includes(asked.text) || record.call?.includes(asked.text)) &&
        (!tenant.value || record.tenant === tenant.value) &&
        (!cause.value || record.cause === cause.value),
    );
    return asked.slow ? rows.sort((a, b) => (b.total_ms ?? 0) - (a.total_ms ?? 0)) : rows;
  }

  function draw() {
    if (!found) return;
    const rows = chosen();
    numbers.textContent = `${count(rows.length)} of the newest ${count(found.length)}`;
    show(body, rows.slice(0, numShown).map(row));
    more.hidden = rows.length <= numShown;
    if (rows.length) return;
    const words = found.length
      ? ["None of the newest requests is like that.", "Press Enter to look for that id among older ones."]
      : [
          "No request has ended yet.",
          "Send one from the playground, or with curl: it is listed as soon as it has ended.",
        ];
    show(body, h("tr", {}, h("td", { colspan: 11 }, notice("empty", ...words))));
  }
}

/** Whether it asked the model for an answer, or failed. */
export function isCall(record) {
  return Boolean(record.call) || record.status >= 400;
}

function row(record) {
  const href = `#/requests/${encodeURIComponent(record.id)}`;
  const isBad = record.status >= 400;
  const known = (value, unit) => number(value ? unit(value) : h("span", { class: "dim" }, "–"));
  return h(
    "tr",
    {
      class: isBad ? "failed" : "",
      onclick: (event) => {
        if (event.target.tagName !== "A") location.hash = href;
      },
    },
    h("td", { class: "dim", title: record.at }, ago(Date.now() - Date.parse(record.at))),
    h("td", { class: "id" }, h("a", { href }, record.id)),
    h("td", {}, record.tenant || h("span", { class: "dim" }, "nobody")),
    h("td", {}, isBad ? h("span", { class: "bad" }, `${record.status} ${record.end}`) : record.end),
    known(record.tokens_in, count),
    known(record.tokens_in && share(record.tokens_cached ?? 0, record.tokens_in), String),
    known(record.tokens_out, count),
    known(record.queue_ms, time),
    known(record.ttft_ms, time),
    known(record.total_ms, time),
    h(
      "td",
      {},
      record.cause ? h("span", { class: `cause ${record.cause}` }, record.cause.replaceAll("_", " ")) : "",
      record.blocker ? h("span", { class: "dim" }, ` ${holderName(record.blocker)}`) : "",
    ),
  );
}
