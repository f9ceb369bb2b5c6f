/** Forms of questions: one field for each argument or property, by its schema, and the same as JSON. */

export type Schema = Readonly<Record<string, unknown>>;

const record = (value: unknown): Readonly<Record<string, unknown>> =>
  typeof value === "object" && value !== null ? (value as Readonly<Record<string, unknown>>) : {};

export interface Field {
  readonly name: string;
  readonly type: string;
  readonly options: readonly unknown[] | null;
}

/** Return the fields of an object: those of its schema, then those that only the value has. */
export function fieldsOf(schema: Schema, value: Readonly<Record<string, unknown>>): Field[] {
  const properties = record(schema["properties"]);
  const names = [...new Set([...Object.keys(properties), ...Object.keys(value)])];
  return names.map((name) => {
    const one = record(properties[name]);
    const given = typeof one["type"] === "string" ? one["type"] : null;
    const own = typeof value[name] === "string" ? "string" : typeof value[name];
    const options = Array.isArray(one["enum"]) ? one["enum"] : null;
    return { name, type: given ?? (name in value ? own : "string"), options };
  });
}

/** Return a value as its field shows it. */
export function toText(value: unknown, type: string): string {
  if (value === undefined) return "";
  return typeof value === "string" && type === "string" ? value : (JSON.stringify(value) ?? "");
}

/** Read a field; raise an error whose message says what to write. */
export function fromText(text: string, field: Field): unknown {
  if (field.type === "string") return text;
  try {
    return JSON.parse(text) as unknown;
  } catch {
    if (field.type !== "number" && field.type !== "integer" && field.type !== "boolean")
      return text;
    throw new Error(
      `${field.name}: write ${field.type === "boolean" ? "true or false" : "a number"}`,
    );
  }
}

/** Return the schema of the arguments that an approval may change. */
export function argumentsSchema(schema: Schema | null): Schema {
  return record(record(record(schema)["properties"])["args"]);
}

export type Asks = "approval" | "consent" | "text" | "data";

/** Return what kind of answer a question wants. */
export function asks(schema: Schema | null, resumeMode: string): Asks {
  const properties = record(record(schema)["properties"]);
  const required = record(schema)["required"];
  if ("approved" in properties || (Array.isArray(required) && required.includes("approved"))) {
    return "approval";
  }
  if (schema === null) return resumeMode === "replay" ? "consent" : "text";
  return schema["type"] === "object" || Object.keys(properties).length > 0 ? "data" : "text";
}
