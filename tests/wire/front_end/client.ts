// Follows the parts of a run over HTTP and gives each to the handler, which is put in place of this line: HANDLER

const subagents: Record<string, SubagentInfo> = {};
const routed: Record<string, number> = {};
const problems: string[] = [];

function renderSubagentEvent(id: string, event: { ns: string[] }) {
  routed[id] = (routed[id] ?? 0) + 1;
  if (subagents[id] === undefined) problems.push(`${id}: an event before its announcement`);
  if (subagents[id]?.status === "complete") problems.push(`${id}: an event after its end`);
}

const [url, token] = process.argv.slice(2);
const response = await fetch(url, { headers: { authorization: `Bearer ${token}` } });
if (response.status !== 200) throw new Error(`${response.status} ${await response.text()}`);
let text = "";
for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
  const records = (text + piece).split("\n\n");
  text = records.pop();
  for (const record of records) {
    for (const line of record.split("\n")) {
      if (line.startsWith("data: ")) handleEvent(JSON.parse(line.slice(6)));
    }
  }
}
console.log(JSON.stringify({ subagents, routed, problems }));
