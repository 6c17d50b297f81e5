// What the console asks, and what an operator can do where nobody answers.

const elsewhere = { requests_url: "", rest_url: "", version: "" };

/** A problem in words: `message` is what is wrong, `advice` what to do. */
export class Problem extends Error {
  constructor(message, ...advice) {
    super(message);
    this.advice = advice;
  }
}

export async function loadElsewhere() {
  Object.assign(elsewhere, await cache("/console/config.json"));
}

/** Whether the services have a tenants file: whoever has none asks for no keys. */
export async function hasTenants() {
  return "tenants_version" in (await readiness());
}

/** What is not as it should be; told with another status than 200 where nothing is served, too. */
export async function readiness() {
  const response = await fetch("/readyz");
  return response.json();
}

export function version() {
  return elsewhere.version;
}

export function restUrl() {
  return elsewhere.rest_url;
}

/** The cache service's own REST: GET, or POST with a body. */
export async function cache(path, body) {
  const options = body === undefined ? {} : posted(body);
  const response = await fetch(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Problem(
      "The cache service does not answer.",
      "It served this page, so it has ended or is being started again.",
      "This page asks again by itself.",
    );
  });
  return parsed(response, "The cache service");
}

/** The scheduler's operator port. */
export async function requests(path) {
  const url = elsewhere.requests_url;
  if (!url) {
    throw new Problem(
      "Nobody said where requests are told.",
      "Start the scheduler with --metrics-port PORT, and the cache service with --requests-url http://HOST:PORT.",
    );
  }
  const response = await fetch(url + path, { credentials: "include" }).catch(() => {
    throw new Problem(
      `The scheduler's operator port does not answer at ${url}.`,
      `Start the scheduler with --metrics-port, and with --console-origins ${location.origin}, without which your browser ` +
        "keeps its answers from this page.",
      ...(url.startsWith("https:")
        ? [`Your browser must trust its certificate, and show an operator's: open ${url}/requests once.`]
        : []),
    );
  });
  return parsed(response, "The scheduler");
}

/** The public API, as a tenant with this key. The response itself: a stream has to be read by whoever asked. */
export async function rest(path, { key = "", body, signal } = {}) {
  const url = elsewhere.rest_url;
  if (!url) {
    throw new Problem("Nobody said where the API is.", "Start the cache service with --rest-url http://HOST:PORT.");
  }
  const options = body === undefined ? { headers: {} } : posted(body);
  if (key) options.headers.Authorization = `Bearer ${key}`;
  const response = await fetch(url + path, { ...options, signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Problem(
      `The API does not answer at ${url}.`,
      `Start the scheduler, with --cors-origins ${location.origin}: without it your browser keeps its answers from this page.`,
    );
  });
  if (!response.ok) await parsed(response, "The API");
  return response;
}

function posted(body) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

async function parsed(response, who) {
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const said = body?.error?.message ?? `status ${response.status}`;
  const problem = new Problem(`${who} refused: ${said}`);
  problem.status = response.status;
  throw problem;
}
