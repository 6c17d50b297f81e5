// Tenants: memory by domain against what is guaranteed, what is at work against limits, and what became of requests.

import { cache, requests } from "../parts/api.js";
import { colour } from "../parts/colours.js";
import { cell, h, notice, number, poll, show, table } from "../parts/dom.js";
import { count, domainName, several, quantile, share, time } from "../parts/format.js";
import { WORK } from "../parts/stages.js";

import { heldBlocks } from "./pool.js";
import { isCall } from "./requests.js";

export const title = "Tenants";

const EVERY_MS = 3_000;
const CANCELLED = 499; // by its client, or by another call of its tenant
const DOMAIN_COLUMNS = [
  ...["domain", "of all pools", "held#", "share#", "guaranteed#", "borrowed#", "at most#", "pinned#", "leases#"],
  ...["prompts cached#", "evicted#", ""],
];
const LIMIT_COLUMNS = [
  ...["tenant", "running#", "waiting#", "together at most#", "queued at most#", "weight#", "requests a minute#"],
  ...["tokens a minute#", "tokens this month#"],
];
const TENANT_COLUMNS = [
  ...["tenant", "requests#", "refused#", "cancelled#", "failed#", "tokens in#", "cached#", "tokens out#"],
  ...["queue p50#", "queue p95#", "first token p50#", "p95#", "waits most for"],
];
const SUMMED = [
  "leased_blocks",
  "cached_blocks",
  "draining_blocks",
  "pinned_blocks",
  "guarantee_blocks",
  "maximum_blocks",
  "leases",
  "hit_tokens",
  "query_tokens",
  "evicted_blocks",
];

export function open(root) {
  const memory = h("section", { class: "card" }, notice("loading", "Asking the cache service …"));
  const atWork = h("section", { class: "card" }, notice("loading", "Asking the scheduler …"));
  const asked = h("section", { class: "card" }, notice("loading", "Asking the scheduler …"));
  show(root, h("h1", {}, "Tenants"), memory, atWork, asked);
  return poll(EVERY_MS, () =>
    Promise.all([
      attempt(memory, "Memory", async () => drawMemory(await cache("/v1/stats"))),
      attempt(atWork, "At work, and limits", async () => drawLimits(await requests("/tenants?limit=1000"))),
      attempt(asked, "Requests", async () => drawRequests((await requests("/requests?limit=1000")).requests)),
    ]),
  );
}

async function attempt(section, name, draw) {
  try {
    show(section, h("h2", {}, name), await draw());
  } catch (problem) {
    show(section, h("h2", {}, name), notice("error", problem.message, ...(problem.advice ?? [])));
  }
}

function drawMemory(stats) {
  const numBlocks = stats.workers.reduce((sum, worker) => sum + worker.num_blocks, 0);
  const domains = summed(stats.workers.flatMap((worker) => worker.domains));
  if (!domains.length)
    return notice(
      "empty",
      "No domain has asked for memory.",
      "Domains appear with their first request, and those of a tenants file with the first worker.",
    );
  const words = `${several(numBlocks, "block")} on ${several(stats.workers.length, "worker")}.`;
  return [
    h("p", { class: "dim" }, `${words} A bar shows what is in use, cached and draining; its frame is the guarantee.`),
    table(
      DOMAIN_COLUMNS,
      domains.map((domain) => domainRow(domain, numBlocks)),
    ),
  ];
}

function domainRow(domain, numBlocks) {
  const held = heldBlocks(domain);
  const width = (blocks) => ({ width: `${(100 * blocks) / Math.max(1, numBlocks)}%` });
  const bar = h(
    "div",
    { class: "bar" },
    ["leased", "cached", "draining"].map((state) =>
      h("i", {
        class: state,
        style: { ...width(domain[`${state}_blocks`]), background: colour(domain.domain, state) },
      }),
    ),
    domain.guarantee_blocks ? h("b", { class: "guarantee", style: width(domain.guarantee_blocks) }) : null,
  );
  return h(
    "tr",
    {},
    cell(h("i", { class: "dot", style: { background: colour(domain.domain) } }), domainName(domain.domain)),
    h("td", { class: "wide" }, bar),
    number(count(held)),
    number(share(held, numBlocks)),
    number(domain.guarantee_blocks ? count(domain.guarantee_blocks) : "–"),
    number(count(domain.guarantee_blocks ? Math.max(0, held - domain.guarantee_blocks) : held)),
    number(count(Math.min(domain.maximum_blocks, numBlocks))),
    number(count(domain.pinned_blocks)),
    number(count(domain.leases)),
    number(share(domain.hit_tokens, domain.query_tokens)),
    number(count(domain.evicted_blocks)),
    cell(h("a", { href: `#/tree/${encodeURIComponent(domain.domain)}` }, "tree")),
  );
}

/** Over all workers, those that hold most first. */
function summed(rows) {
  const found = new Map();
  for (const row of rows) {
    const sum = found.get(row.domain) ?? { domain: row.domain, ...Object.fromEntries(SUMMED.map((name) => [name, 0])) };
    SUMMED.forEach((name) => {
      sum[name] += row[name];
    });
    found.set(row.domain, sum);
  }
  const size = (domain) => domain.leased_blocks + domain.cached_blocks;
  return [...found.values()].sort((a, b) => size(b) - size(a) || (a.domain < b.domain ? -1 : 1));
}

function drawLimits(answer) {
  const more = answer.num_tenants - answer.tenants.length;
  const words = "Of a minute's limits what is left, of a month's budget what was used; – is no limit.";
  return [
    h("p", { class: "dim" }, more ? `${words} ${several(more, "tenant")} with less at work are left out.` : words),
    table(LIMIT_COLUMNS, answer.tenants.map(limitRow)),
  ];
}

function limitRow(tenant) {
  const ofLimit = (limit, value) =>
    number(limit ? (value === null ? count(limit) : `${count(value)} of ${count(limit)}`) : "–");
  const atMost = (value, limit) =>
    number(value >= limit ? h("span", { class: "bad" }, `${count(limit)}: full`) : count(limit));
  const monthly = tenant.tokens_per_month || tenant.soft_tokens_per_month;
  const isUsedUp = tenant.tokens_per_month && tenant.tokens_of_month >= tenant.tokens_per_month;
  return h(
    "tr",
    { "data-tenant": tenant.tenant },
    cell(
      tenant.tenant,
      tenant.domain === `tenant/${tenant.tenant}` ? "" : h("span", { class: "dim" }, ` in ${tenant.domain}`),
    ),
    number(count(tenant.running)),
    number(count(tenant.waiting)),
    atMost(tenant.running + tenant.waiting, tenant.concurrency),
    number(count(tenant.max_queued)),
    number(count(tenant.weight)),
    ofLimit(tenant.requests_per_minute, tenant.requests_left),
    ofLimit(tenant.tokens_per_minute, tenant.tokens_left),
    h("td", { class: isUsedUp ? "number bad" : "number" }, monthOf(tenant, monthly)),
  );
}

/** Such as "120 of 1,000", and "120, told from 500 on" of a budget that is only told of. */
function monthOf(tenant, monthly) {
  if (!monthly) return "–";
  const used = count(tenant.tokens_of_month);
  return tenant.tokens_per_month ? `${used} of ${count(monthly)}` : `${used}, told from ${count(monthly)} on`;
}

function drawRequests(records) {
  if (!records.length) return notice("empty", "No request has ended yet.", "Send one from the playground.");
  const byTenant = grouped(records.filter(isCall), (record) => record.tenant ?? "");
  const rows = byTenant.map(([tenant, own]) => tenantRow(tenant, own));
  return [
    h("p", { class: "dim" }, `Of the newest ${several(records.length, "request")}, those that asked for an answer.`),
    table(TENANT_COLUMNS, rows),
  ];
}

/** [group, its members] of all groups, the largest first. */
function grouped(members, groupOf) {
  const found = new Map();
  for (const member of members) {
    const group = groupOf(member);
    if (!found.has(group)) found.set(group, []);
    found.get(group).push(member);
  }
  return [...found].sort((a, b) => b[1].length - a[1].length);
}

function tenantRow(tenant, records) {
  const sum = (name) => records.reduce((total, record) => total + (record[name] ?? 0), 0);
  const sorted = (name) =>
    records
      .map((record) => record[name] ?? 0)
      .filter((value) => value > 0)
      .sort((a, b) => a - b);
  const at = (name, part) => {
    const value = quantile(sorted(name), part);
    return value === null ? "–" : time(value);
  };
  const cancelled = records.filter((record) => record.status === CANCELLED).length;
  const failed = records.filter((record) => record.status >= 500).length;
  const refused = records.filter((record) => record.status >= 400).length - failed - cancelled;
  const waits = records.map((record) => record.cause).filter((cause) => cause && ![...WORK, "omitted"].includes(cause));
  const [most] = grouped(waits, (cause) => cause.replaceAll("_", " "));
  return h(
    "tr",
    {},
    cell(tenant || h("span", { class: "dim" }, "nobody")),
    number(count(records.length)),
    number(count(refused)),
    number(count(cancelled)),
    number(count(failed)),
    number(count(sum("tokens_in"))),
    number(share(sum("tokens_cached"), sum("tokens_in"))),
    number(count(sum("tokens_out"))),
    number(at("queue_ms", 0.5)),
    number(at("queue_ms", 0.95)),
    number(at("ttft_ms", 0.5)),
    number(at("ttft_ms", 0.95)),
    cell(most ? `${most[0]} (${most[1].length})` : h("span", { class: "dim" }, "nothing")),
  );
}
