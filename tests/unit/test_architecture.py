"""The shape of the house: who may import whom, what needs no JAX, and how long a file may be.

The import order and the banned modules are read from pyproject.toml, where import-linter and ruff read them too.
"""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import meshwright

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "meshwright"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]

# From the front doors down; a module imports only what comes after it.
LAYERS = tuple(layer.strip("()") for layer in CONFIG["importlinter"]["contracts"][0]["layers"])
UNSTABLE_JAX = tuple(CONFIG["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])

JAX_FREE = ("cluster", "cost", "memory", "plan", "report", "resharding", "schedule", "solve")
# What a package must not know although it stands above it: the last column of the table of packages.
STRANGERS = {
    "program": {"cluster"},
    "solve": set(LAYERS) - {"solve"},
    "schedule": {"_jax"},
    "lowering": {"search"},
    "runtime": {"search"},
}
MAX_LINES = 500


class Import(NamedTuple):
    """One imported module as the source file states it; `module` is absolute, members included."""

    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"

    def within(self, prefix: str) -> bool:
        return f"{self.module}.".startswith(f"{prefix}.")


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imports_of(file: Path, source: str) -> Iterator[Import]:
    """Every import in a file of the package, also inside functions; `file` is relative to the folder of the package."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = list(file.parent.parts)[: len(file.parent.parts) - node.level + 1] if node.level else []
            for alias in node.names:
                yield Import(file, node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name]))


def uses_of(file: Path, source: str) -> Iterator[Import]:
    """Imports, and dotted names such as `jax.core.Tracer` reached through a plain `import jax`."""
    yield from imports_of(file, source)
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield Import(file, node.lineno, f"{node.value.id}.{node.attr}")


def layer_of(file: Path) -> str:
    """`meshwright/plan/presets.py` belongs to plan, `meshwright/api.py` to api."""
    return file.parts[1].removesuffix(".py")


def order_violations(imports: Iterable[Import]) -> list[str]:
    """The imports that go up, that reach for a stranger, or that go through the package's own front door."""
    found = []
    for one in imports:
        source = layer_of(one.file)
        if source in ("__init__", "__main__") or not one.within("meshwright"):
            continue
        target = one.module.split(".")[1] if "." in one.module else ""
        if target.startswith("__"):
            continue
        if target not in LAYERS:
            found.append(f"{one}: import it from the module it lives in, not from meshwright")
        elif LAYERS.index(target) < LAYERS.index(source):
            found.append(f"{one}: {target} stands above {source}")
        elif target in STRANGERS.get(source, ()):
            found.append(f"{one}: {source} knows nothing of {target}")
    return found


def unstable_violations(uses: Iterable[Import]) -> list[str]:
    """The uses of JAX's unstable parts outside `_jax`."""
    return [str(use) for use in uses if layer_of(use.file) != "_jax" and any(use.within(name) for name in UNSTABLE_JAX)]


def exists(module: str) -> bool:
    return (PACKAGE / f"{module}.py").exists() or (PACKAGE / module / "__init__.py").exists()


def sources() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE.parent), path.read_text()


def test_every_module_has_a_place_in_the_order() -> None:
    homes = {layer_of(file) for file, _ in sources()} - {"__init__", "__main__"}
    assert homes <= set(LAYERS), f"not in the layers of pyproject.toml: {sorted(homes - set(LAYERS))}"


def test_imports_follow_the_order() -> None:
    found = order_violations(one for file, source in sources() for one in imports_of(file, source))
    assert not found, "\n".join(found)


def test_unstable_jax_stays_behind_its_door() -> None:
    found = unstable_violations(use for file, source in sources() for use in uses_of(file, source))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("meshwright/plan/presets.py", "from meshwright.search import intra_op"),
        ("meshwright/plan/presets.py", "from ..search.intra_op import search"),
        ("meshwright/plan/presets.py", "def late():\n    from .. import search"),
        ("meshwright/plan/presets.py", "import meshwright.api"),
        ("meshwright/plan/presets.py", "from meshwright import parallelize"),
        ("meshwright/_jax/mesh.py", "from ..cluster import Cluster"),
        ("meshwright/program/trace.py", "from ..cluster import Cluster"),
        ("meshwright/solve/milp.py", "from meshwright.plan import Plan"),
        ("meshwright/api.py", "from .cli import main"),
    ],
)
def test_a_wrong_order_is_found(file: str, source: str) -> None:
    assert len(order_violations(imports_of(Path(file), source))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "meshwright/search/result.py",
            "from ..plan import Plan\nfrom .layers import cut\nfrom . import layers",
        ),
        ("meshwright/search/intra/problem.py", "import numpy as np\nfrom meshwright._jax.grad import value_and_grad"),
        ("meshwright/cli.py", "from meshwright import __version__, api"),
        ("meshwright/plan/parts/stage.py", "from ..validate import check\nfrom ...sharding import Spec"),
    ],
)
def test_a_right_order_passes(file: str, source: str) -> None:
    assert order_violations(imports_of(Path(file), source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jaxlib",
        "from jax._src import core",
        "from jax import core",
        "import jax.extend.core",
        "from jax.interpreters.partial_eval import x",
        "import jax\njax.core.Tracer",
    ],
)
def test_unstable_jax_is_found(source: str) -> None:
    assert unstable_violations(uses_of(Path("meshwright/program/trace.py"), source))
    assert not unstable_violations(uses_of(Path("meshwright/_jax/trace.py"), source))


# Imports a module and all modules under it, then prints what of JAX came along.
_IMPORT_ALL = """
import importlib, pkgutil, sys
root = importlib.import_module(sys.argv[1])
if sys.argv[1] != "meshwright":
    for module in pkgutil.walk_packages(getattr(root, "__path__", []), root.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib")))
"""


@pytest.mark.parametrize(
    "module",
    ["meshwright", *(f"meshwright.{name}" for name in JAX_FREE if exists(name))],
)
def test_imports_without_jax(module: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    child = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, module], env=environment, capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == []


@pytest.mark.parametrize("name", [name for name, home in meshwright._HOME.items() if exists(home)])
def test_a_public_name_resolves(name: str) -> None:
    assert name in dir(meshwright)
    assert getattr(meshwright, name) is getattr(meshwright, name)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'paralelize'") as caught:
        meshwright.paralelize  # noqa: B018
    assert caught.value.name == "paralelize"
    assert caught.value.obj is meshwright


def tree() -> Iterator[Path]:
    """The files of the project: no environments, caches or other hidden folders, except continuous integration's."""
    for top in sorted(ROOT.iterdir()):
        if not top.name.startswith(".") or top.name in (".ci", ".gitignore"):
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts and not path.is_symlink():
                    yield path


def test_no_file_is_too_long() -> None:
    lengths = {path.relative_to(ROOT): path.read_text().count("\n") for path in tree() if path.suffix == ".py"}
    assert lengths, "no Python file found"
    found = {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not found, f"over {MAX_LINES} lines: {found}"


def test_no_registry_address() -> None:
    # Joined here so that this file does not hold what it looks for.
    needles = ["".join(parts).encode() for parts in (("pypi", ".org"), ("python", "hosted.org"), ("index-", "url"))]
    files = list(tree())
    assert ROOT / "pyproject.toml" in files
    found = [str(path.relative_to(ROOT)) for path in files if any(needle in path.read_bytes() for needle in needles)]
    assert not found, f"a registry's address in {found}"
