/** Small buttons that many parts of the page have. */

import { useRef, useState } from "preact/hooks";
import { Icon } from "./icons.tsx";

/** A button without words: its name is read aloud and shown as a hint. */
export function IconButton(options: {
  icon: string;
  label: string;
  hint?: string;
  popup?: boolean;
  more?: string;
  onClick: (event: MouseEvent) => void;
}) {
  const { icon, label, hint = label, popup = false, more = "", onClick } = options;
  return (
    <button
      type="button"
      class={`btn quiet small only ${more}`}
      aria-label={label}
      title={hint}
      aria-haspopup={popup ? "menu" : undefined}
      onClick={onClick}>
      <Icon name={icon} />
    </button>
  );
}

/** Copy a text; where the clipboard is closed, by a selection. */
async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function CopyButton(options: {
  text: string | (() => string);
  label: string;
  icon?: string;
  hint?: string;
}) {
  const { text, label, icon = "copy", hint = label } = options;
  const [isCopied, setCopied] = useState(false);
  const timer = useRef(0);
  const press = (event: MouseEvent): void => {
    event.stopPropagation();
    void copy(typeof text === "string" ? text : text());
    setCopied(true);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button
      type="button"
      class="btn quiet small only"
      aria-label={label}
      title={hint}
      onClick={press}>
      {isCopied ? (
        <svg class="icon" aria-hidden="true">
          <use href="#s-completed" />
        </svg>
      ) : (
        <Icon name={icon} />
      )}
    </button>
  );
}
