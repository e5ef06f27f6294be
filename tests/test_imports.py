"""Who may import whom: only along the arrows."""

import ast
from pathlib import Path

import pytest

import pairmix

PACKAGE = Path(pairmix.__file__).parent

# cli -> experiments, bench, report -> nn -> functional -> ops -> schedule
MAY_IMPORT = {
    "_kernels": set(),
    "schedule": set(),
    "ops": {"schedule", "_kernels"},
    "functional": {"ops", "schedule"},
    "nn": {"functional", "schedule"},
    "files": set(),
    "results": {"", "files", "ops"},  # of pairmix itself only the version
    "experiments": {"nn", "functional", "schedule", "results", "files"},
    "report": {"results", "files"},
    "bench": {"experiments", "nn", "functional", "ops", "schedule", "results"},
    "cli": {"experiments", "bench", "report", "results", "nn", "functional", "ops", "schedule"},
    "__main__": {"cli"},
    "": {"nn", "functional", "ops", "schedule"},
}
IMPLEMENTATIONS = {"reference", "cpu"}


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imported(path):
    """The modules of pairmix that a file imports, without the leading package: "ops.reference", "" for pairmix."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "pairmix":
                path = PACKAGE / rest.replace(".", "/")
                is_module = path.is_dir() or any(path.with_suffix(suffix).exists() for suffix in (".py", ".pyi"))
                yield rest if is_module else rest.rpartition(".")[0]


def part(module):
    return module.partition(".")[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_imports_follow_the_arrows(path):
    own = module_name(path)
    for module in imported(path):
        if part(module) != part(own):
            assert part(module) in MAY_IMPORT[part(own)], f"{own} imports {module}"


def test_implementations_do_not_import_each_other():
    for name in IMPLEMENTATIONS:
        others = {f"ops.{other}" for other in IMPLEMENTATIONS - {name}} | {"ops.library"}
        assert not others & set(imported(PACKAGE / "ops" / f"{name}.py"))


def test_the_public_names():
    recurrent = {f"SPM{kind}{cell}" for kind in ("RNN", "GRU", "LSTM") for cell in ("", "Cell")}
    modules = {"SPMLinear", "SPMMultiheadAttention", "SPMTransformerEncoderLayer"}
    others = {"Schedule", "empty_cache", "functional", "nn"}
    assert set(pairmix.__all__) == recurrent | modules | others
    assert all(hasattr(pairmix, name) for name in pairmix.__all__)


def test_the_library_does_not_need_its_extras():
    """Only what the command is made of may import what comes with an extra."""
    extras = {"typer", "rich", "matplotlib", "jinja2", "scipy", "sklearn", "pooch", "tensorboard", "safetensors"}
    allowed = {"cli", "experiments", "report"}
    for path in PACKAGE.rglob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        if {name.partition(".")[0] for name in names} & extras:
            assert part(module_name(path)) in allowed
