"""The shape of the source tree: import levels, statement budgets, docstrings, transposes, the top level.

Every rule is a function from source text (or names) to a list of complaints; the tests apply the rules to the
tree, and to bad snippets too, so that a rule that has gone blind fails.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "manopt_torch"

# A module (or folder) imports only from strictly lower levels. The first name below the package decides.
LEVELS = {
    "_version": 0, "precision": 0, "linalg": 0, "spectral": 0, "orthonormal": 0, "definite": 0, "special": 0,
    "distributions": 1, "manifolds": 1,
    "parameter": 2, "means": 2, "interop": 2, "storage": 2, "distributed": 2,
    "parametrize": 3, "optim": 3, "solvers": 3, "nn": 3,
    "stochastic": 4, "testing": 4,
}  # fmt: skip
# Inside a folder `__init__` imports all. What neighbours share stands here, lowest first: each may import what stands
# before it, the rest of the folder may import all of it, and nothing else. The kernels (level 0) count as a folder.
SHARED = {
    "kernels": ["precision", "linalg", "spectral"],
    "manifolds": ["base", "euclidean", "blocks"],
    "optim": ["groups", "checkpoints", "matrices", "base", "refusals"],
    "nn": [
        "factors", "init", "activations", "trug", "kernel_activation", "complex", "kernels", "recurrence", "recurrent",
        "unitary_maps", "structured_recurrence"
    ],
    "solvers": ["problem", "expansion", "base", "line_search", "curvature"],
    "stochastic": ["gibbs", "rbm", "tggm"],
}  # fmt: skip
DEPENDENCIES = {"torch", "numpy"}  # install_requires in setup.cfg; everything else is the standard library
# Modules that are imported only if an extra of setup.cfg is there, and what they need of it.
OPTIONAL = {
    "manopt_torch.nn.kernels": {"numba"},
    "manopt_torch.stochastic.estimator": {"sklearn"}, "manopt_torch.stochastic.regressor": {"sklearn"},
}  # fmt: skip

BUDGETS = [  # (pattern, statements without docstrings and imports); the first match counts
    ("manopt_torch/*/__init__.py", None),
    ("manopt_torch/manifolds/base.py", 85),
    ("manopt_torch/manifolds/*.py", 65),
    ("manopt_torch/optim/base.py", 90),
    ("manopt_torch/optim/groups.py", 60),
    ("manopt_torch/optim/wrap.py", 90),
    ("manopt_torch/optim/average.py", 50),
    ("manopt_torch/optim/*.py", 40),
    ("manopt_torch/solvers/*.py", 90),
    ("manopt_torch/storage.py", 120),
    ("examples/harness/*.py", None),
    ("examples/*.py", 100),
]

# `mH` always: `.T`, `.t()`, `.mT` and their spelled-out forms forget the conjugate; no real input shows it.
# Exemptions: (file, attribute) -> why the plain transpose is meant there. A stale one fails.
TRANSPOSES = {"T", "t", "mT", "H", "swapaxes", "swapdims", "transpose"}
PLAIN_TRANSPOSES = {
    ("manopt_torch/manifolds/view.py", "mT"): "a view only relabels entries, and is linear over the complex numbers",
    ("manopt_torch/testing.py", "mT"): "a law gives it transposed storage, to have strides that are not contiguous",
    ("manopt_torch/nn/structured_recurrence.py", "mT"): "rows are inputs: (V x)ᵀ = xᵀ Vᵀ",
    ("manopt_torch/nn/unitary_maps.py", "mT"): "rows of the identity become columns of W",
    ("manopt_torch/nn/recurrence.py", "mT"): "rows are states: (W h)ᵀ = hᵀ Wᵀ",
    ("manopt_torch/nn/recurrence.py", "transpose"): "steps and networks change places",
    ("manopt_torch/nn/recurrent.py", "transpose"): "steps and sequences change places",
}

TOP = {
    ".ci", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "benchmarks", "constraints.txt",
    "examples", "manopt_torch", "pyproject.toml", "setup.cfg", "tests",
}  # fmt: skip


# ------------------------------------------------------------ the rules
def module_name(path: str) -> str:
    """``manopt_torch/optim/sgd.py`` -> ``manopt_torch.optim.sgd``; a folder's ``__init__`` keeps its name."""
    return path.removesuffix(".py").replace("/", ".")


def imports(module: str, tree: ast.AST) -> Iterable[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, at any depth, ``TYPE_CHECKING`` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def shared(folder: str, name: str) -> list[str]:
    """The neighbours in ``folder`` that the module ``name`` may import."""
    order = SHARED.get(folder, [])
    return order[: order.index(name)] if name in order else order


def level_faults(module: str, source: str, modules: set[str]) -> list[str]:
    """Imports that break the levels. ``modules``: dotted names of all modules of the package."""
    here = module.split(".")
    faults = []
    for line, name in imports(module, ast.parse(source)):
        there = name.split(".")
        if there[0] != PACKAGE:
            if there[0] not in sys.stdlib_module_names | DEPENDENCIES | OPTIONAL.get(module, set()):
                faults.append(f"{module}:{line} imports {name}, which setup.cfg does not install")
            continue
        if len(there) == 1 or (len(there) == 2 and there[1] not in LEVELS):
            faults.append(f"{module}:{line} imports {name} from the top of the package; import its module")
            continue
        if here[1:] == ["__init__"]:
            continue
        mine, theirs = LEVELS.get(here[1]), LEVELS.get(there[1])
        if mine is None:
            faults.append(f"{module} has no level; give it one in LEVELS")
        elif here[1] == there[1]:  # the same folder
            neighbour = there[2] if len(there) > 2 and f"{PACKAGE}.{there[1]}.{there[2]}" in modules else "__init__"
            if here[2] != "__init__" and neighbour not in shared(here[1], here[2]):
                faults.append(f"{module}:{line} imports its neighbour {name}; allowed: {shared(here[1], here[2])}")
        elif theirs == mine == 0:
            if there[1] not in shared("kernels", here[1]):
                faults.append(f"{module}:{line} imports {name}; allowed: {shared('kernels', here[1])}")
        elif theirs is None or theirs >= mine:
            faults.append(f"{module}:{line} (level {mine}) imports {name} (level {theirs})")
    return faults


def docstring_nodes(tree: ast.AST) -> set[ast.stmt]:
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {n.body[0] for n in ast.walk(tree) if isinstance(n, scopes) and ast.get_docstring(n, False) is not None}


def statements(source: str) -> int:
    """Number of statements that do something: compound ones and definitions count once, docstrings and imports not."""
    tree = ast.parse(source)
    imported = (ast.Import, ast.ImportFrom)
    counted = sum(isinstance(n, ast.stmt) and not isinstance(n, imported) for n in ast.walk(tree))
    return counted - len(docstring_nodes(tree))


def budget(path: str) -> int | None:
    """The budget of a file, None where there is none."""
    return next((number for pattern, number in BUDGETS if fnmatch.fnmatch(path, pattern)), None)


def exports(tree: ast.Module) -> list[str]:
    """The names in ``__all__``, which must be written out as a list or tuple of strings."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def docstring_faults(sources: dict[str, str]) -> list[str]:
    """Public classes and functions (names in an ``__all__``, followed through imports) with no docstring."""
    trees = {module: ast.parse(source) for module, source in sources.items()}
    faults = []

    def find(module: str, name: str) -> None:
        if module not in trees:
            module += ".__init__"
        if module not in trees or f"{module.removesuffix('.__init__')}.{name}" in trees:
            return  # another package's, or a submodule
        for node in reversed(trees[module].body):  # the last definition holds; before it may stand overloads
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                if not ast.get_docstring(node):
                    faults.append(f"{module}.{name} has no docstring")
                return
            if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
                origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
                return find(base if node.level else str(node.module), origin)
            if name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}:
                return  # a value
        faults.append(f"{module}.__all__ names {name}, which is not there")

    for module, tree in trees.items():
        for name in exports(tree):
            find(module, name)
    return faults


def transposes(source: str) -> list[tuple[int, str]]:
    """(line, attribute) of every transpose that is not ``mH``."""
    return [
        (node.lineno, node.attr)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in TRANSPOSES
    ]


# ------------------------------------------------------------ the tree
def package_sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }


def test_import_levels() -> None:
    sources = {module_name(path): text for path, text in package_sources().items()}
    faults = [f for module, text in sources.items() for f in level_faults(module, text, set(sources))]
    assert not faults, "\n".join(faults)


def test_every_module_has_a_level() -> None:
    names = {path.split("/")[1].removesuffix(".py") for path in package_sources()} - {"__init__"}
    assert names <= set(LEVELS), f"no level for {sorted(names - set(LEVELS))}"


def test_statement_budgets() -> None:
    files = [p for folder in (PACKAGE, "examples") for p in sorted((ROOT / folder).rglob("*.py"))]
    sizes = {p.relative_to(ROOT).as_posix(): statements(p.read_text("utf-8")) for p in files}
    over = {path: (n, budget(path)) for path, n in sizes.items() if (budget(path) or n) < n}
    assert not over, f"(statements, budget): {over}"
    assert any(budget(path) for path in sizes)


def test_public_names_have_docstrings() -> None:
    sources = {module_name(path): text for path, text in package_sources().items()}
    assert exports(ast.parse(sources[f"{PACKAGE}.__init__"]))
    assert not docstring_faults(sources)


def test_every_folder_declares_what_is_public() -> None:
    packages = {path: text for path, text in package_sources().items() if path.endswith("__init__.py")}
    missing = [path for path, text in packages.items() if not exports(ast.parse(text))]
    assert not missing, f"no __all__ in {missing}"


def test_transposes_are_conjugate() -> None:
    found = {(path, attr): line for path, text in package_sources().items() for line, attr in transposes(text)}
    unexplained = {key: line for key, line in found.items() if key not in PLAIN_TRANSPOSES}
    assert not unexplained, f"write .mH, or explain in PLAIN_TRANSPOSES: {unexplained}"
    assert set(PLAIN_TRANSPOSES) <= set(found), "a stale exemption"


def test_top_level_of_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {path.split("/")[0] for path in listed.stdout.splitlines()} == TOP


def test_dependencies_are_those_of_setup_cfg() -> None:
    lines = (ROOT / "setup.cfg").read_text("utf-8").split("install_requires =")[1].split("\n\n")[0].split()
    assert {line.split(">")[0] for line in lines} == DEPENDENCIES


# ------------------------------------------------------------ the rules see what is wrong
MODULES = {
    "manopt_torch.__init__",
    "manopt_torch.linalg",
    "manopt_torch.storage",
    "manopt_torch.parameter",
} | {
    f"manopt_torch.{m}"
    for m in ("optim.__init__", "optim.base", "optim.groups", "optim.sgd", "manifolds.__init__", "manifolds.base")
}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("linalg", "from manopt_torch.manifolds import Stiefel"),
        ("linalg", "from manopt_torch.spectral import logm"),  # the same level
        ("spectral", "from manopt_torch import orthonormal"),
        ("precision", "from manopt_torch.linalg import herm"),
        ("linalg", "from . import storage"),
        ("manifolds.base", "def f():\n    import manopt_torch.optim.base"),
        (
            "manifolds.base",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..storage import Bucket",
        ),
        ("storage", "from manopt_torch.parameter import constrain"),  # the same level
        ("storage", "import manopt_torch"),
        ("storage", "from manopt_torch import constrain"),
        ("storage", "import lightning"),
        ("optim.sgd", "from manopt_torch.optim.adam import RiemannianAdam"),
        ("optim.sgd", "from .adam import RiemannianAdam"),
        ("optim.sgd", "from manopt_torch.optim import RiemannianAdam"),
        ("optim.base", "from .sgd import RiemannianSGD"),
        ("optim.groups", "from .base import RiemannianOptimizer"),
        ("optim.base", "from manopt_torch.nn import UnitaryRNN"),
        ("unheard_of", "from manopt_torch import linalg"),
    ],
)
def test_levels_refuse(module: str, source: str) -> None:
    assert level_faults(f"manopt_torch.{module}", source, MODULES | {"manopt_torch.optim.adam"})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spectral", "from manopt_torch import linalg, precision"),
        ("linalg", "from manopt_torch.precision import widen"),
        ("manifolds.base", "from manopt_torch import linalg\nfrom manopt_torch.linalg import cayley"),
        (
            "optim.sgd",
            "import math\nimport torch.nn\nfrom numpy import array\nfrom manopt_torch.optim.base import X",
        ),
        ("optim.sgd", "from .base import X\nfrom . import base\nfrom ..manifolds.base import Manifold"),
        ("optim.base", "from manopt_torch.optim.groups import as_groups"),
        ("optim.__init__", "from manopt_torch.optim.sgd import RiemannianSGD\nfrom .base import X"),
        ("__init__", "from manopt_torch.parameter import constrain\nfrom .optim import RiemannianSGD"),
    ],
)
def test_levels_allow(module: str, source: str) -> None:
    assert level_faults(f"manopt_torch.{module}", source, MODULES) == []


def test_statements_are_counted() -> None:
    source = """
"Docstring."
import a
class C:
    "Docstring."
    x: int = 1; y = 2
    def f(self):
        "Docstring."
        if a:
            return 1
        "not a docstring"
"""
    assert statements(source) == 7  # class, x, y, def, if, return, the string that is no docstring


def test_budgets_by_file() -> None:
    assert budget("manopt_torch/optim/sgd.py") == 40
    assert budget("manopt_torch/optim/wrap.py") == 90
    assert budget("manopt_torch/optim/__init__.py") is None
    assert budget("manopt_torch/manifolds/spd.py") == 65
    assert budget("manopt_torch/linalg.py") is None
    assert budget("examples/pca.py") == 100


@pytest.mark.parametrize(
    "sources",
    [
        {"p.__init__": "__all__ = ['f']\ndef f(): pass"},
        {"p.__init__": "from p.a import f\n__all__ = ['f']", "p.a": "def f(): pass"},
        {"p.__init__": "from .a import g as f\n__all__ = ['f']", "p.a": "class g: pass"},
        {"p.__init__": "__all__ = ['f']"},
    ],
)
def test_docstring_rule_refuses(sources: dict[str, str]) -> None:
    assert len(docstring_faults(sources)) == 1


def test_docstring_rule_allows() -> None:
    sources = {
        "p.__init__": "from p.a import f, VALUE\nfrom p import a\n__all__ = ['VALUE', 'a', 'f']",
        "p.a": "VALUE = 1\n@overload\ndef f(): ...\ndef f():\n    'Doc.'\ndef private(): pass",
    }
    assert docstring_faults(sources) == []


@pytest.mark.parametrize("code", ["x.T", "x.t()", "x.mT @ y", "x.transpose(-1, -2)", "x.H", "f(x).swapaxes(-2, -1)"])
def test_transpose_rule_refuses(code: str) -> None:
    assert len(transposes(code)) == 1


@pytest.mark.parametrize("code", ["x.mH", "T = 3", "x.real", "torch.t", "self.tau"])
def test_transpose_rule_allows(code: str) -> None:
    assert [a for _, a in transposes(code)] == (["t"] if code == "torch.t" else [])
