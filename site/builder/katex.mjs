// Formulas to HTML: a line of JSON in, [TeX, whether it stands alone]; a line of JSON out.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const katex = createRequire(process.argv[2])("katex");

for await (const line of createInterface({ input: process.stdin })) {
  const [tex, displayMode] = JSON.parse(line);
  try {
    const html = katex.renderToString(tex, { displayMode, strict: "error", output: "htmlAndMathml" });
    console.log(JSON.stringify({ html }));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message }));
  }
}
