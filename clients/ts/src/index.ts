/** `retinue-client`: the routing of events to the agents they belong to, and nothing else. */

export type * from "./events.js";
export {
  connect,
  connectBatches,
  connectParts,
  ServerError,
  type ConnectionStatus,
  type ConnectOptions,
  type StreamPart,
  type ThreadEvent,
} from "./connect.js";
export {
  NO_ROSTER,
  reduceRoster,
  type Roster,
  type RosterMessage,
  type RosterRow,
} from "./roster.js";
export { cursorOf, reduceThread, type Thread } from "./thread.js";
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
