/**
 * One WebSocket of a page, which carries all its subscriptions.
 *
 * A browser opens few connections to one server for all its tabs, and a WebSocket does not count among them. A
 * subscription says where it is each time the socket opens, so nothing is lost when the connection is.
 */

import { signal } from "@preact/signals";
import type { Event } from "retinue-client";
import { at, user, whoami } from "./api.ts";

export type LinkState = "live" | "reconnecting" | "offline";

export const link = signal<LinkState>("reconnecting");
/** When the next try begins, and since when the page has heard nothing. */
export const nextTry = signal(0);
export const lostAt = signal(0);

/** A message of the server; `wire` may send several in one array. */
export interface Message {
  readonly subscription?: string | null;
  readonly event?: Event;
  readonly ended?: boolean;
  readonly caught_up?: boolean | number | string;
  readonly error?: { readonly code: string; readonly detail: string };
  readonly [field: string]: unknown;
}

export interface Subscription {
  /** Return the request with which it begins, or begins again. */
  request(): object;
  receive(message: Message): void;
}

const SILENCE = 12_000;
const LONGEST_PAUSE = 30_000;

const subscriptions = new Map<string, Subscription>();
let socket: WebSocket | null = null;
let tries = 0;
let timer = 0;
let silence = 0;

export function subscribe(name: string, subscription: Subscription): void {
  subscriptions.set(name, subscription);
  send({ subscribe: name, ...subscription.request() });
}

export function unsubscribe(name: string): void {
  if (subscriptions.delete(name)) send({ unsubscribe: name });
}

export function send(message: object): void {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

/** Connect; the page is signed in. */
export function connect(): void {
  clearTimeout(timer);
  if (socket !== null || !user.value) return;
  const address = at("api/v1/events");
  address.protocol = address.protocol.replace("http", "ws");
  const opened = new WebSocket(address);
  socket = opened;
  opened.onopen = () => {
    for (const [name, one] of subscriptions) send({ subscribe: name, ...one.request() });
    listen();
  };
  opened.onmessage = (message: MessageEvent<string>) => {
    // A server that refuses opens the socket, too, and closes it: only a message shows that it is live.
    tries = 0;
    link.value = "live";
    listen();
    const found = JSON.parse(message.data) as Message | Message[];
    for (const one of Array.isArray(found) ? found : [found]) deliver(one);
  };
  opened.onclose = () => lose(opened);
}

export function disconnect(): void {
  clearTimeout(timer);
  clearTimeout(silence);
  subscriptions.clear();
  const open = socket;
  socket = null;
  open?.close();
}

/** Connect at once, whatever the pause. */
export function retryNow(): void {
  tries = 0;
  connect();
}

function deliver(message: Message): void {
  const name = message.subscription;
  if (name === undefined || name === null) return;
  subscriptions.get(name)?.receive(message);
}

/** Wait for a sign of life, which the server sends every five seconds. */
function listen(): void {
  clearTimeout(silence);
  silence = window.setTimeout(() => socket?.close(), SILENCE);
}

function lose(closed: WebSocket): void {
  if (socket !== closed) return;
  clearTimeout(silence);
  socket = null;
  if (link.value === "live") lostAt.value = Date.now();
  link.value = navigator.onLine ? "reconnecting" : "offline";
  const pause = Math.min(500 * 2 ** tries, LONGEST_PAUSE) * (0.75 + Math.random() / 2);
  tries += 1;
  nextTry.value = Date.now() + pause;
  timer = window.setTimeout(() => void tryAgain(), pause);
}

async function tryAgain(): Promise<void> {
  // A refused WebSocket does not say why: ask by a request whether the session is over.
  await whoami().catch(() => undefined);
  if (user.value) connect();
}

window.addEventListener("online", retryNow);
window.addEventListener("offline", () => {
  link.value = "offline";
});
