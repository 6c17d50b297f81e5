// One tenant of the playground: its key and salt, one streamed answer at a time, and what that cost.

import { rest } from "../parts/api.js";
import { h, show, svg } from "../parts/dom.js";
import { count, several, share, time } from "../parts/format.js";
import { events, tokenTexts } from "../parts/stream.js";

const TOKENS_DRAWN_MAX = 3_000; // one by one; a longer prompt is drawn as two parts
const BARS_MIN = 24; // places: a short answer has no broad bars
const BARS_MAX = 200;

export class Side {
  /** `typed` keeps key and salt while the tab is open; `changed` is called when one of them changes. */
  constructor(name, typed, changed) {
    this.name = name;
    this.typed = typed;
    typed.key ??= "";
    typed.salt ??= "";
    const field = (label, key, attributes) => {
      const input = h("input", {
        ...attributes,
        value: typed[key],
        autocomplete: "off",
        spellcheck: "false",
        oninput: () => {
          typed[key] = input.value.trim();
          changed();
        },
      });
      this[`${key}Input`] = input;
      return h("label", {}, label, input);
    };
    this.verdict = h("span", { class: "verdict" });
    this.facts = h("dl", { class: "facts" });
    this.prompt = h("div", { class: "tokens" });
    this.answer = h("div", { class: "answer", "aria-live": "off" });
    this.costs = h("div", { class: "costs" });
    this.element = h(
      "section",
      { class: "card side", "data-side": name, "aria-label": `Tenant ${name}` },
      h("h2", {}, h("span", {}, `Tenant ${name}`), this.verdict),
      h(
        "div",
        { class: "row" },
        field("API key", "key", { type: "password", placeholder: "none" }),
        field("cache salt", "salt", { type: "text", placeholder: "none", maxlength: 256 }),
      ),
      this.facts,
      this.prompt,
      this.answer,
      this.costs,
    );
    this.clear();
  }

  suggestSalt() {
    if (this.typed.salt) return;
    this.typed.salt = this.saltInput.value = `tenant-${this.name.toLowerCase()}`;
  }

  clear() {
    this.verdict.textContent = "";
    delete this.element.dataset.verdict;
    show(
      this.facts,
      h("div", { class: "dim" }, "What the prompt finds cached, and what each token costs, stands here."),
    );
    show(this.prompt);
    show(this.answer);
    show(this.costs);
  }

  /** Compute and cache the prompt: its shortest answer. */
  async warm(text, key, signal) {
    const response = await rest("/v1/chat/completions", {
      key,
      signal,
      body: { ...(await this.body(text, 1, key)), stream: false },
    });
    await response.json();
  }

  async run(text, maxTokens, key, signal) {
    this.clear();
    const body = await this.body(text, maxTokens, key);
    const texts = await this.tokenize(body, key, signal);
    this.drawPrompt(texts, text, null);
    const began = performance.now();
    const response = await rest("/v1/chat/completions", {
      key,
      signal,
      body: { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } },
    });
    const requestId = response.headers.get("x-request-id");
    const arrivals = []; // [ms since the request, tokens so far]
    let usage = null;
    for await (const [event, at] of events(response, () => performance.now() - began)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta;
      const piece = (delta?.reasoning_content ?? "") + (delta?.content ?? "");
      usage = event.usage ?? usage;
      if (piece) {
        this.answer.append(piece);
        const soFar = usage?.completion_tokens ?? arrivals.length + 1;
        if (soFar > (arrivals.at(-1)?.[1] ?? 0)) arrivals.push([at, soFar]);
        if (arrivals.length === 1) this.drawPrompt(texts, text, usage);
      }
    }
    this.drawPrompt(texts, text, usage);
    this.drawFacts(arrivals, usage, requestId);
  }

  async body(text, maxTokens, key) {
    if (this.model?.key !== key) {
      const models = await (await rest("/v1/models", { key })).json();
      this.model = { key, id: models.data[0].id };
    }
    const salt = this.typed.salt ? { cache_salt: this.typed.salt } : {};
    return {
      model: this.model.id,
      messages: [{ role: "user", content: text }],
      max_tokens: maxTokens,
      temperature: 0,
      ...salt,
    };
  }

  /** What the model reads, token by token; null where the API does not say. */
  async tokenize({ model, messages }, key, signal) {
    try {
      const response = await rest("/tokenize", {
        key,
        signal,
        body: { model, messages, add_generation_prompt: true, return_token_strs: true },
      });
      return tokenTexts((await response.json()).token_strs);
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      return null;
    }
  }

  drawPrompt(texts, text, usage) {
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    const kind = (place) => (cached === undefined ? "" : place < cached ? "cached" : "computed");
    if (!texts) show(this.prompt, h("span", {}, text));
    else if (texts.length > TOKENS_DRAWN_MAX) {
      const border = cached ?? 0;
      show(
        this.prompt,
        h("span", { class: kind(0) }, texts.slice(0, border).join("")),
        h("span", { class: kind(border) }, texts.slice(border).join("")),
      );
    } else
      show(
        this.prompt,
        texts.map((token, place) => h("span", { class: kind(place) }, token)),
      );
    if (cached === undefined) return;
    const isHit = 2 * cached > usage.prompt_tokens; // the first tokens of a chat are the same for all prompts
    this.element.dataset.verdict = isHit ? "hit" : "miss";
    this.verdict.textContent = isHit ? "hit" : "miss";
    this.verdict.className = `verdict ${isHit ? "hit" : "miss"}`;
  }

  drawFacts(arrivals, usage, requestId) {
    if (!usage || !arrivals.length) {
      show(this.facts, h("div", {}, "The model ended without a token of text."));
      return;
    }
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const [first, last] = [arrivals[0], arrivals.at(-1)];
    const later = last[1] - first[1];
    const computed = usage.prompt_tokens - (cached ?? 0);
    const fact = (name, value, more) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "dim" }, more));
    show(
      this.facts,
      fact("first token", time(first[0]), cached === undefined ? "" : `${several(computed, "prompt token")} computed`),
      fact(
        "cached",
        cached === undefined ? "not told" : share(cached, usage.prompt_tokens),
        cached === undefined
          ? "shows_cached_tokens of this tenant is off"
          : `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens`,
      ),
      fact(
        "each further token",
        later ? time((last[0] - first[0]) / later) : "–",
        `${count(usage.completion_tokens)} tokens in ${time(last[0])}`,
      ),
    );
    show(
      this.costs,
      costBars(arrivals),
      requestId ? h("a", { href: `#/requests/${encodeURIComponent(requestId)}` }, "why it took that long") : null,
    );
  }
}

/** A bar for each token, as high as the time that it took; of tokens that came together, each took its part. */
function costBars(arrivals) {
  const costs = arrivals.flatMap(([at, soFar], place) => {
    const [before, had] = place ? arrivals[place - 1] : [0, 0];
    return Array(soFar - had).fill((at - before) / (soFar - had));
  });
  const shown = costs.slice(0, BARS_MAX);
  const highest = Math.max(...shown);
  const width = 100 / Math.max(BARS_MIN, shown.length);
  const bars = shown.map((cost, place) => {
    const height = Math.max(0.6, (20 * cost) / highest);
    const at = { x: place * width, y: 20 - height, width: width * 0.8, height };
    const words = `${place ? `token ${place + 1}` : "first token"}: ${time(cost)}`;
    return svg("rect", { ...at, class: place ? "" : "first" }, svg("title", {}, words));
  });
  const caption = `Time of each token, the highest bar ${time(highest)}; blue is the first, with its wait and the prompt.`;
  return [
    h("p", { class: "dim" }, caption),
    svg("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": caption }, bars),
  ];
}
