// Two tenants side by side, the same prompt to both: what each finds cached, and what each token costs.

import { Problem, hasTenants } from "../parts/api.js";
import { code, h, notice, show } from "../parts/dom.js";
import { Side } from "./side.js";

export const title = "Playground";

const PROMPT = `You answer questions about Python for people who begin to program. Keep to what the language reference
says. Say what a function takes, what it returns, and what it raises. Give one short example where it helps, and no more
than three sentences of text around it. If you do not know, say so.

What does sorted do?`.replace(/(?<!\n)\n(?!\n)/g, " ");
const MAX_TOKENS = 48;

// What was typed stays while the tab is open, and nowhere else: keys are not to be found in the browser's storage.
const typed = { prompt: PROMPT, maxTokens: MAX_TOKENS, isNew: true, warms: true, sides: [{}, {}] };

export function open(root) {
  const sides = ["A", "B"].map((name, place) => new Side(name, typed.sides[place], drawNote));
  let keysAreAsked = null; // whether keys are asked for; null: not known yet
  let running = null;

  const prompt = h("textarea", {
    id: "prompt",
    rows: 6,
    value: typed.prompt,
    spellcheck: "false",
    oninput: () => {
      typed.prompt = prompt.value;
    },
  });
  const maxTokens = h("input", {
    type: "number",
    min: 1,
    max: 4096,
    value: typed.maxTokens,
    onchange: () => {
      typed.maxTokens = Number(maxTokens.value);
    },
  });
  const isNew = checkbox("isNew");
  const warms = checkbox("warms");
  const run = h("button", { type: "submit", class: "main" }, "Send to both");
  const stop = h("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const progress = h("span", { class: "dim", role: "status" });
  const note = h("p", { class: "dim" });
  const problems = h("div");

  const form = h(
    "form",
    {
      class: "card ask",
      onsubmit: (event) => {
        event.preventDefault();
        send();
      },
    },
    h("label", { for: "prompt" }, "Prompt, the same for both"),
    prompt,
    h(
      "div",
      { class: "row" },
      run,
      stop,
      h("label", {}, "at most ", maxTokens, " tokens"),
      h(
        "label",
        { title: "A number in front of the prompt, so that nobody has its beginning cached" },
        isNew,
        "new prompt each time",
      ),
      h("label", { title: "A sends it once before both do, so that A finds it cached" }, warms, "A has sent it before"),
      progress,
    ),
    note,
  );
  show(
    root,
    h("h1", {}, "The same prompt from two tenants"),
    problems,
    form,
    h(
      "div",
      { class: "sides" },
      sides.map((side) => side.element),
    ),
  );
  learnWhoAsks();
  return () => running?.abort();

  function checkbox(name) {
    return h("input", {
      type: "checkbox",
      checked: typed[name],
      onchange: (event) => {
        typed[name] = event.target.checked;
      },
    });
  }

  async function learnWhoAsks() {
    keysAreAsked = await hasTenants();
    if (!keysAreAsked) sides.forEach((side) => side.suggestSalt());
    drawNote();
  }

  function drawNote() {
    const [a, b] = sides.map((side) => side.typed);
    if (keysAreAsked === null) return;
    if (!keysAreAsked) {
      show(
        note,
        "There is no tenants file, so both sides are the one default tenant. ",
        a.salt === b.salt
          ? "With the same salt both share what is cached: B hits, too."
          : "Different salts keep them apart, as two tenants are kept apart.",
      );
    } else if (!a.key) {
      show(
        note,
        "Type an API key of each tenant (",
        code("coppice tenants add"),
        " makes one). Keys stay in the memory of this tab.",
      );
    } else if (!b.key || a.key === b.key) {
      show(
        note,
        "One key: the same tenant twice. ",
        a.salt === b.salt ? "Without different salts B hits, too." : "Different salts keep the sides apart.",
      );
    } else {
      show(
        note,
        "Two keys: two tenants, unless they are of one. Neither finds what the other has sent, unless a tenants file lets them share.",
      );
    }
  }

  async function send() {
    running?.abort();
    const mine = (running = new AbortController());
    show(problems);
    setRunning(true);
    const number = 1000 + Math.floor(Math.random() * 9000);
    const text = typed.isNew ? `Note ${number}. ${typed.prompt}` : typed.prompt;
    const [a, b] = sides;
    const keys = [a.typed.key, b.typed.key || a.typed.key];
    try {
      if (typed.warms) {
        progress.textContent = "A sends it for the first time …";
        sides.forEach((side) => side.clear());
        await a.warm(text, keys[0], mine.signal);
      }
      progress.textContent = "both send it …";
      await Promise.all(sides.map((side, place) => side.run(text, typed.maxTokens, keys[place], mine.signal)));
    } catch (problem) {
      if (problem.name !== "AbortError") show(problems, told(problem));
    } finally {
      if (running === mine) setRunning(false);
    }
  }

  function setRunning(isRunning) {
    run.disabled = isRunning;
    stop.disabled = !isRunning;
    if (!isRunning) progress.textContent = "";
  }
}

function told(problem) {
  if (!(problem instanceof Problem)) return notice("error", `The console failed: ${problem.message}`);
  const advice =
    problem.status === 401
      ? ["Type an API key of each side. `coppice tenants add FILE NAME` makes a tenant and prints its key."]
      : problem.advice;
  return notice("error", problem.message, ...advice);
}
