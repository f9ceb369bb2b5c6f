/** The files of a workspace. What is in them is shown as text, or as an image whose bytes are checked. */

import { useEffect, useState } from "preact/hooks";
import { ApiError, bytes, list, segment } from "./api.ts";
import { exact } from "./format.ts";
import { Icon } from "./icons.tsx";
import { imageType, Picture } from "./images.tsx";
import { Code } from "./markdown.tsx";
import { conversation } from "./state.ts";

interface Entry {
  readonly path: string;
  readonly is_dir: boolean;
  readonly size: number;
}

const MOST_SHOWN = 1_000_000;

const fileAddress = (path: string): string =>
  `api/v1/files/${path.split("/").map(segment).join("/")}`;

function size(count: number): string {
  if (count < 1000) return `${count} B`;
  return count < 1_000_000
    ? `${(count / 1000).toFixed(1)} kB`
    : `${(count / 1_000_000).toFixed(1)} MB`;
}

export function FilesTab() {
  const [folder, setFolder] = useState("");
  const [entries, setEntries] = useState<readonly Entry[] | null>(null);
  const [problem, setProblem] = useState("");
  const [file, setFile] = useState<string | null>(null);
  const status = conversation.value?.newest.value?.listed.value;
  useEffect(() => {
    list<Entry>(`api/v1/files?limit=1000&path=${segment(folder)}`).then(
      (found) => {
        setEntries(found);
        setProblem("");
      },
      (error: unknown) =>
        setProblem(error instanceof ApiError && error.status === 404 ? "none" : String(error)),
    );
  }, [folder, status]);
  if (problem === "none" || (entries?.length === 0 && folder === "")) {
    return (
      <p class="blank">
        <b>No files</b>Files that agents read and write appear here, where an agent has a workspace.
      </p>
    );
  }
  if (file !== null) return <File path={file} close={() => setFile(null)} />;
  const above = folder.split("/").slice(0, -1).join("/");
  return (
    <>
      {problem && <p class="err">{problem}</p>}
      {folder !== "" && (
        <button type="button" class="link" onClick={() => setFolder(above)}>
          ‹ {exact(above || "workspace")}
        </button>
      )}
      <ul class="files">
        {(entries ?? []).map((entry) => (
          <li key={entry.path}>
            <button
              type="button"
              class="filerow"
              onClick={() => (entry.is_dir ? setFolder(entry.path) : setFile(entry.path))}>
              <Icon name={entry.is_dir ? "chev" : "copy"} />
              <span class="cut said">{exact(entry.path.split("/").at(-1) ?? "")}</span>
              <span class="muted num">{entry.is_dir ? "" : size(entry.size)}</span>
            </button>
          </li>
        ))}
      </ul>
    </>
  );
}

function File({ path, close }: { path: string; close: () => void }) {
  const [data, setData] = useState<Uint8Array<ArrayBuffer> | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    bytes(fileAddress(path))
      .then((blob) => blob.arrayBuffer())
      .then(
        (found) => setData(new Uint8Array(found)),
        (error: unknown) => setProblem(String(error)),
      );
  }, [path]);
  return (
    <>
      <p class="filehead">
        <button type="button" class="link" onClick={close}>
          ‹ Files
        </button>
        <span class="cut said mono">{exact(path)}</span>
        <a class="link" href={fileAddress(path)} download>
          Download
        </a>
      </p>
      {problem && <p class="err">{exact(problem)}</p>}
      {data !== null && <Content path={path} data={data} />}
    </>
  );
}

function Content({
  path,
  data,
}: {
  readonly path: string;
  readonly data: Uint8Array<ArrayBuffer>;
}) {
  if (imageType(data) !== null) return <Picture bytes={data} name={path} />;
  if (data.length > MOST_SHOWN)
    return <p class="blank">It is too large to be shown: download it.</p>;
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return <p class="blank">It is no text: download it.</p>;
  }
  return <Code code={text} language={path.split(".").at(-1) ?? ""} />;
}
