/** Follows a run as the arguments say, and prints each event as a line. Tests start it beside a server. */

import { connect, connectParts } from "../src/index.js";

const [url, token, runId, what] = process.argv.slice(2) as [string, string, string, string];
const options = { url, token, runId, patience: 30 };
const stream = what === "parts" ? connectParts(options) : connect(options);
for await (const one of stream) console.log(JSON.stringify(one));
