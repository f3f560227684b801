// Python in a worker: the page stays quick, and a computation that never ends can be ended.
// Everything comes from the site itself; `new URL(…, import.meta.url)` is the folder of this file.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const here = new URL("./", import.meta.url).href;

async function start() {
  const python = await loadPyodide({
    indexURL: here + "pyodide/",
    stdLibURL: here + "pyodide/python_stdlib.zip",
  });
  const zip = await (await fetch(here + "minillm.zip")).arrayBuffer();
  python.FS.writeFile("/minillm.zip", new Uint8Array(zip));
  python.runPython("import sys; sys.path.insert(0, '/minillm.zip')");
  return python.pyimport("live.page");
}

const page = start();
page.then(() => postMessage({ ready: true }), (error) => postMessage({ broken: String(error) }));

onmessage = async ({ data }) => {
  try {
    const { answers, run_exercise } = await page;
    if (data.exercise) {
      const { before, learner, check } = data.exercise;
      postMessage({ id: data.id, done: true, result: JSON.parse(run_exercise(before, learner, check)) });
      return;
    }
    const values = (await page).json.loads(JSON.stringify(data.values));
    const pictures = answers(data.element, values, data.width);
    for (const html of pictures) postMessage({ id: data.id, html });
    postMessage({ id: data.id, done: true });
  } catch (error) {
    postMessage({ id: data.id, done: true, error: String(error.message ?? error) });
  }
};
