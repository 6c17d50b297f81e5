// A streamed answer of the API, event by event, with the moment at which each came.

/** Yields [event, ms since the clock `now` began] of a response of server-sent events. */
export async function* events(response, now) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const at = now();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield [JSON.parse(data), at];
    }
  }
}

/** Texts of tokens as the vocabulary of a byte-level tokenizer writes them, in order; others pass as they are. */
export function tokenTexts(names) {
  const decoder = new TextDecoder();
  return names.map((name) => {
    const bytes = [...name].map((character) => BYTES.get(character));
    if (bytes.includes(undefined)) return name.replaceAll("▁", " ");
    return decoder.decode(Uint8Array.from(bytes), { stream: true });
  });
}

// Bytes that print stand for themselves, the others for characters from U+0100 on, in order.
const BYTES = new Map();
for (let byte = 0, next = 256; byte < 256; byte++) {
  const prints = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  BYTES.set(String.fromCodePoint(prints ? byte : next++), byte);
}
