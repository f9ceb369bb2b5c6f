// Written by scripts/client_types.py from the OpenAPI description of the server. Do not edit.

export interface AgentShape {
  readonly description: string;
  readonly handoffs: readonly string[];
  readonly max_steps: number;
  readonly model: string | null;
  readonly name: string;
  readonly served: boolean;
  readonly subagents: readonly string[];
  readonly tools: readonly ToolShape[];
}

export interface ToolShape {
  readonly description: string;
  readonly name: string;
}

/** `POST runs`: start a run of an agent. */
export interface StartRun {
  readonly agent: string;
  readonly input: string | readonly InputMessage[];
  readonly thread_id?: string | null;
  readonly context?: Readonly<Record<string, unknown>> | null;
  readonly state?: Readonly<Record<string, unknown>> | null;
  readonly limits?: Limits | null;
  readonly when_busy?: "enqueue" | "interrupt" | "reject";
  readonly queue?: string | null;
  readonly priority?: number;
  readonly delay?: number;
}

/** A message of the input: `content` is text or a list of parts; a stored message, with `parts`, fits too. */
export interface InputMessage {
  readonly role?: Role;
  readonly content?: string | readonly (TextPart | ReasoningPart | ImagePart | FilePart | DataPart)[] | null;
  readonly parts?: readonly (TextPart | ReasoningPart | ImagePart | FilePart | DataPart)[] | null;
  readonly text?: string | null;
  readonly id?: string | null;
  readonly name?: string | null;
  readonly visibility?: Visibility;
}

/** The speaker of a message. */
export type Role = "assistant" | "system" | "tool" | "user";

/** Text. */
export interface TextPart {
  readonly type: "text";
  readonly text: string;
}

/** Reasoning of the model, with the provider's `signature` of it. */
export interface ReasoningPart {
  readonly type: "reasoning";
  readonly text: string;
  readonly signature: string | null;
}

/** An image by address or as base64 data. */
export interface ImagePart {
  readonly type: "image";
  readonly url: string | null;
  readonly data: string | null;
  readonly media_type: string;
}

/** A document by address or as base64 data. */
export interface FilePart {
  readonly type: "file";
  readonly url: string | null;
  readonly data: string | null;
  readonly media_type: string;
  readonly name: string | null;
}

/** A JSON value. */
export interface DataPart {
  readonly type: "data";
  readonly data: unknown;
}

/** The readers of a message: everybody, or only the model. */
export type Visibility = "all" | "internal";

/** Limits that a run and everything under it share. A field that is left out is not set. A root for which they are not set may nest 3 deep, start 256 children and make 32 calls in parallel, and the others do not limit it. For a child, only the limits above it hold then. */
export interface Limits {
  readonly depth?: number;
  readonly children?: number;
  readonly parallel?: number;
  readonly steps?: number | null;
  readonly tokens?: number | null;
  readonly cost?: number | null;
  readonly seconds?: number | null;
}

/** A run by its id, and how it stands. */
export interface RunState {
  readonly run_id: string;
  readonly status: string;
  readonly thread_id: string;
}

export interface RunShape {
  readonly agent: string;
  readonly ended_at: string | null;
  readonly error: string | null;
  readonly log_id: string;
  readonly lost: number;
  readonly orphaned: boolean;
  readonly parent_run_id: string | null;
  readonly response: string | null;
  readonly run_id: string;
  readonly started_at: string | null;
  readonly status: string;
  readonly steps: number | null;
  readonly termination: string | null;
  readonly thread_id: string;
  readonly usage: Usage | null;
  readonly user_id: string | null;
  readonly waits_for: Readonly<Record<string, unknown>>;
}

/** Usage of models; it adds up. Each field is a number from 0 to 2**53, whoever reports it and however it is made: fields outside are bounded, a part of a token is cut off, and one that is no number is 0. So a sum never falls, and every log that holds usage can be read. */
export interface Usage {
  readonly requests?: number;
  readonly input_tokens?: number;
  readonly output_tokens?: number;
  readonly cached_tokens?: number;
  readonly cache_write_tokens?: number;
  readonly reasoning_tokens?: number;
  readonly cost?: number;
  readonly waited?: number;
}

export interface OneRun {
  readonly agent: string;
  readonly can_fork: readonly string[];
  readonly cost_known: boolean;
  readonly ended_at: string | null;
  readonly error: string | null;
  readonly input: readonly MessageShape[];
  readonly log_id: string;
  readonly lost: number;
  readonly orphaned: boolean;
  readonly parent_run_id: string | null;
  readonly response: string | null;
  readonly run_id: string;
  readonly started_at: string | null;
  readonly status: string;
  readonly steps: number | null;
  readonly termination: string | null;
  readonly thread_id: string;
  readonly usage: Usage | null;
  readonly user_id: string | null;
  readonly waits_for: Readonly<Record<string, unknown>>;
}

export interface MessageShape {
  readonly id: string | null;
  readonly name: string | null;
  readonly parts: readonly unknown[];
  readonly role: string;
  readonly text: string;
  readonly tool_call_id: string | null;
  readonly tool_calls: readonly unknown[];
}

/** The outcome of a run that has ended or waits. */
export interface ResultShape {
  readonly error: string | null;
  readonly messages: readonly MessageShape[];
  readonly output: unknown;
  readonly receipt: Receipt | null;
  readonly response: string | null;
  readonly run_id: string;
  readonly state: Readonly<Record<string, unknown>>;
  readonly status: string;
  readonly steps: number;
  readonly suspended: Readonly<Record<string, unknown>>;
  readonly termination: string;
  readonly thread_id: string;
  readonly usage: Usage;
}

/** The deeds of a run and of everything below it, by the events of its log. */
export interface Receipt {
  readonly status: string;
  readonly steps?: number;
  readonly calls?: number;
  readonly failed?: number;
  readonly failures?: readonly Failure[];
  readonly approvals?: readonly Approval[];
  readonly limits?: readonly string[];
  readonly files?: readonly string[];
  readonly files_changed?: number;
  readonly shell?: number;
  readonly open_tasks?: number;
  readonly children?: number;
  readonly not_completed?: number;
  readonly reported_by?: string | null;
  readonly remote?: readonly string[];
}

/** A call that failed, was denied or was cancelled. */
export interface Failure {
  readonly tool: string;
  readonly code: string;
  readonly reason: string;
}

/** A human's answer to a call that waited. */
export interface Approval {
  readonly tool: string;
  readonly answer: "answered" | "approved" | "cancelled" | "rejected";
  readonly by: string;
}

/** `POST runs/{id}/cancel`: with `ns`, only the run at that namespace below it is stopped; background tasks only with `tasks`. `grace` is in seconds. */
export interface CancelRun {
  readonly ns?: readonly string[];
  readonly tasks?: boolean;
  readonly reason?: string;
  readonly grace?: number;
}

/** `POST runs/{id}/messages`: messages for a run at work; with `ns`, for the run at that namespace below it. */
export interface SendMessages {
  readonly input: string | readonly InputMessage[];
  readonly ns?: readonly string[];
}

/** `POST runs/{id}/decisions`: keys are call ids, ticket ids, or paths of call ids joined by `/`. */
export interface Decisions {
  readonly decisions: Readonly<Record<string, DecisionBody>>;
}

/** One decision. The same `id` twice is one decision. A field that the action does not use is refused. */
export interface DecisionBody {
  readonly action: "answer" | "approve" | "cancel" | "reject" | "resume";
  readonly payload?: unknown;
  readonly reason?: string | null;
  readonly id?: string | null;
}

/** `POST runs/{id}/fork`: continue a run as it was after event number `after`, or at a message, on a new thread. */
export interface ForkRun {
  readonly after?: number | null;
  readonly message_id?: string | null;
  readonly input?: string | readonly InputMessage[] | null;
  readonly decisions?: Readonly<Record<string, DecisionBody>> | null;
}

/** The first event of a run. */
export interface RunStarted {
  readonly kind: "run_started";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly thread_id: string;
  readonly parent_tool_call_id: string | null;
  readonly messages: readonly Message[];
  readonly continues: boolean;
}

/** One message of a conversation. */
export interface Message {
  readonly role: Role;
  readonly parts?: readonly (TextPart | ReasoningPart | ImagePart | FilePart | DataPart | ReceiptPart)[];
  readonly tool_calls?: readonly ToolCall[];
  readonly tool_call_id?: string | null;
  readonly name?: string | null;
  readonly id?: string | null;
  readonly visibility?: Visibility;
}

/** The receipt of a sub-agent, behind its text. Only the runtime makes one; it is not in `Message.text`. */
export interface ReceiptPart {
  readonly type: "receipt";
  readonly receipt: Receipt;
  readonly task_id?: string;
}

/** One call the model asked for. `malformed` holds its argument text where that was no JSON object, or too deep or large. */
export interface ToolCall {
  readonly id: string;
  readonly name: string;
  readonly args: Readonly<Record<string, unknown>>;
  readonly malformed: string | null;
}

/** The last event of a run, whatever its status. */
export interface RunFinished {
  readonly kind: "run_finished";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly status: RunStatus;
  readonly termination: string;
  readonly response: string | null;
  readonly error: string | null;
  readonly steps: number;
  readonly usage: Usage;
  readonly output: unknown;
  readonly receipt: Receipt | null;
}

/** The status of a run. */
export type RunStatus = "cancelled" | "completed" | "failed" | "running" | "suspended" | "timeout" | "waiting_auth" | "waiting_input";

/** A step begins: one model call and the tool calls it asks for. */
export interface StepStarted {
  readonly kind: "step_started";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly step: number;
  readonly model: string;
}

/** A step and its tool calls have ended. */
export interface StepFinished {
  readonly kind: "step_finished";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly step: number;
}

/** A piece of the model's text. */
export interface TextDelta {
  readonly kind: "text_delta";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly delta: string;
  readonly message_id: string;
}

/** A piece of the model's reasoning. */
export interface ReasoningDelta {
  readonly kind: "reasoning_delta";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly delta: string;
  readonly message_id: string;
}

/** The request has waited for a second, because the provider takes no more. The next event of the run ends the wait. */
export interface InferenceWaiting {
  readonly kind: "inference_waiting";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly reason: "overloaded" | "rate_limit";
  readonly position: number;
  readonly until: number;
  readonly message: string;
}

/** The model has answered: `message` is the whole answer. */
export interface InferenceFinished {
  readonly kind: "inference_finished";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly step: number;
  readonly message: Message;
  readonly model: string;
  readonly stop_reason: string;
  readonly usage: Usage;
}

/** The model began to ask for a call; its arguments are still coming. */
export interface ToolCallStarted {
  readonly kind: "tool_call_started";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly tool_name: string;
  readonly message_id: string;
}

/** A piece of the arguments of a call, as JSON text. */
export interface ToolCallArgsDelta {
  readonly kind: "tool_call_args_delta";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly delta: string;
}

/** The call's arguments are complete and its work begins. */
export interface ToolCallReady {
  readonly kind: "tool_call_ready";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly tool_name: string;
  readonly args: Readonly<Record<string, unknown>>;
  readonly tool_id: string | null;
}

/** A call has ended, or waits for a human. */
export interface ToolCallFinished {
  readonly kind: "tool_call_finished";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly tool_name: string;
  readonly status: ToolCallStatus;
  readonly result: ToolResult;
  readonly message: Message;
}

/** The status of a tool call. */
export type ToolCallStatus = "cancelled" | "failed" | "new" | "resuming" | "running" | "succeeded" | "suspended";

/** The outcome of a call as the tool tells it. `tool_name` is filled in by the runtime. */
export interface ToolResult {
  readonly tool_name?: string;
  readonly status?: ToolStatus;
  readonly data?: unknown;
  readonly message?: string | null;
  readonly suspension?: SuspendTicket | null;
  readonly metadata?: Readonly<Record<string, unknown>>;
}

/** The status of a result. */
export type ToolStatus = "error" | "pending" | "success";

/** A question to a human, which a suspended call waits for. */
export interface SuspendTicket {
  readonly id: string;
  readonly action: string;
  readonly message: string;
  readonly parameters: unknown;
  readonly response_schema: Readonly<Record<string, unknown>> | null;
  readonly resume_mode: ResumeMode;
  readonly editable: boolean;
  readonly path: readonly string[];
}

/** The effect of a decision on a suspended call. */
export type ResumeMode = "pass_decision" | "replay" | "use_decision";

/** A piece of output of a call that is still running. */
export interface ToolCallStreamDelta {
  readonly kind: "tool_call_stream_delta";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly tool_name: string;
  readonly delta: string;
}

/** A call that waited continues. */
export interface ToolCallResumed {
  readonly kind: "tool_call_resumed";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly tool_name: string;
  readonly decision: Decision | null;
  readonly args: Readonly<Record<string, unknown>> | null;
}

/** The answer to a suspended call. The same `id` twice is one decision. */
export interface Decision {
  readonly id: string;
  readonly action: "answer" | "approve" | "cancel" | "reject" | "resume";
  readonly payload: unknown;
  readonly reason: string | null;
  readonly by: string | null;
}

/** The persistent state a run begins with. */
export interface StateSnapshot {
  readonly kind: "state_snapshot";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly revision: number;
  readonly state: Readonly<Record<string, unknown>>;
}

/** One commit: the new values of the persistent keys it wrote. */
export interface StateDelta {
  readonly kind: "state_delta";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly revision: number;
  readonly delta: Readonly<Record<string, unknown>>;
  readonly call_id: string | null;
}

/** The conversation a run continues, before its input. */
export interface MessagesSnapshot {
  readonly kind: "messages_snapshot";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly messages: readonly Message[];
}

/** A message for a run at work was accepted: the model reads it with its next request. */
export interface MessageAdded {
  readonly kind: "message_added";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly message: Message;
}

/** A run has ended before the model read a message that was accepted. */
export interface MessageDropped {
  readonly kind: "message_dropped";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly message_id: string;
  readonly reason: string;
}

/** The activity that a call shows; it replaces the earlier one of its type. */
export interface ActivitySnapshot {
  readonly kind: "activity_snapshot";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly activity_type: string;
  readonly content: unknown;
}

/** A JSON Patch to the activity of that type. */
export interface ActivityDelta {
  readonly kind: "activity_delta";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly activity_type: string;
  readonly delta: readonly unknown[];
}

/** A call has started a child run. */
export interface ChildStarted {
  readonly kind: "child_started";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly child_run_id: string;
  readonly child_agent: string;
  readonly child_ns: readonly string[];
  readonly description: string;
}

/** A child run has ended, or waits. */
export interface ChildFinished {
  readonly kind: "child_finished";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly call_id: string;
  readonly child_run_id: string;
  readonly child_agent: string;
  readonly status: RunStatus;
}

/** A background task has a new status. */
export interface TaskUpdated {
  readonly kind: "task_updated";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly task_id: string;
  readonly status: string;
  readonly call_id: string;
}

/** Another agent continues the run. */
export interface Handoff {
  readonly kind: "handoff";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly to_agent: string;
  readonly reason: string;
}

/** The model reads less of the conversation from now on, because its window was nearly full. What is stored stays whole. */
export interface Compacted {
  readonly kind: "compacted";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly tokens_before: number;
  readonly tokens_after: number;
  readonly kept_from: string;
  readonly path: string;
  readonly summary: string;
  readonly usage: Usage;
  readonly problem: string | null;
}

/** The next request does not begin like the last one, so that the provider's cache does not have it. */
export interface CachePrefixChanged {
  readonly kind: "cache_prefix_changed";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly cause: string;
  readonly tokens: number;
}

/** Data that a tool or plugin sends to the readers of the events. */
export interface Custom {
  readonly kind: "custom";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly data: unknown;
  readonly call_id: string | null;
}

/** Four fifths of a budget are spent. One run says so, once in each window. */
export interface BudgetWarning {
  readonly kind: "budget_warning";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly budget: string;
  readonly cost: number | null;
  readonly tokens: number | null;
  readonly spent_cost: number;
  readonly spent_tokens: number;
  readonly renews_at: number;
}

/** An error; `fatal` if it ends the run. */
export interface ErrorRaised {
  readonly kind: "error";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly message: string;
  readonly code: string | null;
  readonly fatal: boolean;
  readonly retry_model: string | null;
  readonly retry_delay: number;
  readonly dropped_message_id: string | null;
}

/** A stored event of a kind this version does not know, kept as it was. */
export interface UnknownEvent {
  readonly kind: "unknown";
  readonly seq: number;
  readonly at: number;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly ns: readonly string[];
  readonly original: Readonly<Record<string, unknown>>;
}

/** A part of a stream, in the shape of LangGraph's. */
export interface PartShape {
  readonly data: unknown;
  readonly ns: readonly string[];
  readonly type: string;
}

export interface SnapshotShape {
  readonly questions: readonly QuestionShape[];
  readonly run: TreeShape | null;
  readonly seq: number;
  readonly status: string;
  readonly tasks: readonly TaskShape[];
}

export interface QuestionShape {
  readonly agent: string;
  readonly answer_to: string;
  readonly args: Readonly<Record<string, unknown>>;
  readonly asked_at: string | null;
  readonly call_id: string;
  readonly ns: readonly string[];
  readonly path: string;
  readonly run_id: string;
  readonly ticket: SuspendTicket;
  readonly tool: string;
}

/** A run of a snapshot, with its calls and messages. */
export interface TreeShape {
  readonly agent: string;
  readonly calls: readonly CallShape[];
  readonly children: number;
  readonly ended_at: string | null;
  readonly error: string | null;
  readonly messages: readonly Message[];
  readonly model: string;
  readonly notes: readonly string[];
  readonly ns: readonly string[];
  readonly open_message: OpenMessageShape | null;
  readonly queued: readonly Message[];
  readonly receipt: Receipt | null;
  readonly response: string | null;
  readonly run_id: string;
  readonly started_at: string | null;
  readonly status: RunStatus;
  readonly steps: number;
  readonly tail: string;
  readonly task: string;
  readonly termination: string;
  readonly thread_id: string;
  readonly total_usage: Usage;
  readonly usage: Usage;
  readonly wait: WaitShape | null;
}

/** A call of a run in a snapshot, with the runs that it started. */
export interface CallShape {
  readonly args: Readonly<Record<string, unknown>>;
  readonly call_id: string;
  readonly children: readonly TreeShape[];
  readonly ended_at: string | null;
  readonly error: string | null;
  readonly is_task: boolean;
  readonly output: string;
  readonly result: string | null;
  readonly started_at: string | null;
  readonly starting: readonly string[];
  readonly status: ToolCallStatus;
  readonly step: number;
  readonly ticket: SuspendTicket | null;
  readonly tool: string;
}

/** What is there of an answer in progress; of its calls the JSON text of the arguments, by call id. */
export interface OpenMessageShape {
  readonly calls: Readonly<Record<string, string>>;
  readonly id: string;
  readonly reasoning: string;
  readonly text: string;
}

/** The wait of a run for its model provider. */
export interface WaitShape {
  readonly message: string;
  readonly position: number | null;
  readonly reason: string;
  readonly until: string;
}

export interface TaskShape {
  readonly agent: string;
  readonly awaiting: string | null;
  readonly call_id: string | null;
  readonly child_run_id: string | null;
  readonly run_id: string;
  readonly started_at: string | null;
  readonly status: string;
  readonly task_id: string;
  readonly updated_at: string | null;
}

export interface ChildShape {
  readonly agent: string;
  readonly call_id: string;
  readonly children: number;
  readonly ended_at: string | null;
  readonly error: string | null;
  readonly model: string;
  readonly notes: readonly string[];
  readonly ns: readonly string[];
  readonly parent_run_id: string;
  readonly receipt: Receipt | null;
  readonly response: string | null;
  readonly run_id: string;
  readonly started_at: string | null;
  readonly status: RunStatus;
  readonly steps: number;
  readonly tail: string;
  readonly task: string;
  readonly termination: string;
  readonly thread_id: string;
  readonly total_usage: Usage;
  readonly usage: Usage;
  readonly wait: WaitShape | null;
}

export interface ListedTask {
  readonly agent: string;
  readonly awaiting: string | null;
  readonly call_id: string | null;
  readonly child_run_id: string | null;
  readonly log_id: string;
  readonly run_id: string;
  readonly started_at: string | null;
  readonly status: string;
  readonly task_id: string;
  readonly thread_id: string;
  readonly updated_at: string | null;
}

/** `POST tasks/{id}/cancel`: `run_id` is its root run; without it, the task is looked for. */
export interface CancelTask {
  readonly run_id?: string | null;
}

/** `POST threads`: make a conversation; with messages, it begins with them. */
export interface CreateThread {
  readonly thread_id?: string | null;
  readonly messages?: readonly InputMessage[];
}

export interface NewThread {
  readonly thread_id: string;
  readonly user_id: string;
}

export interface ThreadShape {
  readonly children: number;
  readonly questions: number;
  readonly status: string;
  readonly thread_id: string;
  readonly title: string;
  readonly usage: Usage;
  readonly used_at: string | null;
  readonly user_id: string | null;
}

export interface OneThread {
  readonly children: number;
  readonly questions: number;
  readonly run: RunShape | null;
  readonly status: string;
  readonly thread_id: string;
  readonly title: string;
  readonly usage: Usage;
  readonly used_at: string | null;
  readonly user_id: string | null;
}

/** `PATCH threads/{id}`: give a conversation another title. */
export interface PatchThread {
  readonly title: string;
}

export interface ThreadState {
  readonly revision: number;
  readonly run_id: string | null;
  readonly thread_id: string;
  readonly values: Readonly<Record<string, unknown>>;
}

/** `POST /tasks`: have an agent work on an input. The client chooses the id, so a repeated request changes nothing. */
export interface TaskSubmission {
  readonly task_id: string;
  readonly agent_id: string;
  readonly input: string;
  readonly context: Readonly<Record<string, unknown>>;
  readonly limits: Limits | null;
}

/** The state of a task: pending, running, success, error, cancelled, or something newer. */
export interface RemoteTask {
  readonly status: string;
  readonly result: string | null;
  readonly error: string | null;
  readonly task_id: string;
  readonly awaiting: Readonly<Record<string, SuspendTicket>>;
  readonly usage: Usage;
  readonly steps: number;
  readonly output: unknown;
  readonly termination: string;
  readonly run_id: string;
  readonly seq: number;
  readonly open: boolean;
  readonly receipt: Receipt | null;
}

/** `POST /tasks/{id}/cancel`: with `tasks`, its background tasks are stopped, too. */
export interface TaskCancel {
  readonly tasks: boolean;
}

export interface FileShape {
  readonly is_dir: boolean;
  readonly path: string;
  readonly size: number;
}

export interface WrittenFile {
  readonly path: string;
  readonly size: number;
}

/** A budget in its present window. */
export interface BudgetShape {
  readonly budget: string;
  readonly cost: number | null;
  readonly held: AmountShape;
  readonly key: string | null;
  readonly renews_at: string;
  readonly spent: AmountShape;
  readonly tokens: number | null;
}

export interface AmountShape {
  readonly cost: number;
  readonly tokens: number;
}

export interface UserShape {
  readonly scopes: readonly string[];
  readonly user_id: string;
}

export type RetinueEvent = RunStarted | RunFinished | StepStarted | StepFinished | TextDelta | ReasoningDelta | InferenceWaiting | InferenceFinished | ToolCallStarted | ToolCallArgsDelta | ToolCallReady | ToolCallFinished | ToolCallStreamDelta | ToolCallResumed | StateSnapshot | StateDelta | MessagesSnapshot | MessageAdded | MessageDropped | ActivitySnapshot | ActivityDelta | ChildStarted | ChildFinished | TaskUpdated | Handoff | Compacted | CachePrefixChanged | Custom | BudgetWarning | ErrorRaised | UnknownEvent;
