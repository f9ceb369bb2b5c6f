/** Changes of text, line by line. */

import { exact } from "./format.ts";

type Line = {
  readonly kind: "same" | "add" | "del";
  readonly text: string;
  readonly number: number;
};

const MOST = 2000;
const AROUND = 3;

/** True if a diff shows all of a text. */
export const isDrawn = (text: string): boolean => text.split("\n").length <= MOST;

/** Return the lines of a change: common lines by the longest common subsequence. */
export function changed(before: string, after: string): Line[] {
  const [old, fresh] = [before.split("\n").slice(0, MOST), after.split("\n").slice(0, MOST)];
  let start = 0;
  while (start < old.length && start < fresh.length && old[start] === fresh[start]) start += 1;
  let end = 0;
  while (
    end < Math.min(old.length, fresh.length) - start &&
    old.at(-1 - end) === fresh.at(-1 - end)
  )
    end += 1;
  const [from, to] = [old.slice(start, old.length - end), fresh.slice(start, fresh.length - end)];
  const lines: Line[] = old
    .slice(0, start)
    .map((text, place) => ({ kind: "same", text, number: place + 1 }));
  const add = (kind: Line["kind"], text: string, number: number): void =>
    void lines.push({ kind, text, number });
  if (from.length * to.length > 400_000) {
    from.forEach((text, place) => add("del", text, start + place + 1));
    to.forEach((text, place) => add("add", text, start + place + 1));
  } else {
    walk(from, to, (kind, text, place) => add(kind, text, start + place + 1));
  }
  old
    .slice(old.length - end)
    .forEach((text, place) => add("same", text, fresh.length - end + place + 1));
  return lines;
}

function walk(
  from: readonly string[],
  to: readonly string[],
  add: (kind: Line["kind"], text: string, place: number) => void,
): void {
  const width = to.length + 1;
  const length = new Uint32Array((from.length + 1) * width);
  for (let i = from.length - 1; i >= 0; i -= 1) {
    for (let j = to.length - 1; j >= 0; j -= 1) {
      length[i * width + j] =
        from[i] === to[j]
          ? length[(i + 1) * width + j + 1]! + 1
          : Math.max(length[(i + 1) * width + j]!, length[i * width + j + 1]!);
    }
  }
  let [i, j] = [0, 0];
  while (i < from.length || j < to.length) {
    if (i < from.length && j < to.length && from[i] === to[j]) {
      add("same", to[j]!, j);
      [i, j] = [i + 1, j + 1];
    } else if (
      j >= to.length ||
      (i < from.length && length[(i + 1) * width + j]! >= length[i * width + j + 1]!)
    ) {
      add("del", from[i]!, i);
      i += 1;
    } else {
      add("add", to[j]!, j);
      j += 1;
    }
  }
}

/** Keep the lines around a change. */
function near(lines: readonly Line[]): Line[] {
  const kept = new Set<number>();
  lines.forEach((line, place) => {
    if (line.kind === "same") return;
    for (let near = place - AROUND; near <= place + AROUND; near += 1) kept.add(near);
  });
  return lines.filter((_, place) => kept.has(place));
}

const SIGN = { same: "", add: "+", del: "−" };

export function Diff({ title, before, after }: { title: string; before: string; after: string }) {
  const lines = near(changed(before, after));
  const count = (kind: Line["kind"]): number => lines.filter((line) => line.kind === kind).length;
  return (
    <figure class="diff" aria-label={`Change of ${exact(title)}`}>
      <div class="file">
        <span class="said">{exact(title)}</span>
        <span class="plus">+{count("add")}</span>
        <span class="minus">−{count("del")}</span>
      </div>
      <ol tabIndex={0} aria-label="Changed lines">
        {lines.map((line, place) => (
          <li key={place} class={line.kind}>
            <span>{line.number}</span>
            <span>{SIGN[line.kind]}</span>
            <span class="said">{exact(line.text)}</span>
          </li>
        ))}
      </ol>
    </figure>
  );
}
