/**
 * The roster of a run: how each run below it stands, without its events. For lists of many sub-agents.
 *
 * On the socket `/api/v1/events`, `{"subscribe": name, "run_id": …, "roster": true, "window": […]}` begins one, and
 * `{"watch": name, "window": […]}` says which rows are in view: their last words come once a second.
 */

export interface RosterRow {
  /** The namespace of the run, joined by `|`: it names the row. */
  readonly ns: string;
  readonly run_id: string;
  readonly parent_run_id: string | null;
  readonly agent: string;
  readonly task: string;
  readonly status: string;
  readonly steps: number;
  readonly calls: number;
  /** A tool that works for it now. */
  readonly doing: string;
  /** The reason why its model provider lets it wait. */
  readonly wait: string | null;
  readonly tokens: number;
  readonly cost: number;
  readonly started_at: string | null;
  readonly ended_at: string | null;
  /** The end of its text, if it was in the window. */
  readonly tail?: string;
}

/** What a message of the subscription has as `roster`. */
export interface RosterMessage {
  readonly seq: number;
  readonly counts: Readonly<Record<string, number>>;
  readonly rows: readonly RosterRow[];
}

export interface Roster {
  readonly seq: number;
  /** How many runs have each status. */
  readonly counts: Readonly<Record<string, number>>;
  /** The rows by `ns`, in the order in which they came first. */
  readonly rows: ReadonlyMap<string, RosterRow>;
}

export const NO_ROSTER: Roster = { seq: 0, counts: {}, rows: new Map() };

/** Return a roster after a message. Rows that it left alone keep their identity; words stay until others come. */
export function reduceRoster(roster: Roster, message: RosterMessage): Roster {
  const rows = new Map(roster.rows);
  for (const row of message.rows) rows.set(row.ns, { ...rows.get(row.ns), ...row });
  return { seq: message.seq, counts: message.counts, rows };
}
