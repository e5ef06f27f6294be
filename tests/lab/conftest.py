import pytest
import synthetic

from pairmix_lab.experiments import EXPERIMENTS
from pairmix_lab.report import page
from pairmix_lab.report.runs import collect


@pytest.fixture
def collected(tmp_path_factory):
    """Runs as a report sees them, after a trip through files."""
    return lambda *runs: collect([synthetic.write(tmp_path_factory.mktemp("runs"), *runs)], EXPERIMENTS)


@pytest.fixture(scope="session")
def full_page(tmp_path_factory):
    """A page with something of everything, and the folder of its pictures."""
    folder = tmp_path_factory.mktemp("report")
    runs = collect([synthetic.write(folder / "runs", *synthetic.everything())], EXPERIMENTS)
    page.write(runs, folder / "report.html", folder / "pictures")
    return folder / "report.html"
