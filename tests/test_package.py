"""The package as a whole: lazy names, imports that point down, nothing dangerous, and documented and typed throughout."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import minillm

ROOT = Path(minillm.__file__).resolve().parent
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("kernels/*.py")])
}
# Who stands above whom: a module imports only from modules before it.
ORDER = (
    "config", "costs", "hardware", "tokenizer", "kernels.__init__", "kernels.tiles", "kernels.flash_forward",
    "kernels.flash_backward", "kernels.flash_decode", "kernels.paged_attention", "flash", "attention", "kv_cache", "model",
    "weights", "gqa", "prepack", "sampling", "generate", "paged", "scheduler", "engine", "metrics", "fragmentation", "plots", "bench",
    "__main__",
)  # fmt: skip


def run(code: str) -> str:
    """The output of `code` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=120)
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


def test_import_is_free():
    assert run("import sys, minillm; print([m for m in ('torch', 'numpy', 'tiktoken', 'minillm.config') if m in sys.modules])") == "[]"
    assert run("import sys, minillm; minillm.ModelConfig, minillm.costs, minillm.plots; print('torch' in sys.modules)") == "False"


FIRST_STEPS = (
    "pass",
    "minillm.KVCache, minillm.load",
    "minillm.attention, minillm.generate",
    "minillm.generate, minillm.attention",
    "import minillm.generate",
    "import minillm.attention",
    "from minillm.generate import prefill; from minillm.attention import BACKENDS",
    "import minillm.bench",
    "from minillm import *",
    "import importlib; importlib.import_module('minillm.attention'), importlib.import_module('minillm.generate')",
)


def test_functions_named_like_their_modules():
    """`minillm.attention` and `minillm.generate` are functions whatever was imported before, and their modules still import."""
    check = f"""
import sys
for step in {FIRST_STEPS!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "minillm"]:
        del sys.modules[name]  # as in a fresh interpreter, but torch need not be imported again
    import minillm
    exec(step, {{"minillm": minillm}})
    for name in ("attention", "generate"):
        value, scope = getattr(minillm, name), {{}}
        assert callable(value), (step, value)
        exec(f"from minillm import {{name}}; import minillm.{{name}}", scope)
        assert scope[name] is getattr(minillm, name) is value is vars(sys.modules["minillm." + name])[name], (step, name)
"""
    run(check)


# Imports


def imports(tree: ast.Module) -> Iterator[str]:
    """Full names of everything a module imports, inside functions too, but not for the type checker only."""
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
    assert set(TREES) - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_down(module):
    own = [name.split(".") for name in imports(TREES[module]) if name.partition(".")[0] == "minillm"]
    assert all(len(parts) > 1 for parts in own), "import the module, not the package"
    names = {".".join(parts[1:3]) if parts[1] == "kernels" else parts[1] for parts in own}
    names = {name if name in ORDER else "kernels.__init__" for name in names}  # a name of minillm.kernels itself
    wrong = names - set(ORDER[: ORDER.index(module)])
    assert not wrong, f"{module} imports {', '.join(wrong)}, which does not stand above it"


def test_transformers_is_for_the_benchmarks_only():
    users = {module for module, tree in TREES.items() if any(name.partition(".")[0] == "transformers" for name in imports(tree))}
    assert users == {"bench"}


def test_only_declared_dependencies_are_imported():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    extra = {"plots": {"matplotlib"}, "bench": {"transformers", "xllamacpp"}}  # imported where they are used
    for module, tree in TREES.items():
        used = {name.partition(".")[0] for name in imports(tree)} - set(sys.stdlib_module_names) - {"minillm"}
        assert used <= declared | extra.get(module, set()), module


# Safety


@pytest.mark.parametrize("module", TREES)
def test_nothing_is_unpickled_or_executed(module):
    tree = TREES[module]
    roots = {name.partition(".")[0] for name in imports(tree)}
    assert not roots & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "os.system"), called
            arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert arguments.get("allow_pickle", "False") == "False"
            assert arguments.get("shell", "False") == "False"
            assert arguments.get("trust_remote_code", "False") == "False"


# Documentation


def public(module: str) -> Iterator[tuple[str, ast.AST]]:
    """Public functions and classes of a module, and the public methods of public classes. Kernels are called by the functions
    beside them, which are public, and their arguments are pointers and numbers of the GPU, which Python's types don't name."""
    for node in TREES[module].body:
        if "triton.jit" in map(ast.unparse, getattr(node, "decorator_list", ())):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and (not method.name.startswith("_") or method.name == "__init__"):
                    yield f"{node.name}.{method.name}", method


@pytest.mark.parametrize("module", TREES)
def test_everything_public_has_a_docstring(module):
    bare = [name for name, node in public(module) if "." not in name and not ast.get_docstring(node)]
    assert ast.get_docstring(TREES[module]) and not bare, bare


@pytest.mark.parametrize("module", TREES)
def test_everything_public_has_type_hints(module):
    for name, node in public(module):
        if isinstance(node, ast.ClassDef):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        bare += [a.arg for a in (node.args.vararg, node.args.kwarg) if a is not None and a.annotation is None]
        assert not bare, f"{name}: {bare}"
        assert node.returns is not None or node.name == "__init__", name
