// One hue for each domain, the same on all pages: by its place among all that are known, so that neighbours differ.

const GOLDEN_ANGLE = 137.5;
const FIRST_HUE = 212;
const known = new Map();

/** Tell all domains that there are; those of before keep their hue. */
export function learn(domains) {
  for (const domain of [...domains].sort()) {
    if (!known.has(domain)) known.set(domain, (FIRST_HUE + known.size * GOLDEN_ANGLE) % 360);
  }
}

export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** [hue, saturation, lightness] of a domain's blocks in a state: leased, cached or draining. */
function tone(domain, state) {
  learn([domain]);
  const hue = known.get(domain);
  if (state === "draining") return isDark() ? [38, 95, 58] : [35, 95, 47];
  if (isDark()) return state === "leased" ? [hue, 78, 66] : [hue, 42, 40];
  return state === "leased" ? [hue, 68, 42] : [hue, 58, 73];
}

export function colour(domain, state = "leased") {
  const [hue, saturation, lightness] = tone(domain, state);
  return `hsl(${hue.toFixed(0)} ${saturation}% ${lightness}%)`;
}

/** The same as [red, green, blue], 0 to 255. */
export function rgb(domain, state) {
  const [hue, saturation, lightness] = tone(domain, state);
  const s = saturation / 100;
  const l = lightness / 100;
  const channel = (n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (l - s * Math.min(l, 1 - l) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [channel(0), channel(8), channel(4)];
}

/** A colour of the style sheet, such as "--free", as [red, green, blue]. */
export function themed(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const numbers = getComputedStyle(probe).color.match(/\d+/g).map(Number);
  probe.remove();
  return numbers.slice(0, 3);
}
