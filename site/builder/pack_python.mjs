// Compile Pyodide's standard library with Pyodide itself, and leave out what no page needs.
// node pack_python.mjs FOLDER_OF_PYODIDE LIBRARY.zip
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [, , folder, target] = process.argv;
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`).href);
const python = await loadPyodide({ indexURL: `${folder}/` });
python.FS.writeFile("/library.zip", readFileSync(`${folder}/python_stdlib.zip`));
python.runPython(`
import importlib.util, io, zipfile

LEFT_OUT = {
    "_pyio.py", "_pyrepl", "bdb.py", "cProfile.py", "curses", "dbm", "doctest.py", "ensurepip",
    "ftplib.py", "idlelib", "imaplib.py", "lib2to3", "mailbox.py", "multiprocessing", "optparse.py",
    "pdb.py", "pickletools.py", "plistlib.py", "poplib.py", "profile.py", "pstats.py", "pydoc.py",
    "pydoc_data", "smtplib.py", "sqlite3", "test", "tkinter", "turtle.py", "turtledemo", "unittest",
    "venv", "wsgiref", "xml", "xmlrpc",
}
MAGIC = importlib.util.MAGIC_NUMBER

with zipfile.ZipFile("/library.zip") as old, zipfile.ZipFile("/compiled.zip", "w") as new:
    for name in old.namelist():
        if name.partition("/")[0] in LEFT_OUT or name.endswith("/"):
            continue
        data = old.read(name)
        if name.endswith(".py"):
            code = compile(data, name, "exec", dont_inherit=True, optimize=2)
            data = bytes(importlib._bootstrap_external._code_to_timestamp_pyc(code))
            name += "c"
        new.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
`);
writeFileSync(target, python.FS.readFile("/compiled.zip"));
