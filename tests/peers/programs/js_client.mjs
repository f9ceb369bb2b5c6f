// A client of @a2a-js/sdk: node js_client.mjs <url> <token>. Prints a line for each scenario.
import { randomUUID } from "node:crypto";
import { SendMessageRequest, TaskState, taskStateToJSON } from "@a2a-js/sdk";
import { ClientFactory, ClientFactoryOptions, DefaultAgentCardResolver, JsonRpcTransportFactory, RestTransportFactory } from "@a2a-js/sdk/client";

const [url, token] = process.argv.slice(2);
const fetchWithToken = (input, init = {}) => {
  const headers = new Headers(init.headers);
  headers.set("authorization", `Bearer ${token}`);
  return fetch(input, { ...init, headers });
};

const connect = (agent, Transport) => {
  const transports = [new Transport({ fetchImpl: fetchWithToken })];
  const cardResolver = new DefaultAgentCardResolver({ fetchImpl: fetchWithToken });
  const preferredTransports = transports.map((one) => one.protocolName);
  return new ClientFactory({ transports, cardResolver, preferredTransports }).createFromUrl(`${url}/a2a/${agent}/`);
};
const message = (parts, ids = {}) => SendMessageRequest.fromJSON({ message: { messageId: randomUUID(), role: "ROLE_USER", parts, ...ids } });

async function follow(stream, seen = () => {}) {
  const found = { text: "", states: [] };
  for await (const response of stream) {
    const { $case: kind, value } = response.payload;
    found.taskId ??= value.taskId ?? value.id;
    found.contextId ??= value.contextId;
    const status = value.status && taskStateToJSON(value.status.state);
    if (status) found.states.push(status.replace("TASK_STATE_", ""));
    if (kind === "artifactUpdate" && value.artifact.artifactId === "answer") found.text = (value.append ? found.text : "") + value.artifact.parts.map((part) => part.content.value).join("");
    await seen(found);
  }
  return found;
}

const scenarios = {
  async stream(Transport) {
    const client = await connect("speaker", Transport);
    const { text, states } = await follow(client.sendMessageStream(message([{ text: "hi" }])));
    return `${text} ${states.at(-1)}`;
  },
  async question(Transport) {
    const client = await connect("payer", Transport);
    const { taskId, contextId, states } = await follow(client.sendMessageStream(message([{ text: "pay" }])));
    const answer = message([{ data: { approved: true } }], { taskId, contextId });
    const { text } = await follow(client.sendMessageStream(answer));
    return `${states.at(-1)} then ${text}`;
  },
  async login(Transport) {
    const client = await connect("portal", Transport);
    const { taskId, contextId, states } = await follow(client.sendMessageStream(message([{ text: "login Which one?" }])));
    const { text } = await follow(client.sendMessageStream(message([{ text: "the red one" }], { taskId, contextId })));
    return `${states.at(-1)} then ${text}`;
  },
  async cancel(Transport) {
    const client = await connect("waiter", Transport);
    let is_asked = false;
    const { states } = await follow(client.sendMessageStream(message([{ text: `never_${randomUUID()}` }])), async ({ taskId }) => {
      if (!is_asked && taskId) { is_asked = true; setTimeout(() => client.cancelTask({ id: taskId, tenant: "", metadata: undefined }), 200); }
    });
    return states.at(-1);
  },
  async dies(Transport) {
    const client = await connect("waiter", Transport);
    const name = `file_${randomUUID()}`;
    let id;
    try {
      await follow(client.sendMessageStream(message([{ text: name }])), ({ taskId, states }) => {
        if (!id && states.at(-1) === "WORKING") { id = taskId; console.log(`waits: ${name}`); }
      });
    } catch {} // the stream breaks
    for (;;) {
      try {
        const task = await client.getTask({ id, tenant: "", historyLength: undefined });
        const state = taskStateToJSON(task.status.state).replace("TASK_STATE_", "");
        if (state !== "WORKING") return state;
      } catch {} // nobody listens yet
      await new Promise((done) => setTimeout(done, 100));
    }
  },
  async two(Transport) {
    const found = await Promise.all([1, 2].map(() => scenarios.stream(Transport)));
    return found.join(", ");
  },
};

for (const [name, Transport] of [["jsonrpc", JsonRpcTransportFactory], ["rest", RestTransportFactory]]) {
  for (const [scenario, run] of Object.entries(scenarios)) {
    try {
      console.log(`${name} ${scenario}: ${await run(Transport)}`);
    } catch (error) {
      console.log(`${name} ${scenario}: FAILED ${error.stack?.split("\n").slice(0, 3).join(" ")}`);
    }
  }
}
process.exit(0);
