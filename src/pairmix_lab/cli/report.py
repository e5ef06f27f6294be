"""`pairmix report` and `pairmix demo`: results on a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pairmix_lab import experiments
from pairmix_lab.cli.console import Out, clear_errors, console, show
from pairmix_lab.cli.train import Planned, run_all, with_options
from pairmix_lab.report import page
from pairmix_lab.report.runs import collect
from pairmix_lab.training import runs


def report(
    results: Annotated[list[Path], typer.Argument(help="Results, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    pictures: Annotated[Path | None, typer.Option(help="A folder for the pictures, as SVG and PNG.")] = None,
) -> None:
    """Put the results of the experiments beside the paper's, on one page that needs no network."""
    with clear_errors():
        page.write(collect(results, experiments.EXPERIMENTS), out, pictures)
    console.print(f"Wrote {out}" + ("" if pictures is None else f" and the pictures in {pictures}"))


def make_demo() -> Callable[..., None]:
    """The command `pairmix demo`, of the first experiment that has one."""
    experiment = next(one for one in experiments.EXPERIMENTS if one.demo is not None)
    assert experiment.demo is not None

    def demo(out: Out = Path("runs/demo"), **own: Any) -> None:
        """Train a dense and an SPM student on the same task and compare them."""
        assert experiment.demo is not None
        configs, text = experiment.demo(**own)
        console.print(text)
        with clear_errors():
            for config in configs:
                runs.discard(out, config)  # those of an earlier demo
        run_all(experiment, [Planned(config, out) for config in configs], resume=False)
        with clear_errors():
            found = collect([runs.result_path(out, config) for config in configs], experiments.EXPERIMENTS)
            show(next(iter(experiment.tables(found))).table)
            page.write(found, out / "report.html")
        console.print(f"Wrote {out / 'report.html'}: open it in a browser.")

    return with_options(demo, experiment.demo)
