// npm ci && npm run build: writes ../sft_nb/assets/panels, which is committed
import { createHash } from "node:crypto";
import { copyFileSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = "../sft_nb/assets/panels";
const hash = createHash("sha256");
for (const file of ["package-lock.json", ...readdirSync("src").sort().map((name) => `src/${name}`)]) hash.update(readFileSync(file));
const source = `sources ${hash.digest("hex").slice(0, 16)}`;
await build({ entryPoints: ["src/panel.js"], bundle: true, minify: true, format: "esm", target: "es2022", charset: "utf8",
  legalComments: "none", outfile: `${out}/panel.js`,
  banner: { js: `/* Built from js/ of sft_nb, ${source}. Contains uPlot (MIT), see uPlot-LICENSE.txt. */` } });
const plot = readFileSync("node_modules/uplot/dist/uPlot.min.css", "utf8");
writeFileSync(`${out}/panel.css`, `${plot}\n${readFileSync("src/panel.css", "utf8")}`);
copyFileSync("node_modules/uplot/LICENSE", `${out}/uPlot-LICENSE.txt`);
