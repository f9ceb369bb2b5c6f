// 状态管理
interface SubagentInfo {
  id: string;           // tool_call_id
  type: string;         // subagent_type
  description: string;
  status: "pending" | "running" | "complete";
  result?: string;
}

// 处理事件
function handleEvent(event: StreamPart) {
  // 1. 检测 subagent 启动
  if (event.type === "updates" && !event.ns.length) {
    const toolCalls = event.data.model_request?.messages?.[0]?.tool_calls;
    toolCalls?.forEach(tc => {
      if (tc.name === "task") {
        subagents[tc.id] = {
          id: tc.id,
          type: tc.args.subagent_type,
          description: tc.args.description,
          status: "running"
        };
      }
    });
  }
  
  // 2. 识别 subagent 事件
  if (event.ns.length && event.ns[0].startsWith("tools:")) {
    const subagentId = event.ns[0].split(":")[1];
    // 将事件路由到对应的 subagent UI 组件
    renderSubagentEvent(subagentId, event);
  }
  
  // 3. 检测 subagent 结束
  if (event.type === "updates" && event.data.tools) {
    event.data.tools.messages.forEach(msg => {
      if (msg.name === "task" && subagents[msg.tool_call_id]) {
        subagents[msg.tool_call_id].status = "complete";
        subagents[msg.tool_call_id].result = msg.content;
      }
    });
  }
}
