/** Light, dark, or what the system says. The choice stays in this browser; it says nothing of a user. */

const KEY = "retinue-theme";
const ORDER = ["", "dark", "light"];

function apply(theme: string): void {
  if (theme) document.documentElement.dataset["theme"] = theme;
  else delete document.documentElement.dataset["theme"];
}

export function nextTheme(): void {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const present = document.documentElement.dataset["theme"] ?? "";
  // The first press changes what is seen.
  const order = isDark ? ["", "light", "dark"] : ORDER;
  const next = order[(order.indexOf(present) + 1) % order.length]!;
  apply(next);
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // A browser that keeps nothing shows the theme for this visit.
  }
}

try {
  apply(localStorage.getItem(KEY) ?? "");
} catch {
  apply("");
}
