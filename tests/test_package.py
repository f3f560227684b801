"""The package as a whole: lazy names, imports that point down, nothing dangerous, short files."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken
from order import ORDER, TORCH_FREE

import minillm

ROOT = Path(minillm.__file__).resolve().parent
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
        path.read_text(encoding="utf-8")
    )
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}


def run(code: str) -> str:
    """The output of `code` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Names


@pytest.mark.parametrize("name", minillm.__all__)
def test_every_public_name_resolves(name):
    assert getattr(minillm, name).__name__.rpartition(".")[2] == name
    assert name in dir(minillm)


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'minillm' has no attribute 'softmax'"):
        _ = minillm.softmax


WITHOUT_TORCH = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def test_what_counts_and_decides_needs_no_torch():
    """Those modules import, and `count` and a schedule run, with torch and numpy blocked."""
    modules = ", ".join(f"minillm.{name}" for name in TORCH_FREE)
    out = run(f"""{WITHOUT_TORCH}
import minillm, minillm.serving.request, minillm.serving.scheduler, {modules}
from minillm.__main__ import main
assert main(["count", "llama-2-7b"]) == 0
manager = minillm.blocks.BlockManager(9, 4)
scheduler = minillm.serving.scheduler.Scheduler(manager, max_seqs=2, max_batch_tokens=8)
scheduler.submit(minillm.serving.request.Request(0, [1, 2, 3], 4))
print([work.tokens for work in scheduler.schedule().work])
print(len(minillm.fragmentation.simulate([(3, 4)], "paged", n_slots=64, max_len=8)))
""")
    assert "6,738,415,616" in out and out.endswith("[[1, 2, 3]]\n4")


def test_import_is_free():
    heavy = "[m for m in ('torch', 'numpy', 'tiktoken', 'minillm.config') if m in sys.modules]"
    assert run(f"import sys, minillm; print({heavy})") == "[]"


FIRST_STEPS = (
    "pass",
    "minillm.KVCache, minillm.load",
    "import minillm.layers.attention, minillm.generation, minillm.prepacked",
    "import minillm.quantization.quantize, minillm.distillation.distill",
    "import minillm.bench.command",
    "from minillm import *",
)


def test_functions_stay_functions():
    """Whatever is imported first, `minillm.generate` and its like are functions."""
    check = f"""
import sys
for step in {FIRST_STEPS!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "minillm"]:
        del sys.modules[name]  # as in a fresh interpreter, but torch need not be imported again
    import minillm
    exec(step, {{"minillm": minillm}})
    for name in ("attention", "generate", "prepack", "quantize", "distill", "load"):
        value, scope = getattr(minillm, name), {{}}
        assert callable(value), (step, value)
        exec(f"from minillm import {{name}}", scope)
        assert scope[name] is getattr(minillm, name) is value, (step, name)
"""
    run(check)


@pytest.mark.slow
def test_a_start_loads_nothing_that_takes_seconds():
    """As lessons and commands load the default checkpoint; what gguf goes without stays there."""
    run("""
import sys, minillm
minillm.load(device="cpu", dtype="float32")
assert not {"mistral_common", "torch._dynamo", "sympy", "transformers"} & sys.modules.keys()
import mistral_common
""")


def test_no_public_name_is_a_module_beside_it():
    """Importing a module binds it to its name in the package, and would hide the function."""
    beside = {name.partition(".")[0] for name in TREES}
    assert not beside & set(minillm._HOME)


def test_a_rooms_init_imports_nothing():
    for name in ("tools", "kernels", "layers", "quantization", "speculation", "serving", "parallel",
                 "distillation", "bench"):  # fmt: skip
        assert not list(imports(TREES[name])), name
    assert set(imports(TREES["weights"])) == {"importlib", "typing.Any"}  # names of the contract


# Imports


def imports(tree: ast.Module) -> Iterator[str]:
    """Full names of what a module imports, inside functions too, but not for the types alone."""
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_order_names_every_module():
    assert set(TREES) == set(ORDER) and len(set(ORDER)) == len(ORDER)


def own_modules(tree: ast.Module) -> Iterator[str]:
    """The modules of this package that a module imports from."""
    for name in imports(tree):
        parts = name.split(".")
        if parts[0] == "minillm" and name != "minillm.__version__":
            assert len(parts) > 1, "import the module, not the package"
            longest = ".".join(parts[1:3])
            yield longest if longest in ORDER else parts[1]


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_down(module):
    above = set(ORDER[: ORDER.index(module)])
    wrong = set(own_modules(TREES[module])) - above
    assert not wrong, f"{module} imports {', '.join(wrong)}, which does not stand above it"


def test_transformers_is_for_the_benchmarks_only():
    users = {
        module
        for module, tree in TREES.items()
        if any(name.partition(".")[0] == "transformers" for name in imports(tree))
    }
    assert users == {"bench.peers", "bench.clients"}


def test_only_declared_dependencies_are_imported():
    text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = tomllib.loads(text)["project"]["dependencies"]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in dependencies}
    # Imported where they are used.
    extra = {
        "tools.markdown": {"IPython"},
        "tools.plots": {"matplotlib", "PIL", "ipywidgets", "IPython"},
        "bench.peers": {"tokenizers", "transformers", "xllamacpp"},
        "bench.clients": {"langchain_openai", "litellm", "lm_eval", "transformers"},
        "bench.gpu_lessons": {"nbclient", "nbformat"},
        "serving.graceful": {"uvicorn"},
        "serving.http_server": {"starlette"},
        "serving.prometheus": {"prometheus_client"},
    }
    for module, tree in TREES.items():
        used = {name.partition(".")[0] for name in imports(tree)}
        used -= set(sys.stdlib_module_names) | {"minillm"}
        assert used <= declared | extra.get(module, set()), module


def test_private_names_of_other_packages():
    """What the package uses although its makers may change it any day; a new version shows here."""
    encoding = tiktoken.Encoding(
        "test", pat_str=r"\S+|\s+", mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={},
    )  # fmt: skip
    assert encoding._encode_single_piece(b"ab") == [97, 98], (
        "tiktoken's Encoding._encode_single_piece no longer takes the bytes of a word and gives "
        "their ids; Tokenizer needs another way to merge words with missing bytes."
    )


def test_private_names_of_torch_stand_in_one_file():
    """`cpu_products`, each with a test of its own that says what broke."""
    private = re.compile(r"torch\.([a-z]\w*\.)*_(?!_)\w+|torch\.ops")
    used = {
        (module, name)
        for module, tree in TREES.items()
        for name in (
            *(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
            *imports(tree),
        )
        if private.fullmatch(name) and module != "cpu_products"
    }
    # Its backward pass is timed many times over one graph, and no public name allows that.
    assert used == {("bench.attention", "torch._functorch")}


def test_functions_are_short():
    """A function is read at a glance: about a screen at most, docstring and signature included."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 90, f"{module}.{node.name}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.stem)
def test_files_are_read_in_one_sitting(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 330


# Safety


@pytest.mark.parametrize("module", TREES)
def test_nothing_is_unpickled_or_executed(module):
    tree = TREES[module]
    roots = {name.partition(".")[0] for name in imports(tree)}
    assert not roots & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in (
                "eval",
                "exec",
                "compile",
                "__import__",
                "torch.load",
                "torch.hub.load",
                "os.system",
            ), called
            arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert arguments.get("allow_pickle", "False") == "False"
            assert arguments.get("shell", "False") == "False"
            assert arguments.get("trust_remote_code", "False") == "False"
