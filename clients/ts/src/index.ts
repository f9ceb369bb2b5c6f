/** `retinue-client`: the routing of events to the agents they belong to, and nothing else. */

export type * from "./events.js";
export {
  connect,
  connectParts,
  ServerError,
  type ConnectOptions,
  type StreamPart,
} from "./connect.js";
export {
  addUsage,
  childrenOf,
  EMPTY,
  fromSnapshot,
  hasEnded,
  questions,
  reduce,
  reduceAll,
  tailOf,
  textOf,
  totalUsage,
  type Activity,
  type CallNode,
  type CallStatus,
  type Event,
  type EventOf,
  type OpenMessage,
  type Question,
  type RunNode,
  type TaskNode,
  type Tree,
  type Wait,
} from "./tree.js";
