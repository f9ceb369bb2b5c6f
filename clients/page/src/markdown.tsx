/**
 * Markdown as nodes. The parser gives tokens, never markup, and this draws those it knows; what a model writes can
 * neither run nor load anything. Images of other places become links.
 */

import MarkdownIt from "markdown-it";
import type { Token } from "markdown-it";
import { h, type ComponentChild, type VNode } from "preact";
import { useMemo, useState } from "preact/hooks";
import { CopyButton } from "./buttons.tsx";
import { exact, prose } from "./format.ts";
import { highlight, languageName } from "./highlight.ts";

const parser = new MarkdownIt({ html: false, linkify: false, typographer: false, maxNesting: 20 });
parser.validateLink = () => true; // an address that is not allowed is shown, see `Link`

const MOST = 32_000;
const STEP = 64_000;
const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr table thead tbody tr th td em strong s br".split(" "),
);

/** Return an address that a link may have: anything else would run or load something. */
export function allowed(address: string): URL | null {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url : null;
  } catch {
    return null;
  }
}

function Link({ to, text, children }: { to: string; text: string; children: ComponentChild }) {
  const url = allowed(to);
  if (url === null) return <span title={exact(to)}>{children}</span>;
  const host = url.protocol === "mailto:" ? url.pathname : url.host;
  return (
    <>
      <a href={url.href} target="_blank" rel="noopener noreferrer" title={exact(url.href)}>
        {children}
      </a>
      {text.includes(host) ? null : <span class="host"> ({exact(host)})</span>}
    </>
  );
}

const attribute = (token: Token, name: string): string => String(token.attrGet(name) ?? "");

/** Draw tokens; nesting follows their opening and closing. */
function draw(tokens: readonly Token[]): ComponentChild[] {
  const root: ComponentChild[] = [];
  const stack: { token: Token; outer: ComponentChild[]; from: number }[] = [];
  let inside = root;
  tokens.forEach((token, place) => {
    if (token.nesting === 1) {
      stack.push({ token, outer: inside, from: place + 1 });
      inside = [];
    } else if (token.nesting === -1) {
      const opened = stack.pop();
      if (opened === undefined) return;
      const text = tokens
        .slice(opened.from, place)
        .map((one) => one.content)
        .join("");
      if (opened.token.hidden) opened.outer.push(...inside);
      else opened.outer.push(element(opened.token, inside, text));
      inside = opened.outer;
    } else {
      inside.push(single(token));
    }
  });
  return root;
}

function element(token: Token, inside: ComponentChild[], text: string): ComponentChild {
  if (token.type === "link_open") {
    return (
      <Link to={attribute(token, "href")} text={text}>
        {inside}
      </Link>
    );
  }
  // A heading of a message stands below those of the page.
  const tag = token.tag.replace(/^h([1-6])$/, (_, level) => `h${Math.min(6, Number(level) + 2)}`);
  if (!TAGS.has(tag)) return inside;
  const more: Record<string, string> = {};
  if (/text-align:right/.test(attribute(token, "style"))) more["class"] = "r";
  if (tag === "ol" && token.attrGet("start") !== null) more["start"] = attribute(token, "start");
  return h(tag, more, inside) as VNode;
}

function single(token: Token): ComponentChild {
  switch (token.type) {
    case "inline":
      return draw(token.children ?? []);
    case "text":
      return prose(token.content);
    case "code_inline":
      return <code dir="ltr">{exact(token.content)}</code>;
    case "fence":
    case "code_block":
      return <Code code={token.content} language={token.info.trim().split(/\s+/)[0] ?? ""} />;
    case "softbreak":
      return "\n";
    case "hardbreak":
      return <br />;
    case "hr":
      return <hr />;
    case "image": {
      const name = prose(token.content) || "image";
      return (
        <Link to={attribute(token, "src")} text="">
          {name}
        </Link>
      );
    }
    default:
      return prose(token.content);
  }
}

export function Code({ code, language }: { code: string; language: string }) {
  const text = exact(code.replace(/\n$/, ""));
  const name = languageName(language) || exact(language.slice(0, 20)) || "Code";
  return (
    <figure class="code">
      <div class="file">
        {name}
        <CopyButton text={code} label="Copy code" />
      </div>
      <pre tabIndex={0} dir="ltr">
        <Long text={text} draw={(shown) => highlight(shown, language)} />
      </pre>
    </figure>
  );
}

/** Text that is shown in steps if it is very long. */
export function Long(options: { text: string; draw?: (text: string) => ComponentChild }) {
  const [most, setMost] = useState(STEP);
  const { text, draw: show = (shown: string) => shown } = options;
  if (text.length <= most) return <>{show(text)}</>;
  return (
    <>
      {show(text.slice(0, most))}
      <button class="link more" onClick={() => setMost(most + STEP)}>
        Show more ({Math.round((text.length - most) / 1000)}k characters)
      </button>
    </>
  );
}

/** A piece of Markdown, which is parsed again only if it changes. */
function Closed({ text }: { text: string }) {
  return useMemo(() => <>{draw(parser.parse(text, {}))}</>, [text]);
}

/** Return where the last closed block of a text ends: after a blank line outside a fence. */
function endOfClosed(text: string): number {
  let isFenced = false;
  let end = 0;
  let place = 0;
  for (const line of text.split("\n")) {
    place += line.length + 1;
    if (/^\s{0,3}(```|~~~)/.test(line)) isFenced = !isFenced;
    else if (line.trim() === "" && !isFenced && place <= text.length) end = place;
  }
  return end;
}

/** The words of an agent. While they come, what is closed is not parsed again. */
export function Prose(options: { readonly text: string; readonly isOpen?: boolean }) {
  const { text, isOpen = false } = options;
  const most = text.length > MOST ? text.lastIndexOf("\n", MOST) + 1 || MOST : text.length;
  const [parsed, rest] = [text.slice(0, most), text.slice(most)];
  const end = isOpen ? endOfClosed(parsed) : parsed.length;
  return (
    <div class="prose said" dir="auto" data-part="text">
      {end > 0 && <Closed text={parsed.slice(0, end)} />}
      {end < parsed.length && <Closed text={parsed.slice(end)} />}
      {rest && (
        <div class="plain">
          <Long text={prose(rest)} />
        </div>
      )}
      {isOpen && <span class="caret" />}
    </div>
  );
}
