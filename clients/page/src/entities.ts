/** The character references that the Markdown parser decodes: those that people write, instead of all 2,231. */

const NAMED: Readonly<Record<string, string>> = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "©",
  reg: "®",
  deg: "°",
  middot: "·",
  bull: "•",
  hellip: "…",
  ndash: "–",
  mdash: "—",
  larr: "←",
  rarr: "→",
  times: "×",
  euro: "€",
};

function decoded(reference: string, name: string): string {
  if (!name.startsWith("#")) return NAMED[name] ?? reference;
  const code = /^#x/i.test(name) ? parseInt(name.slice(2), 16) : parseInt(name.slice(1), 10);
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
}

export function decodeHTMLStrict(text: string): string {
  return text.replace(/&(#x[\da-f]{1,6}|#\d{1,7}|[a-z][a-z\d]*);/gi, decoded);
}
