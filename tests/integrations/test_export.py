"""Saved programs in a fresh process: with pairmix, without its compiled kernels, and without pairmix."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from pairmix import SPMGRU, SPMLinear
from pairmix.nn import merge_stages_

PREAMBLES = {
    "pairmix": "import pairmix",
    "no kernels": "import sys; sys.modules['pairmix._kernels'] = None; import pairmix",
    "no pairmix": "import sys; sys.modules['pairmix'] = None",
}
# Loads every program, runs it on its input, and says how far it is from what it gave where it was saved.
LOAD = """
import io, json, logging, pathlib, sys, torch
loaders = {
    "export": lambda path: torch.export.load(path).module(),
    "jit": torch.jit.load,
    "aoti": lambda path: torch._inductor.aoti_load_package(str(path)),
}
log = io.StringIO()  # torch.export tells there what is wrong
logging.getLogger("torch.export").addHandler(logging.StreamHandler(log))
results = {}
for path in pathlib.Path(sys.argv[1]).glob("*.program"):
    log.seek(0), log.truncate()
    x, expected = torch.load(path.with_suffix(".expected"))
    try:
        with torch.no_grad():
            y = loaders[path.stem.split()[-1]](path)(x)
        results[path.stem] = float(((y[0] if isinstance(y, tuple) else y) - expected).abs().max())
    except RuntimeError as error:
        results[path.stem] = f"{error} {log.getvalue()}"
print(json.dumps(results))
"""


def save(how, model, x, path):
    with torch.no_grad():
        y = model(x)
    torch.save((x, y[0] if isinstance(y, tuple) else y), path.with_suffix(".expected"))
    if how == "jit":
        torch.jit.save(torch.jit.trace(model, x, check_trace=False), path)
        return
    program = torch.export.export(model, (x,))
    if how == "export":
        with path.open("wb") as file:
            torch.export.save(program, file)
    else:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(path.with_suffix(".pt2")))
        path.symlink_to(package)


def mixed():
    return nn.Sequential(SPMLinear(12, 16), nn.ReLU(), SPMLinear(16, 7, rank=2)).eval()


def merged():
    model = nn.Sequential(SPMLinear(128, 192), nn.ReLU(), SPMLinear(192, 7)).eval()
    assert merge_stages_(model) == ["0", "2"]
    return model


PROGRAMS = {
    "mixed export": (mixed, (3, 12)),
    "mixed jit": (mixed, (3, 12)),
    "merged export": (merged, (3, 128)),
    "merged jit": (merged, (3, 128)),
    "named export": (lambda: SPMLinear(8, 8, impl="cpu"), (3, 8)),
    "gru export": (lambda: SPMGRU(4, 6), (5, 2, 4)),
}


def loaded(folder, preamble):
    command = [sys.executable, "-W", "ignore", "-c", f"{PREAMBLES[preamble]}\n{LOAD}", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def right(results):
    return {name for name, difference in results.items() if isinstance(difference, float) and difference < 1e-6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name, (make, shape) in PROGRAMS.items():
        save(name.split()[-1], make(), torch.randn(shape), folder / f"{name}.program")
    return folder


# What a tracer warns of is a check of shapes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # of torch's own copies
]


def test_with_pairmix(folder):
    results = loaded(folder, "pairmix")
    assert right(results) == PROGRAMS.keys(), results


def test_without_the_kernels(folder):
    results = loaded(folder, "no kernels")
    assert right(results) == PROGRAMS.keys() - {"named export"}, results
    complaint = "impl='cpu' cannot run here: pairmix was installed without its compiled kernels"
    assert complaint in results["named export"]


def test_without_pairmix(folder):
    """The messages are those that docs/export.md explains."""
    results = loaded(folder, "no pairmix")
    assert right(results) == {"merged export", "merged jit"}, results
    assert "failed to resolve torch.ops.pairmix.spm.default to an operator" in results["mixed export"]
    assert "Unknown builtin op: pairmix::spm" in results["mixed jit"]


def test_aot_inductor(request, tmp_path):
    if not request.config.getoption("--aoti"):
        pytest.skip("takes minutes: pytest --aoti")
    save("aoti", mixed(), torch.randn(3, 12), tmp_path / "mixed aoti.program")
    save("aoti", merged(), torch.randn(3, 128), tmp_path / "merged aoti.program")
    for preamble in ("pairmix", "no kernels"):
        results = loaded(tmp_path, preamble)
        assert len(right(results)) == 2, results
    results = loaded(tmp_path, "no pairmix")
    assert right(results) == {"merged aoti"}, results
    assert "Could not find schema for pairmix::spm" in results["mixed aoti"]
