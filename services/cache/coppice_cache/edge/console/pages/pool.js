// One pool as it was told last, and what changed since the time before.

import { count, domainName, several } from "../parts/format.js";

export const FREE = 0;
export const LEASED = 1;
export const CACHED = 2;
export const DRAINING = 3;
export const STATES = ["free", "leased", "cached", "draining"];

export const FLASHES = ["", "granted", "cached", "evicted", "released", "fenced", "acknowledged"];
const [, GRANTED, COMPUTED, EVICTED, RELEASED, FENCED, ACKNOWLEDGED] = FLASHES.keys();
const WORDS = {
  granted: "blocks granted",
  cached: "blocks cached",
  evicted: "blocks evicted",
  released: "blocks given back",
  fenced: "blocks wait for a fence",
  acknowledged: "blocks free after a fence",
};

// Counters of /v1/blocks that only grow, and what one more and several more of them are.
const COUNTED = {
  promoted: ["total_promoted", "block came from", "blocks came from"],
  demoted: ["total_demoted", "block went to", "blocks went to"],
  fenced: ["total_fences", "fence sent to it", "fences sent to it"],
};
const OF_COPIES = ["promoted", "demoted"];

export class Pool {
  constructor() {
    this.domains = []; // names; a cell is 4 * place here + state, and places never change
    this.places = new Map();
    this.cells = new Uint16Array(0);
    this.flashes = new Uint8Array(0); // what just happened to each block: a place in FLASHES
    this.told = null;
  }

  /** Takes an answer of /v1/blocks about this tier. Returns what happened, of a domain or of the worker:
   *  {kind, domain or worker, words}. */
  take(answer, tier) {
    const cells = this.own(decoded(answer), answer.domains);
    const [before, told] = [this.cells, this.told];
    const isSame = told && isOfOneWorker(told, answer) && cells.length === before.length;
    this.cells = cells;
    this.told = answer;
    this.flashes = new Uint8Array(cells.length);
    return isSame ? [...this.compare(before), ...taken(told, answer), ...counted(told, answer, tier)] : [];
  }

  get numFree() {
    return this.told.num_blocks - this.told.domains.reduce((sum, domain) => sum + heldBlocks(domain), 0);
  }

  domainOf(cell) {
    return this.domains[cell >> 2];
  }

  describe(block) {
    if (!(block in this.cells)) return "Point at a block, or move over the map with the arrow keys.";
    const cell = this.cells[block];
    const words = {
      [FREE]: "free",
      [LEASED]: "in use by",
      [CACHED]: "cached for",
      [DRAINING]: "waits for a fence; it was used by",
    }[cell & 3];
    return `Block ${block}: ${words}${cell & 3 ? ` ${domainName(this.domainOf(cell))}` : ""}`;
  }

  /** Cells with places of our own instead of those of one answer. */
  own(cells, domains) {
    const table = new Uint16Array(4 * (domains.length + 1));
    domains.forEach(({ domain }, place) => {
      if (!this.places.has(domain)) {
        this.places.set(domain, this.domains.length);
        this.domains.push(domain);
      }
      for (let state = LEASED; state <= DRAINING; state++)
        table[4 * (place + 1) + state] = 4 * this.places.get(domain) + state;
    });
    return cells.map((cell) => table[cell]);
  }

  /** What happened to blocks since `before`: their flashes, and a sum for each kind and domain. */
  compare(before) {
    const numbers = new Uint32Array(FLASHES.length * this.domains.length); // [place in FLASHES, place of the domain]
    const happened = (block, kind, cell) => {
      numbers[kind * this.domains.length + (cell >> 2)]++;
      this.flashes[block] ||= kind; // an eviction is seen, although its block is granted at once
    };
    for (let block = 0; block < before.length; block++) {
      const was = before[block];
      const is = this.cells[block];
      if (was === is) continue;
      const from = was & 3;
      const to = is & 3;
      if (from === CACHED) happened(block, EVICTED, was);
      if (to === DRAINING) happened(block, FENCED, is);
      else if (to === LEASED) happened(block, GRANTED, is);
      else if (to === CACHED) happened(block, COMPUTED, is);
      else if (from === LEASED) happened(block, RELEASED, was);
      else if (from === DRAINING) happened(block, ACKNOWLEDGED, was);
    }
    return [...numbers.keys()]
      .filter((at) => numbers[at])
      .map((at) => {
        const kind = FLASHES[Math.floor(at / this.domains.length)];
        return { kind, domain: this.domains[at % this.domains.length], words: `${count(numbers[at])} ${WORDS[kind]}` };
      });
  }
}

function isOfOneWorker(was, is) {
  return was.worker_id === is.worker_id && was.worker_epoch === is.worker_epoch;
}

/** Leases of domains that were fenced since, as they did not give back what they had borrowed. */
function taken(was, is) {
  const before = new Map(was.domains.map((domain) => [domain.domain, domain.fenced_leases]));
  return is.domains
    .map(({ domain, fenced_leases }) => ({ domain, number: fenced_leases - (before.get(domain) ?? fenced_leases) }))
    .filter(({ number }) => number > 0)
    .map(({ domain, number }) => ({ kind: "fenced", domain, words: `${several(number, "lease")} lost to a fence` }));
}

/** What went on within the worker, by counters: a copy or a fence may begin and end between two looks. */
function counted(was, is, tier) {
  const below = tier === "disk" ? "the disk" : "host memory";
  return Object.entries(COUNTED)
    .map(([kind, [name, one, more]]) => ({ kind, number: is[name] - was[name], one, more }))
    .filter(({ number }) => number > 0)
    .map(({ kind, number, one, more }) => {
      const words = several(number, one, more);
      return { kind, worker: is.worker_id, words: OF_COPIES.includes(kind) ? `${words} ${below}` : words };
    });
}

/** What a domain has of a pool, in whatever state. */
export function heldBlocks(domain) {
  return domain.leased_blocks + domain.cached_blocks + domain.draining_blocks;
}

function decoded(answer) {
  const cells = new Uint16Array(bytes(answer.cells).buffer);
  if (answer.run_lengths === null) return cells;
  const lengths = new Uint32Array(bytes(answer.run_lengths).buffer);
  const all = new Uint16Array(answer.num_blocks);
  let start = 0;
  lengths.forEach((length, run) => {
    all.fill(cells[run], start, start + length);
    start += length;
  });
  return all;
}

function bytes(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) found[at] = text.charCodeAt(at);
  return found;
}
