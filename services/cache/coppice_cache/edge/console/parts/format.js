// Numbers and times as people read them.

const GROUPED = new Intl.NumberFormat("en");

export function count(value) {
  return GROUPED.format(value);
}

/** Such as "1 worker" and "3 workers". */
export function several(number, noun, nouns = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : nouns}`;
}

export function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part === whole || part === 0 ? 0 : 1)} %` : "–";
}

/** Milliseconds with a unit that fits. */
export function time(ms) {
  if (ms >= 60_000) return `${(ms / 60_000).toFixed(1)} min`;
  if (ms >= 1_000) return `${(ms / 1_000).toFixed(2)} s`;
  return ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

export function ago(ms) {
  if (ms < 1_000) return "now";
  const [value, unit] =
    ms < 60_000
      ? [ms / 1_000, "s"]
      : ms < 3_600_000
        ? [ms / 60_000, "min"]
        : ms < 86_400_000
          ? [ms / 3_600_000, "h"]
          : [ms / 86_400_000, "days"];
  return `${Math.floor(value)} ${unit} ago`;
}

const EPOCH_DIGITS = 4;

/** The end of an epoch of a worker or a session, in which the next one differs, and which logs can be searched for. */
export function shortEpoch(epoch) {
  const digits = String(epoch);
  return digits.length > EPOCH_DIGITS ? `…${digits.slice(-EPOCH_DIGITS)}` : digits;
}

/** The middle of sorted numbers, or another quantile; null of none. */
export function quantile(sorted, at) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(at * sorted.length))] : null;
}

/** Names that no operator gave: of blocks whose owner is not known, and of all domains that are not told apart. */
export function domainName(domain) {
  return { "": "nobody", "\0unknown": "unknown (from before a restart)", "\0others": "all others" }[domain] ?? domain;
}

/** A domain of one tenant by that tenant's name, as requests name it; all else as it is. */
export function holderName(domain) {
  return domainName(domain.replace(/^tenant\//, ""));
}

const NAMESPACE_FIELDS = 7; // model, revision, type of KV, block size, rope, adapter, its revision; then a salt
const MODEL = 0;
const KV_TYPE = 2;
const ADAPTER = 5;

/** What a namespace (in hexadecimal) says of itself: its model, type of KV and adapter, and whether it is of a salt. */
export function namespaceName(hex) {
  const fields = fieldsOf(Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16)));
  if (!fields) return `${hex.slice(0, 16)}${hex.length > 16 ? "…" : ""}`;
  const salt = fields[NAMESPACE_FIELDS];
  const texts = fields.slice(0, NAMESPACE_FIELDS).map((bytes) => new TextDecoder().decode(bytes));
  const parts = [
    texts[MODEL],
    texts[KV_TYPE],
    texts[ADAPTER],
    salt ? `salt ${hex.slice(-2 * salt.length).slice(0, 8)}` : "",
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Tagged fields with their lengths, as the services write them; null where the bytes are something else. */
function fieldsOf(bytes) {
  const fields = [];
  const view = new DataView(bytes.buffer);
  for (let at = 0; at < bytes.length;) {
    if (at + 5 > bytes.length || bytes[at] !== fields.length + 1) return null;
    const end = at + 5 + view.getUint32(at + 1, true);
    if (end > bytes.length) return null;
    fields.push(bytes.slice(at + 5, end));
    at = end;
  }
  return fields.length >= NAMESPACE_FIELDS ? fields : null;
}
