// What became of workers between two looks at /v1/stats, and what one of them is like now.

import { shortEpoch } from "../parts/format.js";

export class Workers {
  constructor() {
    this.known = null; // by id, also those that are gone; null before the first look
  }

  /** Takes what was told of all workers. Returns what happened: {kind, worker, words}. */
  take(workers) {
    const before = this.known ?? new Map(workers.map((one) => [one.worker_id, one]));
    const here = new Map(workers.map((one) => [one.worker_id, one]));
    const gone = [...before.values()].filter((one) => !one.isGone && !here.has(one.worker_id));
    this.known = new Map([...before, ...here]);
    gone.forEach((one) => this.known.set(one.worker_id, { ...one, isGone: true }));
    return [
      ...gone.map((one) => ({ kind: "gone", worker: one.worker_id, words: "gone: it was not heard for too long" })),
      ...workers.flatMap((one) => changes(before.get(one.worker_id), one)),
    ];
  }
}

function changes(was, is) {
  const event = (kind, words) => ({ kind, worker: is.worker_id, words });
  if (!was) return [event("joined", `registered, epoch ${shortEpoch(is.worker_epoch)}`)];
  if (was.worker_epoch !== is.worker_epoch)
    return [event("fenced", `fenced, epoch ${epochs(was, is)}: what it had cached is gone`)];
  return [
    ...(was.isGone ? [event("joined", `back, still of epoch ${shortEpoch(is.worker_epoch)}`)] : []),
    ...(was.draining !== is.draining
      ? [event("drains", is.draining ? "drains: it takes no new request" : "takes requests again")]
      : []),
    ...(was.owner !== is.owner ? [event("owned", plannedBy(is))] : []),
  ];
}

function epochs(was, is) {
  return [was, is].map((one) => shortEpoch(one.worker_epoch)).join(" → ");
}

/** Of one worker in /v1/stats. */
export function plannedBy(worker) {
  return worker.owner ? `planned for by session ${shortEpoch(worker.owner)}` : "no scheduler plans for it";
}
