import { readdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";

const here = dirname(fileURLToPath(import.meta.url));
const packages = join(here, "../node_modules");
const BUNDLED = [
  "preact",
  "@preact/signals",
  "@preact/signals-core",
  "markdown-it",
  "mdurl",
  "punycode.js",
  "uc.micro",
  "highlight.js",
];

/** Write the licences of all bundled packages into one file. */
function licences(): Plugin {
  const text = (name: string): string => {
    const folder = join(packages, name);
    const file = readdirSync(folder).find((one) => /^licen[cs]e/i.test(one));
    if (file === undefined) throw new Error(`${name} has no file with its licence`);
    return `${name}\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
  };
  return {
    name: "licences",
    generateBundle() {
      const source = BUNDLED.map(text).join(`\n${"-".repeat(72)}\n\n`);
      this.emitFile({ type: "asset", fileName: "ui/licences.txt", source });
    },
  };
}

export default defineConfig({
  root: here,
  base: "./",
  plugins: [licences()],
  resolve: {
    alias: {
      "retinue-client": join(here, "../ts/src/index.ts"),
      entities: join(here, "src/entities.ts"),
      "linkify-it": join(here, "src/nolinks.ts"),
    },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    target: "es2022",
    modulePreload: { polyfill: false },
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    rollupOptions: {
      output: {
        entryFileNames: "ui/page.js",
        chunkFileNames: "ui/[name].js",
        assetFileNames: "ui/page[extname]",
      },
    },
  },
  server: { proxy: { "/api": { target: "http://127.0.0.1:8123", ws: true } } },
});
