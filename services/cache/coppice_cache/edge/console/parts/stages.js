// Stages of a request's life, by the names that the request log has for them (coppice/request_log/stages.py).

import { count, holderName } from "./format.js";

export const WORK = ["front_door", "prefill", "decode"];

// What it is; what goes before its blocker, "" where nobody is to be named; and whom it waits for where no blocker is
// told. Of what is no wait (work, what has no length, what was left out) the last one is "".
const STAGES = {
  queued: ["in the queue", "of its own tenant before it", "turns of others"],
  no_slot: ["no running slot was free", "slots held by", "running slots"],
  pool_full: ["no block was free", "blocks held by", "free blocks"],
  asked_back: ["blocks were asked back", "borrowed blocks of", ""],
  domain_maximum: ["its domain held its maximum", "", "own maximum"],
  domain_unknown: ["its domain was not known yet", "", "tenants file"],
  no_worker: ["no worker took requests", "", "workers"],
  no_cache: ["the cache service was away", "", "cache service"],
  acquire: ["asked for memory", "", "cache service"],
  prefix: ["another one computed the same beginning", "tokens", "same prefix"],
  fork: ["another answer computed the prompt", "", "own answers"],
  prefill: ["computes the prompt", "tokens on", ""],
  decode: ["writes tokens", "on", ""],
  slow_step: ["a slow step", "on", "workers"],
  preempted: ["gave way", "because of", ""],
  restarted: ["began again", "because of", ""],
  front_door: ["at its front door", "", ""],
  moved: ["went to another planner", "", "planners"],
  omitted: ["left out", "stages", ""],
};
const UNKNOWN = ["", "", "nobody"]; // of a service that is newer than this page
const AMOUNT_IS_NO_NUMBER = ["decode", "slow_step"]; // of what the blocker has

/** In words, such as "no block was free". */
export function stageName(kind) {
  return STAGES[kind]?.[0] ?? kind.replaceAll("_", " ");
}

/** Who was ahead, who held what: such as "412 blocks held by search". */
export function blockerWords(kind, blocker, amount) {
  const [, words] = STAGES[kind] ?? UNKNOWN;
  if (kind === "queued" && amount) return `${amount} ${words}`;
  if (kind === "prefix" || kind === "omitted") return amount ? `${count(amount)} ${words}` : "";
  if (!blocker) return "";
  const number = amount && !AMOUNT_IS_NO_NUMBER.includes(kind) ? `${count(amount)} ` : "";
  return `${number}${words} ${holderName(blocker)}`.trim();
}

/** Whom a stage of `tenant` waits for; "": it is no wait. */
export function waitsFor(kind, tenant, blocker, amount) {
  const [, , others] = STAGES[kind] ?? UNKNOWN;
  if (!others) return "";
  if (blocker) return holderName(blocker);
  return kind === "queued" && amount ? tenant : others;
}
