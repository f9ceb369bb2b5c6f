/** The menu of Stop, the list of keys, and the page of the sign-in. */

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, signIn } from "./api.ts";
import { counted, exact } from "./format.ts";
import { Glyph, Icon } from "./icons.tsx";
import { ROWS } from "./keys.ts";
import * as page from "./page.ts";
import { stop } from "./state.ts";

interface Scope {
  readonly name: string;
  readonly hint: string;
  readonly ns: readonly string[];
  readonly options: object;
}

function scopesOf(place: page.Place): Scope[] {
  const node = page.nodeOf(place);
  const ns = node?.ns ?? [];
  const below = (place.live.view(place.runId)?.sum.value.agents ?? 1) - 1;
  const name = exact(node?.agent ?? "");
  const others = below > 0 ? ` and the ${counted(below, "agent")} below it` : "";
  return [
    { name: "This agent", hint: `${name}${others}`, ns, options: {} },
    { name: "This turn", hint: "all that came of the last message", ns: [], options: {} },
    { name: "Everything", hint: "also its background tasks", ns: [], options: { tasks: true } },
  ];
}

export function StopMenu() {
  const open = page.menu.value;
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (open === null) return undefined;
    const at = open.anchor.getBoundingClientRect();
    const menu = box.current!;
    menu.style.top = `${Math.min(at.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
    menu.style.left = `${Math.max(8, Math.min(at.right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
    menu.querySelector("button")!.focus();
    const close = (event: MouseEvent): void => {
      if (!menu.contains(event.target as Node)) page.menu.value = null;
    };
    const timer = setTimeout(() => document.addEventListener("click", close));
    return () => {
      clearTimeout(timer);
      document.removeEventListener("click", close);
    };
  }, [open]);
  if (open === null) return null;
  const { place } = open;
  const close = (): void => {
    page.menu.value = null;
    if (open.anchor instanceof HTMLElement) open.anchor.focus();
  };
  const choose = async (scope: Scope): Promise<void> => {
    close();
    const view = place.live.view(scope.ns.length > 0 ? place.runId : place.live.root!.runId);
    if (view !== undefined) view.stopping.value = true;
    try {
      await stop(place.live.runId, scope.ns, scope.options);
    } catch (error) {
      if (view !== undefined) view.stopping.value = false;
      page.problem.value = error instanceof ApiError ? error.message : String(error);
    }
  };
  const move = (event: KeyboardEvent): void => {
    event.stopPropagation();
    const items = [...box.current!.querySelectorAll("button")];
    const place = items.indexOf(document.activeElement as HTMLButtonElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" || event.key === "Tab") close();
    if (step === undefined) return;
    event.preventDefault();
    items[(place + step + items.length) % items.length]!.focus();
  };
  const name = page.nodeOf(place)?.agent ?? "";
  return (
    <div class="menu" role="menu" aria-label={`Stop ${name}`} ref={box} onKeyDown={move}>
      {scopesOf(place).map((scope) => (
        <button
          type="button"
          role="menuitem"
          key={scope.name}
          aria-label={scope.name}
          onClick={(event) => {
            event.stopPropagation();
            void choose(scope);
          }}>
          <b>{scope.name}</b>
          <span>{scope.hint}</span>
        </button>
      ))}
    </div>
  );
}

export function Keys() {
  const dialog = useRef<HTMLDialogElement>(null);
  const isShown = page.isKeysShown.value;
  useEffect(() => {
    if (isShown) dialog.current?.showModal();
    else dialog.current?.close();
  }, [isShown]);
  return (
    <dialog
      class="keys"
      ref={dialog}
      aria-label="Keys"
      onClose={() => (page.isKeysShown.value = false)}>
      {isShown && (
        <form method="dialog">
          <h2>Keys</h2>
          <dl>
            {ROWS.map(([keys, what]) => (
              <div key={what}>
                <dt>
                  {keys.split(" ").map((key) => (
                    <kbd key={key}>{key}</kbd>
                  ))}
                </dt>
                <dd>{what}</dd>
              </div>
            ))}
          </dl>
          <button type="button" class="btn" onClick={() => (page.isKeysShown.value = false)}>
            Close
          </button>
        </form>
      )}
    </dialog>
  );
}

export function SignIn({ failed }: { failed: boolean }) {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState(failed ? "Not valid here. Copy the token again." : "");
  const submit = async (): Promise<void> => {
    setProblem("");
    try {
      await signIn(token.trim());
    } catch (error) {
      const isRefused = error instanceof ApiError && error.status === 401;
      setProblem(isRefused ? "Not valid here. Copy the token again." : (error as Error).message);
    }
  };
  return (
    <main class="door">
      <Icon name="mark" more="mark" />
      <div>
        <h1>Sign in to Retinue</h1>
        <p class="help">{location.host}</p>
      </div>
      <form
        aria-label="Sign in"
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}>
        <label for="token">
          <b>Token</b>
        </label>
        <input
          class="field"
          id="token"
          type="text"
          autocomplete="off"
          autocapitalize="off"
          spellcheck={false}
          aria-invalid={problem ? "true" : undefined}
          aria-describedby={problem ? "token-problem" : undefined}
          value={token}
          onInput={(event) => setToken(event.currentTarget.value)}
        />
        {problem && (
          <p class="err" id="token-problem" role="alert">
            <Glyph status="failed" />
            {problem}
          </p>
        )}
        <button class="btn main" type="submit">
          Sign in
        </button>
      </form>
      <p class="help">
        The token is the one given to <code class="mono">retinue serve --token</code>, or made with{" "}
        <code class="mono">retinue tokens add</code>. Without either, the server has printed a link.
      </p>
    </main>
  );
}
