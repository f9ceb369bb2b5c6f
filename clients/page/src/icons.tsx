/** The icons and status glyphs: one sprite, referred to by name. */

import type { Status } from "./format.ts";

export function Icon({ name, more = "" }: { name: string; more?: string }) {
  return (
    <svg class={`icon ${more}`} aria-hidden="true">
      <use href={`#i-${name}`} />
    </svg>
  );
}

export function Glyph({ status }: { status: Status | "retrying" }) {
  return (
    <svg class="glyph" aria-hidden="true">
      <use href={`#s-${status}`} />
    </svg>
  );
}

/** Of each symbol the lines that are stroked, and those that are filled. */
const SHAPES: Readonly<Record<string, readonly [string, string]>> = {
  "s-queued": ["M3 8a5 5 0 1 0 10 0a5 5 0 1 0 -10 0", ""],
  "s-running": ["M3 8a5 5 0 1 0 10 0a5 5 0 1 0 -10 0", "M8 3a5 5 0 0 1 0 10z"],
  "s-waiting": ["", "M8 1.8 14.2 8 8 14.2 1.8 8z"],
  "s-completed": ["m3.5 8.5 3 3 6-7", ""],
  "s-failed": ["m4.2 4.2 7.6 7.6m0-7.6-7.6 7.6", ""],
  "s-timeout": ["M4.5 2.5h7m-7 11h7M5 2.5c0 3.5 6 7.5 6 11m0-11c0 3.5-6 7.5-6 11", ""],
  "s-cancelled": ["M3 8a5 5 0 1 0 10 0a5 5 0 1 0 -10 0 M4.6 11.4l6.8-6.8", ""],
  "s-retrying": ["M12.5 6A5 5 0 1 0 13 8.8M12.8 2.8V6H9.6", ""],
  "i-plus": ["M8 3.5v9M3.5 8h9", ""],
  "i-search": ["M3 7a4 4 0 1 0 8 0a4 4 0 1 0 -8 0 M10 10l3 3", ""],
  "i-chev": ["m6 4 4 4-4 4", ""],
  "i-stop": [
    "M5.75 4.25h4.5a1.5 1.5 0 0 1 1.5 1.5v4.5a1.5 1.5 0 0 1-1.5 1.5h-4.5a1.5 1.5 0 0 1-1.5-1.5v-4.5a1.5 1.5 0 0 1 1.5-1.5z",
    "",
  ],
  "i-msg": [
    "M3 4.5A1.5 1.5 0 0 1 4.5 3h7A1.5 1.5 0 0 1 13 4.5v5a1.5 1.5 0 0 1-1.5 1.5H7l-3 2.5V11a1 1 0 0 1-1-1z",
    "",
  ],
  "i-chain": [
    "M6.8 9.2a2.5 2.5 0 0 0 3.6 0l2-2a2.5 2.5 0 0 0-3.6-3.6l-.8.8m1.2 2.4a2.5 2.5 0 0 0-3.6 0l-2 2a2.5 2.5 0 0 0 3.6 3.6l.8-.8",
    "",
  ],
  "i-fork": [
    "M2.9 3.8a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0 M9.9 3.8a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0 M6.4 12.2a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0 M4.5 5.4C4.5 8 8 7.5 8 10.6c0-3.1 3.5-2.6 3.5-5.2",
    "",
  ],
  "i-copy": [
    "M7 5.5h4.5a1.5 1.5 0 0 1 1.5 1.5v4.5a1.5 1.5 0 0 1-1.5 1.5h-4.5a1.5 1.5 0 0 1-1.5-1.5v-4.5a1.5 1.5 0 0 1 1.5-1.5z M10.5 3.5A1.5 1.5 0 0 0 9 3H4.5A1.5 1.5 0 0 0 3 4.5V9a1.5 1.5 0 0 0 .5 1.1",
    "",
  ],
  "i-up": ["M8 13V3.5M4 7.2 8 3.2l4 4", ""],
  "i-theme": ["M3 8a5 5 0 1 0 10 0a5 5 0 1 0 -10 0 M8 .8v.4m0 13.6v.4", "M8 3a5 5 0 0 1 0 10z"],
  "i-out": [
    "M6.5 3H4.5A1.5 1.5 0 0 0 3 4.5v7A1.5 1.5 0 0 0 4.5 13h2m3.5-2.5L12.8 8 10 5.5M6.5 8h6",
    "",
  ],
  "i-back": ["m10 3.5L5.5 8l4.5 4.5", ""],
  "i-time": ["M3 4.5h6M5 8h8M4 11.5h5", ""],
  "i-list": ["m2.5 4.5 1 1 2-2.2M8 4.5h5.5M2.5 11l1 1 2-2.2M8 11h5.5", ""],
  "i-more": ["M3.5 8h.01M8 8h.01M12.5 8h.01", ""],
  "i-mark": [
    "",
    "M1.5 5a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0 M10.5 5a1.75 1.75 0 1 0 3.5 0a1.75 1.75 0 1 0 -3.5 0 M3.25 12.25a1.75 1.75 0 1 0 3.5 0a1.75 1.75 0 1 0 -3.5 0 M10.5 12.25a1.75 1.75 0 1 0 3.5 0a1.75 1.75 0 1 0 -3.5 0",
  ],
  "i-key": [
    "M4 4.5h8a1.5 1.5 0 0 1 1.5 1.5v4a1.5 1.5 0 0 1-1.5 1.5h-8a1.5 1.5 0 0 1-1.5-1.5v-4a1.5 1.5 0 0 1 1.5-1.5z M5 7h.01M8 7h.01M11 7h.01M6 9.3h4",
    "",
  ],
  "i-open": [
    "M9.5 3.5h3v3m0-3L8 8M6.5 4.5h-2a1 1 0 0 0-1 1v6a1 1 0 0 0 1 1h6a1 1 0 0 0 1-1v-2",
    "",
  ],
};

export function Sprite() {
  return (
    <svg class="sprite" aria-hidden="true">
      {Object.entries(SHAPES).map(([id, [stroke, fill]]) => (
        <symbol key={id} id={id} viewBox="0 0 16 16">
          {stroke && <path d={stroke} stroke-dasharray={id === "s-queued" ? "2 2" : undefined} />}
          {fill && <path d={fill} fill="currentColor" stroke="none" />}
        </symbol>
      ))}
    </svg>
  );
}
