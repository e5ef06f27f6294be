"""Which module may import which: only along the arrows."""

import ast
import sys
from pathlib import Path

import pytest

import pairmix
import pairmix_lab
from pairmix import ops

PACKAGES = {package.__name__: Path(package.__file__).parent for package in (pairmix, pairmix_lab)}

# pairmix_lab -> convert, optim -> fit, adapters -> nn -> functional -> ops -> schedule
MAY_IMPORT = {
    "pairmix": {
        "_kernels": set(),
        "pairings": set(),
        "schedule": {"pairings"},
        "ops": {"schedule", "_kernels"},
        "functional": {"ops", "schedule"},
        "places": set(),
        "nn": {"functional", "places", "schedule"},
        "tables": set(),
        "dense": set(),
        "adapters": {"dense", "nn", "functional", "places", "schedule", "tables"},
        "optim": {"nn", "adapters", "tables"},
        "fit": {"dense", "nn", "pairings", "schedule"},
        "convert": {"dense", "fit", "functional", "nn", "places", "tables"},
        "doctor": {"", "functional", "ops"},  # of pairmix itself only the version
        "__main__": {"doctor"},
        "": {"nn", "functional", "ops", "optim", "schedule", "adapters", "convert", "fit"},
    },
    # cli -> bench -> experiments -> report, training -> contenders
    "pairmix_lab": {
        "": set(),
        "files": set(),
        "contenders": set(),
        "results": {"files"},
        "training": {"results", "files"},
        "report": {"contenders", "results", "files"},
        "experiments": {"contenders", "training", "report", "files"},
        "analyse": {"report"},
        "bench": {"analyse", "contenders", "training", "report", "experiments"},
        "cli": {"analyse", "bench", "experiments", "training", "report", "results", "files"},
    },
}
TORCH_AND_NUMPY = {"torch", "numpy"}
OPTIONAL = {"safetensors", "tqdm", "triton"}  # imported in the functions that need them
GPU = PACKAGES["pairmix"] / "ops/triton"  # of which only the package itself is imported before the first call


def modules():
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield pytest.param(name, path, id=f"{name}.{module_name(folder, path)}".rstrip("."))


def module_name(folder, path):
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imported(path, nodes=ast.walk):
    """The modules that a file imports, each as its package and the rest: ("pairmix", "ops.reference")."""
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package in PACKAGES:
                found = PACKAGES[package] / rest.replace(".", "/")
                is_module = found.is_dir() or any(found.with_suffix(suffix).exists() for suffix in (".py", ".pyi"))
                rest = rest if is_module else rest.rpartition(".")[0]
            yield package, rest


def part(module):
    return module.partition(".")[0]


@pytest.mark.parametrize(("package", "path"), list(modules()))
def test_imports_follow_the_arrows(package, path):
    own = part(module_name(PACKAGES[package], path))
    for other, module in imported(path):
        if other == package and part(module) != own:
            assert part(module) in MAY_IMPORT[package][own], f"{own} imports {module}"
        assert (package, other) != ("pairmix", "pairmix_lab") or own == "__main__", f"{own} imports the lab"


def test_implementations_do_not_import_each_other():
    implementations = {impl.forward.__module__.removeprefix("pairmix.") for impl in ops.IMPLS.values()}
    assert len(implementations) == len(ops.IMPLS)
    for name in implementations:
        path = PACKAGES["pairmix"] / f"{name.replace('.', '/')}.py"
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        others = implementations - {name} | {"ops.library"}
        assert not others & {module for package, module in imported(path) if package == "pairmix"}


def test_the_public_names():
    recurrent = {f"SPM{kind}{cell}" for kind in ("RNN", "GRU", "LSTM") for cell in ("", "Cell")}
    modules = {"SPMFeedForward", "SPMLinear", "SPMMultiheadAttention", "SPMTransformerEncoderLayer"}
    others = {"Schedule", "adapters", "convert_", "empty_cache", "fit", "functional", "nn", "param_groups", "restore_"}
    assert set(pairmix.__all__) == recurrent | modules | others
    assert all(hasattr(pairmix, name) for name in pairmix.__all__)


def test_the_library_needs_torch_and_numpy_only():
    for path in PACKAGES["pairmix"].rglob("*.py"):
        everywhere, at_import = (
            {package for package, _ in imported(path, nodes)} - sys.stdlib_module_names - PACKAGES.keys()
            for nodes in (ast.walk, ast.iter_child_nodes)
        )
        assert everywhere <= TORCH_AND_NUMPY | OPTIONAL, path
        is_kernel = path.parent == GPU and path.name != "__init__.py"
        assert at_import <= TORCH_AND_NUMPY | ({"triton"} if is_kernel else set()), path
