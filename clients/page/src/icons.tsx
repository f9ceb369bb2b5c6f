/** The icons and status glyphs: one sprite, referred to by name. */

import type { Status } from "./format.ts";

export function Icon({ name, more = "" }: { readonly name: string; readonly more?: string }) {
  return (
    <svg class={`icon ${more}`} aria-hidden="true">
      <use href={`#i-${name}`} />
    </svg>
  );
}

export function Glyph({ status }: { readonly status: Status | "retrying" }) {
  return (
    <svg class="glyph" aria-hidden="true">
      <use href={`#s-${status}`} />
    </svg>
  );
}

export function Sprite() {
  return (
    <svg class="sprite" aria-hidden="true">
      <symbol id="s-queued" viewBox="0 0 16 16">
        <circle cx="8" cy="8" r="5" stroke-dasharray="2 2" />
      </symbol>
      <symbol id="s-running" viewBox="0 0 16 16">
        <circle cx="8" cy="8" r="5" />
        <path d="M8 3a5 5 0 0 1 0 10z" fill="currentColor" stroke="none" />
      </symbol>
      <symbol id="s-waiting" viewBox="0 0 16 16">
        <path d="M8 1.8 14.2 8 8 14.2 1.8 8z" fill="currentColor" stroke="none" />
      </symbol>
      <symbol id="s-completed" viewBox="0 0 16 16">
        <path d="m3.5 8.5 3 3 6-7" stroke-width="1.8" />
      </symbol>
      <symbol id="s-failed" viewBox="0 0 16 16">
        <path d="m4.2 4.2 7.6 7.6m0-7.6-7.6 7.6" stroke-width="1.8" />
      </symbol>
      <symbol id="s-timeout" viewBox="0 0 16 16">
        <path d="M4.5 2.5h7m-7 11h7M5 2.5c0 3.5 6 7.5 6 11m0-11c0 3.5-6 7.5-6 11" />
      </symbol>
      <symbol id="s-cancelled" viewBox="0 0 16 16">
        <circle cx="8" cy="8" r="5" />
        <path d="m4.6 11.4 6.8-6.8" />
      </symbol>
      <symbol id="s-retrying" viewBox="0 0 16 16">
        <path d="M12.5 6A5 5 0 1 0 13 8.8M12.8 2.8V6H9.6" />
      </symbol>
      <symbol id="i-plus" viewBox="0 0 16 16">
        <path d="M8 3.5v9M3.5 8h9" />
      </symbol>
      <symbol id="i-search" viewBox="0 0 16 16">
        <circle cx="7" cy="7" r="4" />
        <path d="m10 10 3 3" />
      </symbol>
      <symbol id="i-chev" viewBox="0 0 16 16">
        <path d="m6 4 4 4-4 4" />
      </symbol>
      <symbol id="i-stop" viewBox="0 0 16 16">
        <rect x="4.25" y="4.25" width="7.5" height="7.5" rx="1.5" />
      </symbol>
      <symbol id="i-msg" viewBox="0 0 16 16">
        <path d="M3 4.5A1.5 1.5 0 0 1 4.5 3h7A1.5 1.5 0 0 1 13 4.5v5a1.5 1.5 0 0 1-1.5 1.5H7l-3 2.5V11a1 1 0 0 1-1-1z" />
      </symbol>
      <symbol id="i-chain" viewBox="0 0 16 16">
        <path d="M6.8 9.2a2.5 2.5 0 0 0 3.6 0l2-2a2.5 2.5 0 0 0-3.6-3.6l-.8.8m1.2 2.4a2.5 2.5 0 0 0-3.6 0l-2 2a2.5 2.5 0 0 0 3.6 3.6l.8-.8" />
      </symbol>
      <symbol id="i-fork" viewBox="0 0 16 16">
        <circle cx="4.5" cy="3.8" r="1.6" />
        <circle cx="11.5" cy="3.8" r="1.6" />
        <circle cx="8" cy="12.2" r="1.6" />
        <path d="M4.5 5.4C4.5 8 8 7.5 8 10.6c0-3.1 3.5-2.6 3.5-5.2" />
      </symbol>
      <symbol id="i-copy" viewBox="0 0 16 16">
        <rect x="5.5" y="5.5" width="7.5" height="7.5" rx="1.5" />
        <path d="M10.5 3.5A1.5 1.5 0 0 0 9 3H4.5A1.5 1.5 0 0 0 3 4.5V9a1.5 1.5 0 0 0 .5 1.1" />
      </symbol>
      <symbol id="i-up" viewBox="0 0 16 16">
        <path d="M8 13V3.5M4 7.2 8 3.2l4 4" />
      </symbol>
      <symbol id="i-theme" viewBox="0 0 16 16">
        <circle cx="8" cy="8" r="5" />
        <path d="M8 3a5 5 0 0 1 0 10z" fill="currentColor" stroke="none" />
        <path d="M8 .8v.4m0 13.6v.4" />
      </symbol>
      <symbol id="i-out" viewBox="0 0 16 16">
        <path d="M6.5 3H4.5A1.5 1.5 0 0 0 3 4.5v7A1.5 1.5 0 0 0 4.5 13h2m3.5-2.5L12.8 8 10 5.5M6.5 8h6" />
      </symbol>
      <symbol id="i-back" viewBox="0 0 16 16">
        <path d="m10 3.5L5.5 8l4.5 4.5" />
      </symbol>
      <symbol id="i-menu" viewBox="0 0 16 16">
        <path d="M3 5h10M3 11h10" />
      </symbol>
      <symbol id="i-dots" viewBox="0 0 16 16">
        <path d="M3.5 8h.01M8 8h.01M12.5 8h.01" stroke-width="2.4" />
      </symbol>
      <symbol id="i-chat" viewBox="0 0 16 16">
        <path d="M3 4.5A1.5 1.5 0 0 1 4.5 3h7A1.5 1.5 0 0 1 13 4.5v5a1.5 1.5 0 0 1-1.5 1.5H7l-3 2.5V11a1 1 0 0 1-1-1z" />
      </symbol>
      <symbol id="i-time" viewBox="0 0 16 16">
        <path d="M3 4.5h6M5 8h8M4 11.5h5" />
      </symbol>
      <symbol id="i-list" viewBox="0 0 16 16">
        <path d="m2.5 4.5 1 1 2-2.2M8 4.5h5.5M2.5 11l1 1 2-2.2M8 11h5.5" />
      </symbol>
      <symbol id="i-more" viewBox="0 0 16 16">
        <path d="M3.5 8h.01M8 8h.01M12.5 8h.01" stroke-width="2.4" />
      </symbol>
      <symbol id="i-mark" viewBox="0 0 16 16">
        <g fill="currentColor" stroke="none">
          <circle cx="5" cy="5" r="3.5" />
          <circle cx="12.25" cy="5" r="1.75" />
          <circle cx="5" cy="12.25" r="1.75" />
          <circle cx="12.25" cy="12.25" r="1.75" />
        </g>
      </symbol>
      <symbol id="i-key" viewBox="0 0 16 16">
        <rect x="2.5" y="4.5" width="11" height="7" rx="1.5" />
        <path d="M5 7h.01M8 7h.01M11 7h.01M6 9.3h4" />
      </symbol>
      <symbol id="i-open" viewBox="0 0 16 16">
        <path d="M9.5 3.5h3v3m0-3L8 8M6.5 4.5h-2a1 1 0 0 0-1 1v6a1 1 0 0 0 1 1h6a1 1 0 0 0 1-1v-2" />
      </symbol>
    </svg>
  );
}
