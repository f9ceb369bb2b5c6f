/**
 * Code in colours. The highlighter gives markup as text; a small scanner turns it into nodes, so that no text ever
 * becomes markup.
 */

import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import diff from "highlight.js/lib/languages/diff";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import yaml from "highlight.js/lib/languages/yaml";
import { h, type ComponentChild, type VNode } from "preact";

const LANGUAGES = { bash, diff, json, python, sql, typescript, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

/** Bounds beyond which hostile code could hold up the page. */
const MOST = 16_000;
const ENTITIES: Readonly<Record<string, string>> = {
  "&amp;": "&",
  "&lt;": "<",
  "&gt;": ">",
  "&quot;": '"',
  "&#x27;": "'",
};

/** Return the name of a language as people write it; empty if there is none. */
export function languageName(name: string): string {
  const found = hljs.getLanguage(name);
  return found?.name?.replace(/,.*/, "") ?? "";
}

/** Return code as nodes, in colours if its language is known and it is not too long. */
export function highlight(code: string, language: string): ComponentChild[] {
  const isLong = code.length > MOST || /[^\n]{301}/.test(code);
  if (isLong || hljs.getLanguage(language) === undefined) return [code];
  return scan(hljs.highlight(code, { language, ignoreIllegals: true }).value);
}

function scan(markup: string): ComponentChild[] {
  const root: ComponentChild[] = [];
  const stack: { readonly name: string; readonly inside: ComponentChild[] }[] = [];
  let inside = root;
  for (const [piece] of markup.matchAll(/<span class="[^"]*">|<\/span>|&#?\w+;|[^<&]+|[<&]/g)) {
    const opened = /^<span class="([^"]*)">$/.exec(piece);
    if (opened !== null) {
      stack.push({ name: opened[1]!, inside });
      inside = [];
    } else if (piece === "</span>") {
      const { name, inside: outer } = stack.pop() ?? { name: "", inside: root };
      outer.push(h("span", { class: name }, inside) as VNode);
      inside = outer;
    } else {
      inside.push(ENTITIES[piece] ?? piece);
    }
  }
  while (stack.length > 0) {
    const { inside: outer } = stack.pop()!;
    outer.push(...inside);
    inside = outer;
  }
  return root;
}
