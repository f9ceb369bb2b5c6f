// A server of @a2a-js/sdk: node js_server.mjs <port>
import { randomUUID } from "node:crypto";
import { AgentCard, Task, TaskArtifactUpdateEvent, TaskStatusUpdateEvent } from "@a2a-js/sdk";
import { AgentEvent, DefaultRequestHandler, InMemoryTaskStore } from "@a2a-js/sdk/server";
import { agentCardHandler, jsonRpcHandler, UserBuilder } from "@a2a-js/sdk/server/express";
import express from "express";

const port = Number(process.argv[2]);
const card = AgentCard.fromJSON({
  name: "words", description: "Says words.", version: "1", skills: [],
  supportedInterfaces: [{ url: `http://127.0.0.1:${port}/`, protocolBinding: "JSONRPC", protocolVersion: "1.0" }],
  capabilities: { streaming: true }, defaultInputModes: ["text/plain"], defaultOutputModes: ["text/plain"],
});
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const textOf = (message) => message.parts.map((part) => part.content?.value ?? "").join("");

class Words {
  cancelled = new Set();

  async execute({ taskId, contextId, task, userMessage }, bus) {
    const history = [...(task?.history ?? []), ...(task?.history?.some((m) => m.messageId === userMessage.messageId) ? [] : [userMessage])];
    const ids = { taskId, contextId };
    const status = (state, text) => AgentEvent.statusUpdate(TaskStatusUpdateEvent.fromJSON({ ...ids, status: {
      state, ...(text ? { message: { messageId: randomUUID(), role: "ROLE_AGENT", parts: [{ text }], ...ids } } : {}) } }));
    bus.publish(AgentEvent.task({ ...(task ?? Task.fromJSON({ id: taskId, contextId, status: { state: "TASK_STATE_SUBMITTED" } })), history }));
    const said = history.filter((message) => message.role === userMessage.role).map(textOf);
    const [verb, ...words] = said[0].split(" ");
    bus.publish(status("TASK_STATE_WORKING"));
    const asks = { ask: "TASK_STATE_INPUT_REQUIRED", login: "TASK_STATE_AUTH_REQUIRED" };
    if (verb in asks && said.length === 1) {
      bus.publish(status(asks[verb], words.join(" ")));
      return bus.finished();
    }
    while (verb === "hang" && !this.cancelled.has(taskId)) await pause(20);
    if (this.cancelled.has(taskId)) {
      bus.publish(status("TASK_STATE_CANCELED"));
      return bus.finished();
    }
    const answer = verb in asks ? [`You said ${said.at(-1)}.`] : words;
    for (const [number, word] of answer.entries()) {
      const artifact = { artifactId: "a", parts: [{ text: number ? ` ${word}` : word }] };
      bus.publish(AgentEvent.artifactUpdate(TaskArtifactUpdateEvent.fromJSON({ ...ids, artifact, append: number > 0 })));
      await pause(50);
    }
    bus.publish(status("TASK_STATE_COMPLETED"));
    bus.finished();
  }

  async cancelTask(taskId) {
    this.cancelled.add(taskId);
  }
}

const handler = new DefaultRequestHandler(card, new InMemoryTaskStore(), new Words());
const app = express();
app.use("/.well-known/agent-card.json", agentCardHandler({ agentCardProvider: handler }));
app.use("/", jsonRpcHandler({ requestHandler: handler, userBuilder: UserBuilder.noAuthentication }));
app.listen(port, "127.0.0.1");
