// The radix trees of one domain, and what a prompt would find in them.

import { Problem, cache, rest } from "../parts/api.js";
import { fillSelect, h, notice, show } from "../parts/dom.js";
import { ago, count, domainName, namespaceName, several } from "../parts/format.js";
import { Icicle } from "./icicle.js";
import { heldBlocks } from "./pool.js";

export const title = "Tree";

const PAGE_NODES = 1_024;
const PAGES_MAX = 16;
const DEPTH_MAX = 64;

// Of the prompt that was explained last, which other pages of this tab may go back to; it is stored nowhere.
const typed = { text: "", key: "" };

export function open(root, asked) {
  let domain = asked;
  let stats = null;
  const names = h("select", {
    "aria-label": "Domain",
    onchange: () => {
      location.hash = `#/tree/${encodeURIComponent(names.value)}`;
    },
  });
  const worker = h("select", { "aria-label": "Worker", onchange: () => look() });
  const again = h("button", { type: "button", onclick: () => look() }, "Look again");
  const facts = h("span", { class: "dim", role: "status" });
  const trees = h("div", { class: "trees" });
  const chosen = h(
    "section",
    { class: "card chosen" },
    h("h2", {}, "A node"),
    h("p", { class: "dim" }, "Choose one: what it is, who holds it, and what it is worth stand here."),
  );
  const problems = h("div");
  let icicles = [];
  let chosenTree = null; // of the node that was chosen: a tree with a salt is explained by its name only
  show(
    root,
    h("h1", {}, "What is cached"),
    problems,
    h("div", { class: "row" }, names, worker, again, facts),
    h("div", { class: "forest" }, trees, h("div", {}, chosen, explainForm())),
  );
  start();

  async function start() {
    try {
      stats = await cache("/v1/stats");
    } catch (problem) {
      fail(problem);
      return;
    }
    const held = new Map();
    for (const one of stats.workers.flatMap((entry) => entry.domains))
      held.set(one.domain, (held.get(one.domain) ?? 0) + one.cached_blocks);
    const domains = [...held].sort((a, b) => b[1] - a[1]).map(([name]) => name);
    if (!domains.length) {
      show(
        problems,
        notice(
          "empty",
          "Nothing is cached for anybody.",
          "Send a prompt, from the playground for example: its blocks make the first tree.",
        ),
      );
      return;
    }
    fillSelect(
      names,
      domains.map((name) => [name, `${domainName(name)} (${count(held.get(name))} blocks)`]),
    );
    names.value = domain = domains.includes(domain) ? domain : domains[0];
    fillSelect(worker, [["", "all workers"], ...stats.workers.map((one) => [one.worker_id, one.worker_id])]);
    showTrees();
  }

  async function look() {
    show(problems);
    try {
      stats = await cache("/v1/stats");
    } catch (problem) {
      fail(problem);
      return;
    }
    await showTrees();
  }

  async function showTrees() {
    try {
      const [found, isCut] = await pages(domain, worker.value);
      draw(found, isCut);
    } catch (problem) {
      fail(problem);
    }
  }

  function draw(found, isCut) {
    const nodes = found.reduce((sum, tree) => sum + tree.nodes.length - 1, 0);
    facts.textContent = `${several(nodes, "node")} in ${several(found.length, "tree")}${isCut ? ", the first of them: there are more" : ""}`;
    icicles = found
      .filter((tree) => tree.nodes.length > 1)
      .map((tree) => new Icicle(tree, (node) => describe(node, tree)));
    show(
      trees,
      icicles.length
        ? icicles.map((icicle) =>
            h(
              "section",
              { class: "card" },
              h(
                "h2",
                {},
                namespaceName(icicle.tree.namespace),
                h("span", { class: "dim" }, ` on ${icicle.tree.worker_id}`),
              ),
              icicle.element,
            ),
          )
        : notice(
            "empty",
            `Nothing is cached for ${domainName(domain)}.`,
            "Send a prompt as one of its tenants, from the playground for example.",
          ),
    );
  }

  function describe(node, tree) {
    chosenTree = tree;
    const last = node.first_block + node.num_blocks - 1;
    const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    show(
      chosen,
      h("h2", {}, "A node"),
      h(
        "dl",
        { class: "facts" },
        fact("blocks of the prompt", `${count(node.first_block)} to ${count(last)}`),
        fact("last used", ago(node.idle_ms)),
        fact("branches after it", count(node.num_children)),
        fact("pinned by", count(node.num_pins)),
      ),
      evictionOf(node, tree.worker_id, domain, stats).map((sentence) => h("p", {}, sentence)),
      h("p", { class: "dim mono" }, `seal ${node.node}`),
    );
  }

  function fail(problem) {
    show(problems, notice("error", problem.message, ...(problem.advice ?? [])));
  }

  // ---- what a prompt would find

  function explainForm() {
    const text = h("textarea", {
      rows: 3,
      "aria-label": "A prompt, or its tokens",
      placeholder: "A prompt as the chat API gets it, or its tokens: 1, 2, 3",
      value: typed.text,
      spellcheck: "false",
      oninput: () => {
        typed.text = text.value;
      },
    });
    const key = h("input", {
      type: "password",
      autocomplete: "off",
      placeholder: "API key, to tokenise text",
      "aria-label": "API key",
      value: typed.key,
      oninput: () => {
        typed.key = key.value.trim();
      },
    });
    const said = h("div", { role: "status" });
    return h(
      "form",
      {
        class: "card",
        onsubmit: (event) => {
          event.preventDefault();
          explain(said);
        },
      },
      h("h2", {}, "Explain a prompt"),
      text,
      h("div", { class: "row" }, key, h("button", { type: "submit" }, "Explain")),
      said,
    );
  }

  async function explain(said) {
    try {
      const tokens = await tokensOf(typed.text.trim(), typed.key);
      const answer = await cache("/v1/explain", { domain, tokens, namespace: chosenTree?.namespace ?? "" });
      show(
        said,
        answer.workers.map((found) =>
          h(
            "p",
            {},
            `${found.worker_id}, ${namespaceName(found.namespace)}: `,
            h("strong", {}, `${count(found.num_cached_tokens)} of ${count(tokens.length)} tokens`),
            ` are cached. ${found.sentence}`,
          ),
        ),
      );
      for (const icicle of icicles) {
        const found = answer.workers.find(
          (one) => one.worker_id === icicle.tree.worker_id && one.namespace === icicle.tree.namespace,
        );
        icicle.mark(found?.path ?? []);
      }
    } catch (problem) {
      show(said, notice("error", problem.message, ...(problem.advice ?? [])));
    }
  }
}

/** What may become of a node, in sentences. The cache tells no tokens, so what is shown is its state. */
function evictionOf(node, workerId, domain, stats) {
  if (node.num_pins) return ["It cannot be evicted: what runs reads it, or an operator pinned it."];
  const turn = node.num_children
    ? "It is evicted after all that follows it."
    : "It is a leaf: it may be evicted, the less it is worth the sooner.";
  const worker = stats.workers.find((one) => one.worker_id === workerId);
  const of = worker?.domains.find((one) => one.domain === domain);
  if (!of) return [turn];
  const over = heldBlocks(of) - of.guarantee_blocks;
  if (over > 0 && of.guarantee_blocks) {
    return [turn, `Others may evict up to ${several(over, "block")}, which its domain holds beyond its guarantee.`];
  }
  if (over > 0) return [turn, "Others may evict it: its domain is guaranteed nothing."];
  return [turn, "Only its own domain can evict it: it holds no more than it is guaranteed."];
}

/** All trees of a domain, page by page, and whether there is more. */
async function pages(domain, workerId) {
  const trees = new Map();
  let token = "";
  let isCut = false;
  for (let page = 0; page < PAGES_MAX; page++) {
    const query = new URLSearchParams({
      max_depth: DEPTH_MAX,
      limit: PAGE_NODES,
      page_token: token,
      worker_id: workerId,
    });
    const path = domain.split("/").map(encodeURIComponent).join("/");
    const found = await cache(`/v1/domains/${path}/tree?${query}`);
    for (const tree of found.trees) {
      const key = `${tree.worker_id} ${tree.namespace}`;
      if (trees.has(key)) trees.get(key).nodes.push(...tree.nodes);
      else trees.set(key, tree);
    }
    isCut ||= found.cut_by_depth;
    token = found.next_page_token;
    if (!token) break;
  }
  return [[...trees.values()], isCut || Boolean(token)];
}

/** Numbers are tokens already; text is a chat's message of a user, tokenised by the API. */
async function tokensOf(text, key) {
  if (!text) throw new Problem("There is no prompt.", "Type one, or a list of tokens.");
  if (/^\[?[\d\s,]+\]?$/.test(text)) return text.match(/\d+/g).map(Number);
  const models = await (await rest("/v1/models", { key })).json();
  const body = { model: models.data[0].id, messages: [{ role: "user", content: text }], add_generation_prompt: true };
  return (await (await rest("/tokenize", { key, body })).json()).tokens;
}
