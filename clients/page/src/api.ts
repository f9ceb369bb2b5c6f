/** Requests to the server that the page came from. The cookie of the session goes with each of them. */

import { signal } from "@preact/signals";

/** The address of the server: the page may be mounted below another path. */
export const BASE = new URL(".", document.baseURI);

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    detail: string,
  ) {
    super(detail);
  }
}

/** The user of the page: null if nobody is signed in, undefined until that is known. */
export const user = signal<
  { readonly user_id: string; readonly scopes: string[] } | null | undefined
>(undefined);

export const at = (path: string): URL => new URL(path.replace(/^\//, ""), BASE);
export const segment = encodeURIComponent;

async function refusal(response: Response): Promise<ApiError> {
  const body = (await response.json().catch(() => ({}))) as { detail?: string; code?: string };
  const detail = body.detail ?? `The server answered ${response.status}.`;
  return new ApiError(response.status, body.code ?? "unknown", detail);
}

/** Send a request and return its JSON; raise an ApiError. A refused session signs the page out. */
export async function ask<T>(
  method: string,
  path: string,
  body?: unknown,
  headers: Record<string, string> = {},
): Promise<T> {
  const init: RequestInit = { method, headers: { accept: "application/json", ...headers } };
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers = { ...init.headers, "content-type": "application/json" };
  }
  let response: Response;
  try {
    response = await fetch(at(path), init);
  } catch {
    throw new ApiError(0, "offline", "The server cannot be reached.");
  }
  if (response.status === 401 && !headers["authorization"]) user.value = null;
  if (!response.ok) throw await refusal(response);
  return (response.status === 204 ? undefined : await response.json()) as T;
}

export const get = <T>(path: string): Promise<T> => ask<T>("GET", path);
export const post = <T>(path: string, body: unknown = {}): Promise<T> => ask<T>("POST", path, body);

/** Return the bytes of a file. */
export async function bytes(path: string): Promise<Blob> {
  const response = await fetch(at(path));
  if (!response.ok) throw await refusal(response);
  return await response.blob();
}

interface Page<T> {
  readonly items: T[];
  readonly next_cursor: string | null;
}

/** Return the first page of a list. */
export async function list<T>(path: string): Promise<T[]> {
  return (await get<Page<T>>(path)).items;
}

/** Find out who is signed in; the value stays the same object while the user does. */
export async function whoami(): Promise<void> {
  try {
    const found = await get<{ user_id: string; scopes: string[] }>("api/v1/session");
    if (found.user_id !== user.value?.user_id) user.value = found;
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 401) throw error;
    user.value = null;
  }
}

/** Trade a token for the cookie of a session. */
export async function signIn(token: string): Promise<void> {
  const headers = { authorization: `Bearer ${token}` };
  user.value = await ask("POST", "api/v1/session", {}, headers);
}

export async function signOut(): Promise<void> {
  await ask("DELETE", "api/v1/session");
  user.value = null;
}

/** Take the token out of the address, so that nobody copies it with a link. */
export function takeToken(): string | null {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (found === null) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return decodeURIComponent(found[1]!);
}
