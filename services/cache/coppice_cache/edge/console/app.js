// The frame: pages by their hash, theme, keys, and the state of the cache service on every page.

import { cache, loadElsewhere, readiness, version } from "./parts/api.js";
import { learn } from "./parts/colours.js";
import { h, notice, poll, show } from "./parts/dom.js";
import { count, several } from "./parts/format.js";
import * as blocks from "./pages/blocks.js";
import * as playground from "./pages/playground.js";
import * as requests from "./pages/requests.js";
import * as tenants from "./pages/tenants.js";
import * as tree from "./pages/tree.js";
import * as waits from "./pages/waits.js";

const PAGES = { playground, blocks, requests, tree, tenants, waits };
const STATE_MS = 3_000;
const THEMES = { auto: "◐", light: "☀", dark: "☾" };
const THEME = "coppice-theme"; // the one thing that the browser keeps

const root = document.getElementById("page");
let leave = () => {};

function open() {
  const [name, ...rest] = location.hash.replace(/^#\//, "").split("/");
  const page = PAGES[name] ?? playground;
  leave();
  document.title = `${page.title} · Coppice`;
  for (const tab of document.querySelectorAll("#tabs a")) {
    tab.toggleAttribute("aria-current", tab.dataset.page === page.title);
    if (tab.dataset.page === page.title) {
      tab.setAttribute("aria-current", "page");
      tab.parentElement.scrollLeft = tab.offsetLeft - (tab.parentElement.clientWidth - tab.offsetWidth) / 2;
    }
  }
  root.replaceChildren();
  scrollTo(0, 0);
  leave = page.open(root, decodeURIComponent(rest.join("/"))) ?? (() => {});
}

function drawTabs() {
  show(
    document.getElementById("tabs"),
    Object.entries(PAGES).map(([name, page], place) =>
      h("a", { href: `#/${name}`, "data-page": page.title, "aria-keyshortcuts": String(place + 1) }, page.title),
    ),
  );
}

// ---- theme

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = THEMES[theme];
  button.setAttribute("aria-label", `Theme: ${theme}. Change`);
  button.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
  window.dispatchEvent(new Event("themechange"));
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.getElementById("theme").dataset.theme) + 1) % names.length]);
}

// ---- keys

function typed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  const page = Object.keys(PAGES)[Number(event.key) - 1];
  if (page) location.hash = `#/${page}`;
  else if (event.key === "t") nextTheme();
  else if (event.key === "/") {
    document.querySelector("#page input[type=search]")?.focus();
    event.preventDefault();
  }
}

// ---- state

async function drawState() {
  const state = document.getElementById("state");
  try {
    const [ready, stats, audit] = await Promise.all([readiness(), cache("/v1/stats"), cache("/v1/audit")]);
    learn(stats.workers.flatMap((worker) => worker.domains.map((domain) => domain.domain)));
    const words = ready.status === "ready" ? "ready" : `${ready.status}: ${ready.reasons.join("; ")}`;
    state.className = ready.status === "ready" ? "good" : "bad";
    show(state, h("i", {}), h("span", { title: words }, words));
    drawFoot(stats, audit);
  } catch (problem) {
    state.className = "bad";
    show(state, h("i", {}), h("span", {}, problem.message));
  }
}

function drawFoot(stats, audit) {
  const last = audit.last;
  const verdict = !last
    ? "no audit has ended yet"
    : last.holds
      ? `last audit: all invariants hold (${count(last.blocks)} blocks)`
      : `last audit broke off: ${last.evidence}`;
  const links = {
    statistics: "/v1/stats",
    pins: "/v1/pins",
    audit: "/v1/audit",
    metrics: "/metrics",
    API: "/openapi.json",
  };
  show(
    document.getElementById("foot"),
    h(
      "span",
      {},
      [several(stats.sessions, "session"), several(stats.leases, "lease"), several(stats.nodes, "node")].join(" · "),
    ),
    h("span", { class: last && !last.holds ? "bad" : "" }, verdict),
    h(
      "span",
      {},
      Object.entries(links).map(([name, url]) => h("a", { href: url }, name)),
    ),
    h("span", {}, "keys: 1–6 pages, / search, t theme"),
    h("span", {}, `version ${version()}`),
  );
}

async function start() {
  drawTabs();
  setTheme(localStorage.getItem(THEME) in THEMES ? localStorage.getItem(THEME) : "auto");
  document.getElementById("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    window.dispatchEvent(new Event("themechange")),
  );
  document.addEventListener("keydown", typed);
  try {
    await loadElsewhere();
  } catch (problem) {
    show(root, notice("error", problem.message, ...problem.advice));
    return;
  }
  window.addEventListener("hashchange", open);
  open();
  poll(STATE_MS, drawState);
}

start();
