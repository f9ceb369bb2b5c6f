/** The page: threads on the left, the conversation in the middle, details on the right. */

import "./tokens.css";
import "./page.css";
import "./theme.ts";
import { effect, signal } from "@preact/signals";
import { render } from "preact";
import { signIn, takeToken, user, whoami } from "./api.ts";
import { Announcer } from "./announce.tsx";
import { Middle } from "./conversation.tsx";
import { Details, Dock } from "./details.tsx";
import { Sprite } from "./icons.tsx";
import { noteQuestions } from "./keys.ts";
import { Keys, SignIn, StopMenu } from "./menu.tsx";
import * as page from "./page.ts";
import { conversation } from "./state.ts";
import { Threads } from "./threads.tsx";

const hasFailed = signal(false);

function Page() {
  if (user.value === undefined) return <Sprite />;
  if (user.value === null) {
    return (
      <>
        <Sprite />
        <SignIn failed={hasFailed.value} />
      </>
    );
  }
  return (
    <>
      <Sprite />
      <div
        class="app"
        data-pane={page.pane.value}
        data-drawer={page.drawer.value ? "open" : undefined}>
        <Threads />
        <Middle />
        <Details />
        <Dock />
      </div>
      <StopMenu />
      <Keys />
      <Announcer />
    </>
  );
}

effect(() => {
  const shown = conversation.value;
  const count = shown?.questions.value.length ?? 0;
  const title = shown?.title.value || "Retinue";
  document.title = `${count > 0 ? `(${count}) ` : ""}${title}`;
  queueMicrotask(noteQuestions);
});

async function begin(): Promise<void> {
  const token = takeToken();
  if (token !== null) {
    try {
      return await signIn(token);
    } catch {
      hasFailed.value = true;
    }
  }
  await whoami().catch(() => window.setTimeout(() => void begin(), 2000));
}

render(<Page />, document.getElementById("page")!);
void begin();
