/**
 * The open questions of a thread, at any depth, in the order in which they were asked.
 *
 * An answer is sent once with an id of its own, and its button says so until the log has it. Nothing here takes the
 * focus, and no key answers a question that has just appeared or moved.
 */

import { useSignal, type Signal } from "@preact/signals";
import type { Question } from "retinue-client";
import type { ComponentChildren } from "preact";
import { useEffect, useId, useMemo, useRef } from "preact/hooks";
import { ApiError } from "./api.ts";
import { pathOf } from "./body.ts";
import { Diff, isDrawn } from "./diff.tsx";
import {
  argumentsSchema,
  asks,
  fieldsOf,
  fromText,
  toText,
  type Asks,
  type Field,
} from "./form.ts";
import { argumentsLine, clock, exact, firstLine, prose } from "./format.ts";
import { Glyph } from "./icons.tsx";
import { now } from "./live.ts";
import * as page from "./page.ts";
import { address } from "./route.ts";
import { link } from "./socket.ts";
import { answer, conversation } from "./state.ts";

/** Arguments of more lines must have been opened before they can be approved. */
const MOST_LINES = 40;
const MOST_SIGNS = 6000;
/** Among so many runs, the task tells who asks. */
const MANY = 12;
/** A question that fits on two lines has its buttons beside it. */
const SHORT = 90;

type Mode = "ask" | "edit" | "reject" | "sent";

/** What the user has begun to write, by question; a new frame or a lost connection does not take it away. */
interface Draft {
  readonly mode: Signal<Mode>;
  readonly values: Signal<Readonly<Record<string, string>>>;
  readonly json: Signal<string | null>;
  readonly text: Signal<string>;
  readonly problem: Signal<string>;
  readonly isSeen: Signal<boolean>;
}

const newId = (): string => `page_${crypto.randomUUID?.() ?? Math.random().toString(36).slice(2)}`;

export function Questions() {
  const shown = conversation.value;
  const open = shown?.questions.value ?? [];
  const count = open.length;
  const region = useRef<HTMLElement>(null);
  useEffect(() => {
    // The line at the top tells once that a question has come.
    region.current?.classList.add("new");
    const timer = setTimeout(() => region.current?.classList.remove("new"), 700);
    return () => clearTimeout(timer);
  }, [open.at(-1)?.ticket.id]);
  if (shown === null || count === 0) return null;
  return (
    <section
      class="questions scroll"
      role="region"
      aria-label="Questions"
      tabIndex={0}
      ref={region}>
      <div class="col">
        {open.map((one, place) => (
          <Item
            key={`${one.answerTo}/${one.path}/${one.askedAt}`}
            question={one}
            place={place}
            count={count}
          />
        ))}
      </div>
    </section>
  );
}

interface ItemProps {
  readonly question: Question;
  readonly place: number;
  readonly count: number;
}

function Item({ question, place, count }: ItemProps) {
  const draft: Draft = {
    mode: useSignal<Mode>("ask"),
    values: useSignal<Readonly<Record<string, string>>>({}),
    json: useSignal<string | null>(null),
    text: useSignal(""),
    problem: useSignal(""),
    isSeen: useSignal(false),
  };
  const decisionId = useMemo(newId, []);
  const kind = asks(question.ticket.response_schema, question.ticket.resume_mode);
  const send = async (decision: object): Promise<void> => {
    if (draft.mode.value === "sent" || link.value !== "live") return;
    const before = draft.mode.value;
    draft.mode.value = "sent";
    draft.problem.value = "";
    try {
      await answer(question, { ...decision, id: decisionId });
    } catch (error) {
      // The words stay; the id may be used again, because nothing was accepted.
      draft.mode.value = before;
      draft.problem.value = error instanceof ApiError ? error.message : String(error);
    }
  };
  const asked = { question, kind, draft, send };
  const hasRoom = isShort(question, kind) && draft.mode.value === "ask";
  return (
    <article
      class={hasRoom ? "q short" : "q"}
      data-question={question.callId}
      data-path={question.path}
      aria-label={`Question ${place + 1} of ${count}`}>
      <div class="line">
        <Glyph status="waiting" />
        <span class="of">
          {place + 1} of {count}
        </span>
        <Asker question={question} isShort={isShort(question, kind)} kind={kind} />
        {hasRoom ? <Choices {...asked} /> : <Since question={question} />}
      </div>
      <Rest {...asked} />
      {draft.problem.value && (
        <p class="err" role="alert">
          {draft.problem.value} Your words are kept.
        </p>
      )}
    </article>
  );
}

interface PartProps {
  readonly question: Question;
  readonly kind: Asks;
  readonly draft: Draft;
  readonly send: (decision: object) => Promise<void>;
}

const isApproval = (kind: Asks): boolean => kind === "approval" || kind === "consent";

function isShort(question: Question, kind: Asks): boolean {
  if (!isApproval(kind)) return false;
  const values = Object.values(question.args);
  const text = values
    .map((value) => (typeof value === "string" ? value : JSON.stringify(value)))
    .join(" ");
  return values.length <= 1 && text.length <= SHORT && !/\s\s|[\n\t]/.test(text);
}

function Asker({ question, isShort, kind }: { question: Question; isShort: boolean; kind: Asks }) {
  const live = conversation.value?.find(question.runId);
  const node = live?.tree.runs.get(question.runId);
  const above =
    live === undefined || node === undefined ? [] : pathOf(live.tree, node).slice(0, -1);
  return (
    <span class={`path said ${isShort ? "" : "cut"}`}>
      {above.map((one) => `${exact(one.agent)} › `)}
      <b>{exact(question.agent)}</b>
      {(live?.tree.runs.size ?? 0) > MANY &&
        node !== undefined &&
        ` (${prose(firstLine(node.task).slice(0, 40))})`}
      {isApproval(kind) ? " wants " : " asks in "}
      <span class="mono">{exact(question.tool)}</span>
      {isShort && <span class="mono"> {exact(argumentsLine(question.args))}</span>}
    </span>
  );
}

function Since({ question }: { question: Question }) {
  if (question.askedAt === null) return null;
  return <span class="since">waits {clock(now.value - question.askedAt)}</span>;
}

function Rest(asked: PartProps) {
  const { question, kind, draft } = asked;
  const mode = draft.mode.value;
  if (mode === "edit") return <EditForm {...asked} />;
  if (mode === "reject") return <RejectForm {...asked} />;
  if (mode === "ask" && isShort(question, kind)) return null;
  return (
    <>
      {isApproval(kind) ? (
        <What question={question} draft={draft} />
      ) : (
        <Words question={question} />
      )}
      {kind === "text" && <TextForm {...asked} />}
      {kind === "data" && <DataForm {...asked} />}
      {isApproval(kind) && <Choices {...asked} />}
    </>
  );
}

function GoTo({ question }: { question: Question }) {
  const shown = conversation.value;
  const live = shown?.find(question.runId);
  if (shown === null || live === undefined) return null;
  return (
    <a class="link go" href={address(shown.threadId, live.runId, question.ns)}>
      Go to card
    </a>
  );
}

/** All that will be done. */
function What({ question, draft }: { question: Question; draft: Draft }) {
  const { args, ticket } = question;
  const edit = editOf(args);
  const size = JSON.stringify(args).length;
  const lines = Object.values(args).reduce<number>(
    (sum, value) =>
      sum + (typeof value === "string" ? value : JSON.stringify(value, null, 1)).split("\n").length,
    0,
  );
  const isLong = lines > MOST_LINES || size > MOST_SIGNS;
  if (isLong && !draft.isSeen.value) {
    return (
      <p class="asks">
        <button type="button" class="link" onClick={() => (draft.isSeen.value = true)}>
          Show all {lines} lines, {size} characters
        </button>
      </p>
    );
  }
  draft.isSeen.value = true;
  const custom = ticket.message && !/^May .* call /.test(ticket.message) ? ticket.message : "";
  return (
    <>
      {custom && (
        <p class="asks said" dir="auto">
          {prose(custom)}
        </p>
      )}
      {edit !== null ? (
        <div class="asks">
          <Diff title={edit.path} before={edit.before} after={edit.after} />
        </div>
      ) : (
        Object.keys(args).length > 0 && (
          <dl class="args-list">
            {Object.entries(args).map(([name, value]) => (
              <Argument key={name} name={name} value={value} />
            ))}
          </dl>
        )
      )}
    </>
  );
}

function Argument({ name, value }: { name: string; value: unknown }) {
  return (
    <>
      <dt class="said">{exact(name)}</dt>
      <dd class="said" dir="auto">
        {exact(typeof value === "string" ? value : JSON.stringify(value, null, 1))}
      </dd>
    </>
  );
}

/** Return the change of a file, if a call is one and has nothing else to show. */
function editOf(
  args: Readonly<Record<string, unknown>>,
): { path: string; before: string; after: string } | null {
  const text = (...names: string[]): string | undefined => {
    const name = names.find((one) => typeof args[one] === "string");
    return name === undefined ? undefined : (args[name] as string);
  };
  const path = text("path", "file_path", "file");
  const before = text("old_string", "old", "old_text");
  const after = text("new_string", "new", "new_text");
  if (path === undefined || before === undefined || after === undefined) return null;
  const isWhole = Object.keys(args).length === 3 && isDrawn(before) && isDrawn(after);
  return isWhole ? { path, before, after } : null;
}

function Words({ question }: { question: Question }) {
  const { ticket } = question;
  return (
    <p class="asks said" dir="auto">
      {prose(ticket.message || ticket.action)}
    </p>
  );
}

function Choices({ question, kind, draft, send }: PartProps) {
  const mode = draft.mode.value;
  const isOff = mode === "sent" || link.value !== "live";
  const isHidden = !isShort(question, kind) && !draft.isSeen.value;
  const approve =
    kind === "approval" ? { action: "approve", payload: { approved: true } } : CONSENT;
  return (
    <div class="acts">
      {!isShort(question, kind) && <GoTo question={question} />}
      <button
        type="button"
        class="btn main small"
        title={isHidden ? "Show all of it first" : "Approve (a)"}
        disabled={isOff || isHidden}
        onClick={() => void send(approve)}>
        {mode === "sent" ? "Sent" : "Approve"}
      </button>
      {question.ticket.editable && (
        <button
          type="button"
          class="btn small"
          title="Edit (e)"
          disabled={isOff}
          onClick={() => (draft.mode.value = "edit")}>
          Edit
        </button>
      )}
      <button
        type="button"
        class="btn small"
        title="Reject (r)"
        disabled={isOff}
        onClick={() => (draft.mode.value = "reject")}>
        Reject
      </button>
    </div>
  );
}

const CONSENT = { action: "resume", payload: { approved: true } };

function Answers(options: {
  draft: Draft;
  note: string;
  onSend: () => void;
  onCancel: (() => void) | null;
  more?: ComponentChildren;
}) {
  const { draft, note, onSend, onCancel, more } = options;
  const isSent = draft.mode.value === "sent";
  return (
    <div class="acts">
      <span class="note">{note}</span>
      <button
        type="button"
        class="btn main small"
        title="Send answer (Ctrl+Enter)"
        disabled={isSent || link.value !== "live"}
        onClick={onSend}>
        {isSent ? "Sent" : "Send answer"}
      </button>
      {more}
      {onCancel !== null && (
        <button type="button" class="btn small" onClick={onCancel}>
          Cancel
        </button>
      )}
    </div>
  );
}

function onKeys(send: () => void): (event: KeyboardEvent) => void {
  return (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
    }
    event.stopPropagation();
  };
}

/** One field for each value, and all of them as JSON. */
function Fields(options: {
  fields: Field[];
  start: Readonly<Record<string, unknown>>;
  draft: Draft;
  onSend: () => void;
}) {
  const { fields, start, draft, onSend } = options;
  const id = useId();
  const shown = (field: Field): string =>
    draft.values.value[field.name] ?? toText(start[field.name], field.type);
  const write = (field: Field, text: string): void => {
    draft.json.value = null;
    draft.values.value = { ...draft.values.value, [field.name]: text };
  };
  const readJson = (text: string): void => {
    draft.json.value = text;
    try {
      const value = JSON.parse(text) as Readonly<Record<string, unknown>>;
      draft.values.value = Object.fromEntries(
        fields.map((one) => [one.name, toText(value[one.name], one.type)]),
      );
    } catch {
      // It is read when it is sent; until then the fields keep what they have.
    }
  };
  const json = draft.json.value ?? JSON.stringify(tryRead(fields, start, draft));
  return (
    <div class="form" onKeyDown={onKeys(onSend)}>
      {fields.map((field, place) => {
        const text = shown(field);
        const name = `${id}-${place}`;
        return (
          <>
            <label for={name} class="said">
              {exact(field.name)}
            </label>
            <textarea
              id={name}
              class="field"
              aria-label={field.name}
              rows={Math.min(10, text.split("\n").length)}
              spellcheck={false}
              dir="auto"
              value={text}
              onInput={(event) => write(field, event.currentTarget.value)}
            />
          </>
        );
      })}
      <label for={`${id}-json`}>JSON</label>
      <textarea
        id={`${id}-json`}
        class="field one"
        aria-label="JSON"
        rows={1}
        spellcheck={false}
        value={json}
        onInput={(event) => readJson(event.currentTarget.value)}
      />
    </div>
  );
}

/** Return the values of a form; raise an error that says what to write. */
function read(
  fields: readonly Field[],
  start: Readonly<Record<string, unknown>>,
  draft: Draft,
): Record<string, unknown> {
  if (draft.json.value !== null) {
    const value: unknown = JSON.parse(draft.json.value);
    if (typeof value !== "object" || value === null) throw new Error("JSON: write an object");
    return value as Record<string, unknown>;
  }
  const given = { ...start };
  for (const field of fields) {
    const text = draft.values.value[field.name];
    if (text === undefined || (text === "" && !(field.name in start) && field.type !== "string"))
      continue;
    given[field.name] = fromText(text, field);
  }
  return given;
}

function tryRead(
  fields: readonly Field[],
  start: Readonly<Record<string, unknown>>,
  draft: Draft,
): object {
  try {
    return read(fields, start, draft);
  } catch {
    return { ...start, ...draft.values.value };
  }
}

function EditForm({ question, draft, send }: PartProps) {
  const schema = argumentsSchema(question.ticket.response_schema);
  const fields = useMemo(() => fieldsOf(schema, question.args), [question]);
  const submit = (): void => {
    try {
      const args = read(fields, question.args, draft);
      void send({ action: "approve", payload: { approved: true, args } });
    } catch (error) {
      draft.problem.value = (error as Error).message;
    }
  };
  const given = tryRead(fields, question.args, draft);
  const [before, after] = [lines(question.args, given), lines(given, question.args)];
  return (
    <>
      <Fields fields={fields} start={question.args} draft={draft} onSend={submit} />
      {before !== after && (
        <div class="form changed">
          <span />
          <Diff title="Your change" before={before} after={after} />
        </div>
      )}
      <Answers
        draft={draft}
        note="The agent goes on with what you write."
        onSend={submit}
        onCancel={() => (draft.mode.value = "ask")}
      />
    </>
  );
}

/** Return the values that differ from others, texts as they are: what an edit changes is shown before it is sent. */
function lines(values: object, others: object): string {
  const other = new Map(Object.entries(others));
  return Object.entries(values)
    .filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(other.get(name)))
    .map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join("\n");
}

function RejectForm({ kind, draft, send }: PartProps) {
  const id = useId();
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => field.current?.focus(), []);
  const submit = (): void => {
    const reason = draft.text.value.trim();
    const action = kind === "approval" ? "reject" : "cancel";
    void send({ action, ...(reason ? { reason } : {}) });
  };
  return (
    <>
      <div class="form" onKeyDown={onKeys(submit)}>
        <label for={id}>reason</label>
        <textarea
          id={id}
          ref={field}
          class="field sansf"
          aria-label="Reason"
          rows={1}
          value={draft.text.value}
          onInput={(event) => (draft.text.value = event.currentTarget.value)}
        />
      </div>
      <Answers
        draft={draft}
        note="The agent reads your reason and goes on."
        onSend={submit}
        onCancel={() => (draft.mode.value = "ask")}
      />
    </>
  );
}

function Refuse({ draft }: { draft: Draft }) {
  return (
    <button
      type="button"
      class="btn small"
      title="Reject (r)"
      onClick={() => (draft.mode.value = "reject")}>
      Reject
    </button>
  );
}

function TextForm({ question, draft, send }: PartProps) {
  const submit = (): void =>
    void send({ action: "resume", payload: draft.values.value["Answer"] ?? "" });
  const text = draft.values.value["Answer"] ?? "";
  const options = question.ticket.response_schema?.["enum"];
  return (
    <>
      <div class="form one" onKeyDown={onKeys(submit)}>
        <textarea
          class="field sansf"
          aria-label="Answer"
          rows={Math.min(8, text.split("\n").length)}
          value={text}
          onInput={(event) => (draft.values.value = { Answer: event.currentTarget.value })}
        />
        {Array.isArray(options) && (
          <span class="choices">
            {options.map((one) => (
              <button
                type="button"
                key={String(one)}
                class="chip"
                onClick={() => (draft.values.value = { Answer: String(one) })}>
                {exact(String(one))}
              </button>
            ))}
          </span>
        )}
      </div>
      <Answers
        draft={draft}
        note="The agent reads your answer and goes on."
        onSend={submit}
        onCancel={null}
        more={<Refuse draft={draft} />}
      />
    </>
  );
}

function DataForm({ question, draft, send }: PartProps) {
  const start = question.ticket.resume_mode === "pass_decision" ? question.args : {};
  const fields = useMemo(() => fieldsOf(question.ticket.response_schema ?? {}, start), [question]);
  const submit = (): void => {
    try {
      void send({ action: "resume", payload: read(fields, start, draft) });
    } catch (error) {
      draft.problem.value = (error as Error).message;
    }
  };
  return (
    <>
      <Fields fields={fields} start={start} draft={draft} onSend={submit} />
      <Answers
        draft={draft}
        note="The agent goes on with what you write."
        onSend={submit}
        onCancel={null}
        more={<Refuse draft={draft} />}
      />
    </>
  );
}

/** Move to the next question; the keys `a`, `e` and `r` then answer it. */
export function nextQuestion(): void {
  const all = [...document.querySelectorAll<HTMLElement>("article[data-question]")];
  if (all.length === 0) return;
  const present = all.findIndex((one) => one.contains(document.activeElement));
  const next = all[(present + 1) % all.length]!;
  next.tabIndex = -1;
  next.focus();
  page.pane.value = "chat";
}
