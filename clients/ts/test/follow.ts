/** Follows a run or a thread as the arguments say, and prints each event as a line. Tests start it beside a server. */

import { connect, connectParts, type ConnectOptions } from "../src/index.js";

const [url, token, id, what = "events", after = ""] = process.argv.slice(2) as [
  string,
  string,
  string,
  string?,
  string?,
];
const headers = { authorization: `Bearer ${token}` };
// Node takes headers here, unlike browsers.
const open = WebSocket as unknown as new (address: string, options: object) => WebSocket;
const options: ConnectOptions = {
  url,
  token,
  after,
  patience: 30,
  ...(what.startsWith("thread") ? { threadId: id, until: "idle" } : { runId: id }),
  ...(what.endsWith("socket")
    ? { webSocket: (address: string) => new open(address, { headers }) }
    : {}),
  onStatus: (status, cursor) => {
    if (what.startsWith("thread")) console.log(JSON.stringify({ status, cursor }));
  },
};
const stream = what === "parts" ? connectParts(options) : connect(options);
for await (const one of stream) console.log(JSON.stringify(one));
