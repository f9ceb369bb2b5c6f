/** JSON as a tree that opens level by level. */

import { useState } from "preact/hooks";
import { counted, exact } from "./format.ts";
import { Icon } from "./icons.tsx";

const STEP = 100;
const LONGEST = 2000;

function Leaf({ name, value }: { name: string; value: unknown }) {
  const isText = typeof value === "string";
  const text = isText ? JSON.stringify(value.slice(0, LONGEST)) : String(value);
  return (
    <div>
      <span class="k">{exact(name)}</span>
      <span class={isText ? "s said" : "d"} dir={isText ? "auto" : undefined}>
        {exact(text)}
        {isText && value.length > LONGEST ? "…" : ""}
      </span>
    </div>
  );
}

function Branch(options: { name: string; value: object; depth: number }) {
  const { name, value, depth } = options;
  const [isOpen, setOpen] = useState(depth < 2);
  const [most, setMost] = useState(STEP);
  const entries = Object.entries(value);
  const size = counted(entries.length, Array.isArray(value) ? "item" : "key");
  return (
    <details
      open={isOpen}
      onToggle={(event) => {
        if (event.target === event.currentTarget) {
          setOpen((event.currentTarget as HTMLDetailsElement).open);
        }
      }}>
      <summary>
        <Icon name="chev" />
        <span class="k">{exact(name)}</span>
        <span class="n">{size}</span>
      </summary>
      {isOpen &&
        entries
          .slice(0, most)
          .map(([key, one]) => <Json key={key} name={key} value={one} depth={depth + 1} />)}
      {isOpen && entries.length > most && (
        <button class="link more" onClick={() => setMost(most + STEP)}>
          Show more ({entries.length - most})
        </button>
      )}
    </details>
  );
}

export function Json(options: { value: unknown; name: string; depth?: number }) {
  const { value, name, depth = 0 } = options;
  const shown =
    typeof value === "object" && value !== null ? (
      <Branch name={name} value={value} depth={depth} />
    ) : (
      <Leaf name={name} value={value} />
    );
  return depth === 0 ? <div class="tree">{shown}</div> : shown;
}
