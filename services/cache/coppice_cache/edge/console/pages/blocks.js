// A live map of one worker's pool: who has each block, what just changed, and how far each domain is from its guarantee.

import { cache } from "../parts/api.js";
import { colour } from "../parts/colours.js";
import { fillSelect, h, notice, poll, show } from "../parts/dom.js";
import { count, domainName, several, shortEpoch } from "../parts/format.js";
import { BlockMap } from "./block_canvas.js";
import { Pool, heldBlocks } from "./pool.js";
import { Workers, plannedBy } from "./workers.js";

export const title = "Blocks";

const EVERY_MS = 1_000;
const LINES_MAX = 60;
const chosen = { worker: "", tier: "device", order: "place" };

export function open(root) {
  let pool = new Pool();
  const workers = new Workers();
  let isPaused = false;
  const worker = h("select", {
    "aria-label": "Worker",
    onchange: () => {
      chosen.worker = worker.value;
      again();
    },
  });
  const tier = h("select", {
    "aria-label": "Tier",
    onchange: () => {
      chosen.tier = tier.value;
      again();
    },
  });
  const order = h(
    "select",
    {
      "aria-label": "Order",
      value: chosen.order,
      onchange: () => {
        chosen.order = order.value;
        map.draw(pool, order.value);
      },
    },
    h("option", { value: "place" }, "by place in the pool"),
    h("option", { value: "domain" }, "by domain"),
  );
  order.value = chosen.order;
  const pause = h(
    "button",
    {
      type: "button",
      onclick: () => {
        isPaused = !isPaused;
        pause.textContent = isPaused ? "Go on" : "Pause";
      },
    },
    "Pause",
  );
  const facts = h("p", { class: "dim", role: "status" });
  const place = h("p", { class: "dim place" }, "Point at a block, or move over the map with the arrow keys.");
  const problems = h("div");
  const bars = h("div", { class: "bars" });
  const log = h("ol", { class: "log", "aria-label": "What happened" });
  const map = new BlockMap((block) => {
    place.textContent = pool.describe(block);
  });

  const body = h(
    "div",
    { class: "blocks" },
    h(
      "section",
      { class: "card map" },
      h("div", { class: "row" }, worker, tier, order, pause, legend()),
      facts,
      map.element,
      place,
    ),
    h("section", { class: "card" }, h("h2", {}, "Domains"), bars),
    h("section", { class: "card happened" }, h("h2", {}, "What happened"), log),
  );
  show(root, h("h1", {}, "Who has each block"), problems, body);
  const stop = poll(EVERY_MS, look);
  return () => {
    stop();
    map.close();
  };

  function again() {
    pool = new Pool();
    log.replaceChildren();
    look();
  }

  async function look() {
    if (isPaused) return;
    const asked = pool;
    try {
      const stats = await cache("/v1/stats");
      tell(workers.take(stats.workers));
      if (!stats.workers.length) {
        body.hidden = true;
        show(
          problems,
          notice(
            "empty",
            "No worker is registered.",
            "Start one with --cache HOST:PORT of this service's sessions; its blocks appear here as soon as it has registered.",
          ),
        );
        return;
      }
      const one = choose(stats.workers);
      const found = await cache(`/v1/blocks?worker=${encodeURIComponent(worker.value)}&tier=${tier.value}`);
      if (asked !== pool) return; // another one was chosen meanwhile
      const happened = pool.take(found, tier.value);
      body.hidden = false;
      show(problems);
      draw(one, found, happened);
    } catch (problem) {
      show(problems, notice("error", problem.message, ...(problem.advice ?? [])));
    }
  }

  /** The worker that is shown. */
  function choose(workers) {
    fillSelect(
      worker,
      workers.map((one) => [one.worker_id, one.draining ? `${one.worker_id} (drains)` : one.worker_id]),
    );
    if (workers.some((one) => one.worker_id === chosen.worker)) worker.value = chosen.worker;
    const one = workers.find((entry) => entry.worker_id === worker.value);
    const tiers = tiersOf(one);
    fillSelect(tier, tiers);
    if (tiers.some(([name]) => name === chosen.tier)) tier.value = chosen.tier;
    tier.hidden = tiers.length === 1;
    return one;
  }

  function draw(one, found, happened) {
    const below = tier.value === "disk" ? "the disk" : "the host";
    const copies = [
      [found.num_promoting, `blocks come from ${below}`],
      [found.num_demoting, `blocks go to ${below}`],
    ];
    show(
      facts,
      h("strong", {}, one.worker_id),
      " · ",
      [
        `epoch ${shortEpoch(one.worker_epoch)}`,
        plannedBy(one),
        `${count(found.num_blocks)} blocks of ${found.block_size} tokens`,
        `${count(pool.numFree)} free`,
        ...(tier.value === "device" ? belowOf(one) : []),
        ...(found.open ? [] : ["recovering: it grants nothing yet"]),
        ...(found.fences ? [`${several(found.fences, "fence")} not acknowledged`] : []),
        ...copies.filter(([number]) => number).map(([number, words]) => `${count(number)} ${words}`),
      ].join(" · "),
      one.draining ? h("strong", { class: "drains" }, " · drains: it takes no new request") : null,
    );
    map.draw(pool, order.value, happened.length > 0);
    show(
      bars,
      found.domains.map((domain) => bar(domain, found.num_blocks)),
      found.domains.length
        ? null
        : h("p", { class: "dim" }, "No domain holds a block. Send a prompt: its blocks appear here."),
    );
    tell(happened);
  }

  /** The newest first. */
  function tell(happened) {
    const at = new Date().toLocaleTimeString("en-GB");
    for (const { kind, domain, worker: of, words } of happened) {
      const background = of ? "var(--dim)" : colour(domain);
      log.prepend(
        h(
          "li",
          { class: kind, "data-kind": kind },
          h("time", {}, at),
          h("i", { style: { background } }),
          h("span", {}, `${of ?? domainName(domain)}: ${words}`),
        ),
      );
    }
    while (log.children.length > LINES_MAX) log.lastChild.remove();
  }
}

/** Names and words of the tiers that a worker has. */
function tiersOf(one) {
  return [
    ["device", "device"],
    ...(one.num_host_blocks ? [["host", "host memory"]] : []),
    ...(one.num_disk_blocks ? [["disk", "disk"]] : []),
  ];
}

/** How much of what is below the device is used. */
function belowOf(one) {
  return tiersOf(one)
    .slice(1)
    .map(([name, words]) => {
      const all = one[`num_${name}_blocks`];
      return `${words}: ${count(all - one[`${name}_free_blocks`])} of ${count(all)} used`;
    });
}

function legend() {
  const key = (kind, words) => h("span", {}, h("i", { class: kind }), words);
  return h(
    "span",
    { class: "key" },
    key("leased", "in use"),
    key("cached", "cached"),
    key("draining", "waits for a fence"),
    key("free", "free"),
    key("flash granted", "just granted"),
    key("flash computed", "just cached"),
    key("flash evicted", "just evicted"),
  );
}

function bar(domain, numBlocks) {
  const percent = (blocks) => `${(100 * blocks) / numBlocks}%`;
  const held = heldBlocks(domain);
  const parts = ["leased", "cached", "draining"].map((state) =>
    h("i", {
      class: state,
      style: { width: percent(domain[`${state}_blocks`]), background: colour(domain.domain, state) },
    }),
  );
  const marks = [
    domain.guarantee_blocks
      ? h("b", { class: "guarantee", style: { width: percent(domain.guarantee_blocks) }, title: "guarantee" })
      : null,
    domain.maximum_blocks && domain.maximum_blocks < numBlocks
      ? h("b", { class: "maximum", style: { left: percent(domain.maximum_blocks) }, title: "maximum" })
      : null,
  ];
  const words = [
    `${count(held)} held`,
    domain.guarantee_blocks ? `of ${count(domain.guarantee_blocks)} guaranteed` : "nothing guaranteed",
    ...(held > domain.guarantee_blocks && domain.guarantee_blocks
      ? [`${count(held - domain.guarantee_blocks)} borrowed`]
      : []),
    ...(domain.pinned_blocks ? [`${count(domain.pinned_blocks)} pinned`] : []),
    `${count(domain.evicted_blocks)} evicted so far`,
  ];
  return h(
    "div",
    { class: "domain" },
    h(
      "div",
      {},
      h("i", { class: "dot", style: { background: colour(domain.domain) } }),
      h("strong", {}, domainName(domain.domain)),
      h("span", { class: "dim" }, words.join(" · ")),
    ),
    h("div", { class: "bar", role: "img", "aria-label": words.join(", ") }, parts, marks),
  );
}
