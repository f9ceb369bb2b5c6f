/** Images that came with a message. Their bytes are checked, and nothing is loaded from another place. */

import type { Message } from "retinue-client";
import { useEffect, useState } from "preact/hooks";

const SIGNATURES: readonly (readonly [string, RegExp])[] = [
  ["image/png", /^\x89PNG\r\n\x1a\n/],
  ["image/jpeg", /^\xff\xd8\xff/],
  ["image/gif", /^GIF8[79]a/],
  ["image/webp", /^RIFF[\s\S]{4}WEBP/],
];

/** Return the type of an image by its first bytes; null if it is none that is shown. */
export function imageType(bytes: Uint8Array): string | null {
  const head = String.fromCharCode(...bytes.subarray(0, 12));
  return SIGNATURES.find(([, start]) => start.test(head))?.[0] ?? null;
}

function decoded(data: string): Uint8Array<ArrayBuffer> | null {
  try {
    return Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
  } catch {
    return null;
  }
}

/** An image of bytes, at an address that only this page knows. */
export function Picture({
  bytes,
  name,
}: {
  readonly bytes: Uint8Array<ArrayBuffer>;
  readonly name: string;
}) {
  const [url, setUrl] = useState("");
  const type = imageType(bytes);
  useEffect(() => {
    if (type === null) return undefined;
    const made = URL.createObjectURL(new Blob([bytes], { type }));
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [bytes]);
  if (type === null) return <p class="blank">This image is of a kind that is not shown.</p>;
  return url ? <img class="picture" src={url} alt={name} /> : null;
}

export function Images({ message }: { message: Message }) {
  const images = (message.parts ?? []).flatMap((part) =>
    part.type === "image" && part.data !== null ? [part.data] : [],
  );
  return (
    <div class="pictures">
      {images.map((data, place) => (
        <Data key={place} data={data} />
      ))}
    </div>
  );
}

function Data({ data }: { data: string }) {
  const [bytes] = useState(() => decoded(data));
  return bytes === null ? null : <Picture bytes={bytes} name="Image of the message" />;
}
